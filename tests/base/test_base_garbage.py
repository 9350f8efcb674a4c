"""What survived a full collection is not walked again; a cycle that dies there is found in the end."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, weakref
from tidemill.base.garbage import TAKE_BACK_EVERY, keep_pauses_short

class Node: pass

def cycle():
    a, b = Node(), Node()
    a.other, b.other = b, a
    return a

keep_pauses_short()
kept = [cycle() for _ in range(1000)]
gc.collect()
assert gc.get_freeze_count() > 2000
assert len(gc.get_objects()) < 1000, "what survived is walked again"
fresh = weakref.ref(cycle())
gc.collect()
assert fresh() is None, "a young cycle is found at once"
dead = [weakref.ref(each) for each in kept]
kept.clear()
for _ in range(TAKE_BACK_EVERY):
    gc.collect()
assert not any(ref() for ref in dead), "a cycle that dies among what was set aside is found in the end"
"""


def test_pauses_are_short_and_nothing_leaks_for_ever() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
