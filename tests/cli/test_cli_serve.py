"""The modules that the node's process loads, and those that it must not load while it serves."""

from __future__ import annotations

import subprocess
import sys

from support.waiting import DEADLINE_S

ARROW = """
import sys
from tidemill.base.libraries import hide_modules
hide_modules("pandas", "hypothesis")
import tidemill.node.node
import numpy as np, pyarrow as pa, pyarrow.json, pyarrow.parquet
pa.array(np.arange(3)); pa.array(["a"]); pa.table({"a": [1, 2]}).filter(pa.array([True, False])).to_pylist()
loaded = {name.partition(".")[0] for name in sys.modules}
sys.exit(("pandas" in loaded) + 2 * ("hypothesis" in loaded))
"""


def test_neither_pandas_nor_hypothesis_is_loaded_into_a_node() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ARROW], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    without = ARROW.replace('hide_modules("pandas", "hypothesis")\n', "")
    assert (
        subprocess.run([sys.executable, "-c", without], capture_output=True, timeout=DEADLINE_S, check=False).returncode
        == 3
    )
