"""Who holds a file: for the sentence that an operator reads when a lock is not given up.

    /proc/locks      lines `n: POSIX|FLOCK|OFDLCK … READ|WRITE pid major:minor:inode start end`; a blocked waiter
                     has `->` after the number. A pid of another pid namespace is 0 or −1.
    /proc/PID/stat   the state stands after the last `)`: T, t = stopped, Z = dead and not waited for, D = disk wait

Where there is no /proc, nobody is named.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

COMMAND_CHARS = 120
STATES = {"T": "stopped", "t": "stopped", "Z": "dead", "D": "waiting for a disk"}


class Holder(msgspec.Struct, frozen=True):
    """`state` is "" for a process that runs or sleeps as processes do. pid 0: not visible from here."""

    pid: int
    command: str
    state: str

    def __str__(self) -> str:
        if not self.pid:
            return "holder_pid=unknown (another container?)"
        state = f" state={self.state}" if self.state else ""
        return f"holder_pid={self.pid} holder_command={self.command!r}{state}"


def lock_holders(path: Path) -> list[Holder]:
    """Other processes with a lock on the file, or on what SQLite keeps beside it."""
    inodes = set()
    for name in (path, path.with_name(path.name + "-shm"), path.with_name(path.name + "-wal")):
        with contextlib.suppress(OSError):
            inodes.add(os.stat(name).st_ino)
    pids: dict[int, None] = {}
    for pid, inode in _locks():
        if inode in inodes and pid != os.getpid():
            pids[max(0, pid)] = None
    return [_holder(pid) for pid in pids]


def intruders(database: Path) -> list[Holder]:
    """Who has locked the database's own files though it does not host its sequencer: commits wait for it."""
    hosts = {holder.pid for holder in lock_holders(database.with_name(database.name + ".lock"))}
    return [holder for holder in lock_holders(database) if holder.pid not in hosts]


def who_locks(path: Path) -> str:
    """`holder_pid=… holder_command=…` of the first other holder; says so when nobody can be named."""
    found = lock_holders(path)
    return str(found[0]) if found else "holder_pid=unknown"


def who_delays(database: Path) -> str:
    """The process that an answer of the sequencer waits for: one that locked the database's own files, or else its
    host. Says so when nobody can be named."""
    found = intruders(database)
    return str(found[0]) if found else who_locks(database.with_name(database.name + ".lock"))


def _locks() -> list[tuple[int, int]]:
    """(pid, inode) of every lock of this machine that is held."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" not in fields:
                found.append((int(fields[4]), int(fields[5].rpartition(":")[2])))
    return found


def _holder(pid: int) -> Holder:
    command, state = "", ""
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        command = " ".join(said.split())
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return Holder(pid, command[:COMMAND_CHARS], STATES.get(state, ""))
