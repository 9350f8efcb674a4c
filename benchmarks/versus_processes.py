"""Use of the processes of one stack, from /proc: processor time by role, memory, and the load of the whole machine.

The time of a child that ended counts for the parent that waited for it, so the sum over a tree loses nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    parent: int
    cpu_s: float
    """User and system time, including children that ended and were waited for."""


class Used(NamedTuple):
    cpu_s: dict[str, float]
    """Processor time by role since the start of the processes."""
    busy_s: float
    """Processor time of everything on the machine."""
    stolen_s: float


Naming = Callable[[int, str], str]
"""(process, role of its parent) → its role; an empty role is that of the parent."""


def parse_stat(text: str) -> Process:
    """Parse the text of /proc/PID/stat."""
    fields = text.rpartition(")")[2].split()
    return Process(int(fields[1]), sum(map(int, fields[11:15])) / TICKS_PER_S)


def processes() -> dict[int, Process]:
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found[int(path.name)] = parse_stat((path / "stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended after the listing
    return found


def roles(table: Mapping[int, Process], roots: Mapping[int, str], name: Naming) -> dict[int, str]:
    """Return the role of every process at or below the roots that run."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found: dict[int, str] = {}
    ahead = [(pid, role) for pid, role in roots.items() if pid in table]
    while ahead:
        pid, role = ahead.pop()
        found[pid] = role
        ahead += [(child, name(child, role) or role) for child in children.get(pid, ()) if child not in roots]
    return found


def used(roots: Mapping[int, str], name: Naming) -> Used:
    table = processes()
    cpu_s: dict[str, float] = {}
    for pid, role in roles(table, roots, name).items():
        cpu_s[role] = cpu_s.get(role, 0.0) + table[pid].cpu_s
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return Used(cpu_s, (sum(ticks[:3]) + sum(ticks[5:7])) / TICKS_PER_S, ticks[7] / TICKS_PER_S)


def percent_of_a_core(before: Used, after: Used, passed_s: float) -> dict[str, float]:
    """Return the use between two samples by role; `other` is the rest of the machine, `stolen` its host's."""
    cpu_s = {role: after.cpu_s.get(role, 0.0) - before.cpu_s.get(role, 0.0) for role in {**before.cpu_s, **after.cpu_s}}
    cpu_s["other"] = after.busy_s - before.busy_s - sum(cpu_s.values())
    cpu_s["stolen"] = after.stolen_s - before.stolen_s
    return {role: round(100 * value / passed_s, 1) for role, value in sorted(cpu_s.items())}


def memory_mib(roots: Mapping[int, str], name: Naming) -> dict[str, dict[str, float]]:
    """Return the resident and the proportional size (PSS) by role, and its number of processes."""
    found: dict[str, dict[str, float]] = {}
    for pid, role in roles(processes(), roots, name).items():
        sizes = found.setdefault(role, {"processes": 0, "rss_mib": 0, "pss_mib": 0})
        try:
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended after the listing
        sizes["processes"] += 1
        sizes["rss_mib"] += int(lines["Rss"].split()[0]) >> 10
        sizes["pss_mib"] += int(lines["Pss"].split()[0]) >> 10
    return found


def command(pid: int) -> str:
    """Return the command line with spaces between the arguments; empty for a process that ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def disk_mib(directory: Path) -> int:
    """Return the allocated size of all files below a directory; a file with several links counts once."""
    blocks: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(directory):
        for each in names:
            try:
                found = os.lstat(os.path.join(folder, each))
            except FileNotFoundError:
                continue  # deleted after the listing
            blocks[found.st_dev, found.st_ino] = found.st_blocks
    return sum(blocks.values()) * 512 >> 20
