"""Use of some processes and of each of their threads, from /proc: processor time, and how often a thread left the
processor voluntarily, which is how often it was woken.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from upsert_tree import TICK_S, stat


class Used(NamedTuple):
    who: str
    tid: int
    cpu_s: float
    wakes: int


class Process(NamedTuple):
    kind: str
    cpu_s: float
    """Processor time, including threads that have ended since."""
    threads: list[Used]


class Threads:
    """Threads of processes since the creation of this object. `kinds`: process → its kind."""

    def __init__(self, kinds: Mapping[int, str]) -> None:
        self._kinds = kinds
        self._cpu_s = {pid: _cpu_s(stat(pid)) for pid in kinds}
        self._threads = {pid: _threads(pid) for pid in kinds}

    def spent(self) -> list[Process]:
        """Return the use of each process that still exists."""
        out = []
        for pid, kind in self._kinds.items():
            if fields := stat(pid):
                before = self._threads[pid]
                zero = Used("", 0, 0.0, 0)
                threads = [
                    Used(now.who, tid, now.cpu_s - before.get(tid, zero).cpu_s, now.wakes - before.get(tid, zero).wakes)
                    for tid, now in _threads(pid).items()
                ]
                out.append(Process(kind, _cpu_s(fields) - self._cpu_s[pid], threads))
        return out


def _cpu_s(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) * TICK_S if fields else 0.0


def _threads(pid: int) -> dict[int, Used]:
    """Return the use by thread id, empty for a process that has ended."""
    found = {}
    try:
        process = Path(f"/proc/{pid}/comm").read_text().strip()
        for task in Path(f"/proc/{pid}/task").iterdir():
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
            status = (task / "status").read_text()
            wakes = int(status.partition("\nvoluntary_ctxt_switches:")[2].split(None, 1)[0])
            tid = int(task.name)
            found[tid] = Used(f"{process} {pid} {name}", tid, _cpu_s(fields.split()), wakes)
    except OSError:
        pass
    return found
