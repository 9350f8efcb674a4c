from __future__ import annotations

from pathlib import Path

import pytest
from toy import Toy


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)
