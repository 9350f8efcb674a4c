"""Processor time and memory of a process and all below it, from /proc: by kind, driver, JVM, workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
KINDS = ("driver", "jvm", "workers")


class Spent(NamedTuple):
    cpu_s: dict[str, float]
    peak_mib: dict[str, int]
    """Each process's own peak since `begin`; of several workers the sum."""


class Tree:
    def __init__(self, pid: int) -> None:
        self._root = pid
        self._before: dict[str, float] = dict.fromkeys(KINDS, 0.0)

    def begin(self) -> None:
        """From now on."""
        self._before = self._cpu_s()
        for pid in self._kinds():
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # peak := resident now
            except OSError:
                continue  # it ended meanwhile

    def spent(self) -> Spent:
        now = self._cpu_s()
        peak = dict.fromkeys(KINDS, 0)
        for pid, kind in self._kinds().items():
            peak[kind] += _peak_mib(pid)
        return Spent({kind: now[kind] - self._before[kind] for kind in KINDS}, peak)

    def _cpu_s(self) -> dict[str, float]:
        out = dict.fromkeys(KINDS, 0.0)
        for pid, kind in self._kinds().items():
            fields = _stat(pid)
            if fields:
                # utime, stime, and those of children that ended.
                out[kind] += sum(int(fields[at]) for at in (11, 12, 13, 14)) * _TICK_S
        return out

    def _kinds(self) -> dict[int, str]:
        parents = {int(p.name): _stat(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()}
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


def _stat(pid: int) -> list[str]:
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
