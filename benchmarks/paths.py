"""Search path of the benchmarks: importing this module makes `demo` and the test helpers in `tests` importable."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
