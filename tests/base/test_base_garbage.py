"""Garbage collector tuning: survivors of a full collection are not traversed again, yet a cycle that dies later is
still found.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.waiting import DEADLINE_S

CODE = """
import gc, weakref
from tidemill.base.runtime import gc_tuning
from tidemill.base.runtime.gc_tuning import install_gc_tuning

class Node: pass

def cycle():
    a, b = Node(), Node()
    a.other, b.other = b, a
    return a

install_gc_tuning()
kept = [cycle() for _ in range(1000)]
gc.collect()
assert gc.get_freeze_count() > 2000
assert len(gc.get_objects()) < 1000, "what survived is walked again"
fresh = weakref.ref(cycle())
gc.collect()
assert fresh() is None, "a young cycle is found at once"
dead = [weakref.ref(each) for each in kept]
kept.clear()
gc.collect()
assert all(ref() is not None for ref in dead), "what was set aside is not walked"
{until_it_is_taken_back}
assert not any(ref() for ref in dead), "a cycle that dies among what was set aside is found in the end"
"""
GROWTH = """
heap = [[] for _ in range(2 * gc_tuning.GROWTH_MIN)]
for _ in range(gc_tuning.GROWTH_CHECK_EVERY):
    gc.collect()
"""
ALWAYS = """
gc_tuning.UNFREEZE_EVERY = 100
for _ in range(100):
    gc.collect()
"""


@pytest.mark.parametrize("until", [GROWTH, ALWAYS], ids=["the heap grew by half", "after many collections"])
def test_pauses_are_short_and_nothing_leaks_for_ever(until: str) -> None:
    code = CODE.replace("{until_it_is_taken_back}", until)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
