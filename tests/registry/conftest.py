from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.registry.world import Rest


@pytest.fixture
def rest() -> Iterator[Rest]:
    found = Rest()
    yield found
    found.close()
