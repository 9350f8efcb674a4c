"""Freed memory stays with the process for its next work until the process becomes idle."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from support.waiting import DEADLINE_S
from tidemill.base.runtime import memory_budget
from tidemill.base.runtime.memory_budget import IdleDetector, release_freed_memory, retain_freed_memory

CHILD = """
import json, resource, sys, threading
from tidemill.base.runtime.memory_budget import release_freed_memory, retain_freed_memory, resident_bytes

if sys.argv[1] == "keep":
    assert retain_freed_memory(*map(int, sys.argv[2:]))

def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (1 << 20) for _ in range(64)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults = []
for _ in range(4):
    thread = threading.Thread(target=lambda: faults.append(work()))
    thread.start()
    thread.join()
kept = resident_bytes()
release_freed_memory()
print(json.dumps({"faults": faults, "given_mib": (kept - resident_bytes()) >> 20}))
"""
PAGES = 64 << 8
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library: nothing is kept, nothing lost")


def child(how: str, *kept_bytes: str) -> dict[str, list[int]]:
    run = subprocess.run(
        [sys.executable, "-c", CHILD, how, *kept_bytes], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    found: dict[str, list[int]] = json.loads(run.stdout)
    return found


@glibc
def test_pages_that_were_touched_once_are_not_touched_anew_by_another_thread() -> None:
    found = child("keep")
    assert found["faults"][-1] < PAGES // 10, found
    assert found["given_mib"] > 32, found  # type: ignore[operator]
    assert child("as it is")["faults"][-1] > found["faults"][-1], "else nothing has to be told to keep them"


@glibc
def test_no_more_is_kept_than_may_be() -> None:
    found = child("keep", str(8 << 20))
    assert found["faults"][-1] > PAGES // 2, found
    assert found["given_mib"] < 16, found  # type: ignore[operator]


def test_another_c_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        pass

    monkeypatch.setattr(memory_budget.ctypes, "CDLL", lambda _: Other())
    assert not retain_freed_memory()
    release_freed_memory()


def test_a_rest_begins_once_after_work() -> None:
    rest = IdleDetector(30.0)
    assert not rest.has_become_idle(0, 1_000.0), "nothing was ever worked"
    assert [rest.has_become_idle(5, at) for at in (1_000.0, 1_029.0, 1_030.0, 1_031.0, 2_000.0)] == [
        False, False, True, False, False,
    ]  # fmt: skip
    later = ((6, 2_001.0), (7, 2_030.0), (7, 2_031.0), (7, 2_060.0))
    assert [rest.has_become_idle(done, at) for done, at in later] == [
        False, False, False, True,
    ]  # fmt: skip
    # A table that reopens starts its counter at zero, which counts as work too.
    assert [rest.has_become_idle(2, at) for at in (3_000.0, 3_030.0)] == [False, True]
