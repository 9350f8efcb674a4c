from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import FakeBroker


@pytest.fixture
def fake_broker() -> Iterator[FakeBroker]:
    broker = FakeBroker()
    yield broker
    broker.close()
