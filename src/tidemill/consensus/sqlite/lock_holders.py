"""Find the processes that lock a file, for the error text that an operator reads when a lock is not released.

    /proc/locks      lines `n: POSIX|FLOCK|OFDLCK … READ|WRITE pid major:minor:inode start end`; a blocked waiter
                     has `->` after the number. A pid of another pid namespace is 0 or −1.
    /proc/PID/stat   the state follows the last `)`: T, t = stopped, Z = zombie, D = disk wait

Without /proc no process is named.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

COMMAND_CHARS = 120
DEAD = "dead"
STATES = {"T": "stopped", "t": "stopped", "Z": DEAD, "D": "waiting for a disk"}


class LockHolder(msgspec.Struct, frozen=True):
    """A process that holds a lock. `state` is "" for one that runs or sleeps normally. pid 0: not visible from here."""

    pid: int
    command: str
    state: str

    def __str__(self) -> str:
        if not self.pid:
            return "holder_pid=unknown (another container?)"
        state = f" state={self.state}" if self.state else ""
        return f"holder_pid={self.pid} holder_command={self.command!r}{state}"


def lock_holders(path: Path) -> list[LockHolder]:
    """Return the other processes with a lock on the file, or on SQLite's -shm and -wal files next to it."""
    inodes = set()
    for name in (path, path.with_name(path.name + "-shm"), path.with_name(path.name + "-wal")):
        with contextlib.suppress(OSError):
            inodes.add(os.stat(name).st_ino)
    pids: dict[int, None] = {}
    for pid, inode in _held_locks():
        if inode in inodes and pid != os.getpid():
            pids[max(0, pid)] = None
    return [_holder(pid) for pid in pids]


def foreign_lock_holders(database: Path) -> list[LockHolder]:
    """Return the processes that lock the database's own files without hosting its sequencer: commits wait for them."""
    hosts = {holder.pid for holder in lock_holders(database.with_name(database.name + ".lock"))}
    return [holder for holder in lock_holders(database) if holder.pid not in hosts]


def describe_lock_holder(path: Path) -> str:
    """Return `holder_pid=… holder_command=…` of the first other holder, or `holder_pid=unknown`."""
    found = lock_holders(path)
    return str(found[0]) if found else "holder_pid=unknown"


def describe_delaying_process(database: Path) -> str:
    """Name the process that delays the sequencer's answer, as `describe_lock_holder` does.

    It is one that locks the database's own files, or else the sequencer's host.
    """
    found = foreign_lock_holders(database)
    return str(found[0]) if found else describe_lock_holder(database.with_name(database.name + ".lock"))


def _held_locks() -> list[tuple[int, int]]:
    """Return (pid, inode) of every lock held on this machine."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            if "->" not in fields:
                found.append((int(fields[4]), int(fields[5].rpartition(":")[2])))
    return found


def _holder(pid: int) -> LockHolder:
    command, state = "", ""
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        command = " ".join(said.split())
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        state = fields.split()[0]
    return LockHolder(pid, command[:COMMAND_CHARS], STATES.get(state, ""))
