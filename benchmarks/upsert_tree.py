"""Processor time and memory of a process and all below it, from /proc: by kind, driver, JVM, workers."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
LOOK_S = 0.5
KINDS = ("driver", "jvm", "workers")


class Spent(NamedTuple):
    cpu_s: dict[str, float]
    peak_mib: dict[str, int]
    """Each process's own peak since `begin`; of several workers the sum."""


class Tree:
    """A process tree, sampled twice a second: the time of a worker that ends is lost, because its parent does not
    wait for it.
    """

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[str, float]] = {}
        self._before: dict[int, float] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self) -> None:
        """Measure from now on."""
        self._look()
        self._before = {pid: cpu_s for pid, (_, cpu_s) in self._seen.items()}
        for pid in self.kinds():
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # peak := resident now
            except OSError:
                continue  # it ended in the meantime

    def spent(self) -> Spent:
        self._look()
        cpu_s = dict.fromkeys(KINDS, 0.0)
        for pid, (kind, now_s) in self._seen.items():
            cpu_s[kind] += now_s - self._before.get(pid, 0.0)
        peak = dict.fromkeys(KINDS, 0)
        for pid, kind in self.kinds().items():
            peak[kind] += _peak_mib(pid)
        return Spent(cpu_s, peak)

    def _watch(self) -> None:
        while Path(f"/proc/{self._root}").exists():
            self._look()
            threading.Event().wait(LOOK_S)

    def _look(self) -> None:
        with self._lock:
            for pid, kind in self.kinds().items():
                fields = stat(pid)
                if fields:
                    self._seen = {**self._seen, pid: (kind, (int(fields[11]) + int(fields[12])) * TICK_S)}

    def kinds(self) -> dict[int, str]:
        """Process → what it is, of those that run now."""
        parents = {int(p.name): stat(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()}
        children: dict[int, list[int]] = {}
        for pid, fields in parents.items():
            if fields:
                children.setdefault(int(fields[1]), []).append(pid)
        out: dict[int, str] = {}
        ahead = [(self._root, "driver")]
        while ahead:
            pid, kind = ahead.pop()
            out[pid] = kind
            for child in children.get(pid, ()):
                java = "java" in _command(child)
                ahead.append((child, "jvm" if java else "workers" if kind != "driver" else "driver"))
        return out


def stat(pid: int) -> list[str]:
    """The fields behind the name: state, parent, …; none of a process that ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _peak_mib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM")), 0)
