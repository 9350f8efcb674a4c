"""The possible files after a power cut during a recorded run of system calls.

A call has a start and an end in the record. At a cut, a call that ended has happened; a call in progress may have
happened. The bytes of a file are safe once an fdatasync of it ended that started after they were written. Otherwise the
file may have any prefix of them, followed by zeros. A directory entry (link, unlink, mkdir) is safe once an fsync of
its directory ended that started after the call ended. Otherwise it may exist or not, independent of later ones.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.objects.durable_create import RealSyscalls


@dataclass
class Event:
    name: str
    args: tuple[Any, ...]
    start: int
    end: int | None = None


@dataclass
class Recorder:
    """Runs the real calls and records them; `skip` names calls left out (planted bugs)."""

    skip: frozenset[str] = frozenset()
    events: list[Event] = field(default_factory=list)
    _real: RealSyscalls = field(default_factory=RealSyscalls)
    _files: dict[int, int] = field(default_factory=dict)  # fd → file number
    _next_file: int = 0
    _time: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def _begin(self, name: str, *args: Any) -> Event:
        with self._lock:
            self._time += 1
            event = Event(name, args, self._time)
            self.events.append(event)
            return event

    def _end(self, event: Event) -> None:
        with self._lock:
            self._time += 1
            event.end = self._time

    def acknowledged(self, key: str) -> None:
        self._end(self._begin("ack", key))

    @property
    def duration(self) -> int:
        return self._time

    def create(self, path: str) -> int:
        with self._lock:
            self._next_file += 1
            number = self._next_file
        event = self._begin("create", path, number)
        fd = self._real.create(path)
        with self._lock:
            self._files[fd] = number
        self._end(event)
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview]) -> int:
        event = self._begin("write", self._files[fd], b"".join(buffers)[: 1 + sum(b.nbytes for b in buffers) // 2])
        # Half at a time: a caller that ignores short writes loses bytes here.
        joined = b"".join(buffers)
        written = self._real.write(fd, [memoryview(joined)[: 1 + len(joined) // 2]])
        self._end(event)
        return written

    def fdatasync(self, fd: int) -> None:
        if "fdatasync" not in self.skip:
            event = self._begin("fdatasync", self._files[fd])
            self._end(event)  # the real one only costs time here: the model decides what is safe

    def close(self, fd: int) -> None:
        self._real.close(fd)

    def link(self, source: str, target: str) -> None:
        self._entry("link", source, target)

    def unlink(self, path: str) -> None:
        self._entry("unlink", path)

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        self._entry("mkdir", path)

    def _entry(self, name: str, *paths: str) -> None:
        # One step with its record: another thread that already sees the entry may rely on its own later fsync.
        with self._lock:
            getattr(self._real, name)(*paths)
            self._time += 2
            self.events.append(Event(name, paths, self._time - 1, self._time))

    def fsync_directory(self, path: str) -> None:
        if "fsync_directory" not in self.skip and f"fsync {os.path.basename(path)}" not in self.skip:
            self._end(self._begin("fsync", path))


def crash(events: Sequence[Event], cut: int, root: str, source: random.Random) -> tuple[dict[str, bytes], set[str]]:
    """(objects found after a power cut at `cut`, keys acknowledged before it)."""
    happened = [e for e in events if e.end is not None and e.end < cut]
    maybe = [e for e in events if e.start < cut and not (e.end is not None and e.end < cut)]
    happened += [e for e in maybe if e.name != "ack" and source.random() < 0.5]
    done = {id(e) for e in happened}

    def synced(directory: str, event: Event) -> bool:
        return any(
            s.name == "fsync" and s.args[0] == directory and event.end is not None and s.start > event.end
            for s in events
            if s.end is not None and s.end < cut
        )

    entries: dict[str, int | str] = {root: "directory"}
    numbers = {e.args[0]: e.args[1] for e in events if e.name == "create"}
    for event in events:
        if id(event) not in done or event.name not in ("link", "unlink", "mkdir"):
            continue
        path = event.args[-1]
        if not (synced(os.path.dirname(path), event) or source.random() < 0.5):
            continue
        if event.name == "link":
            entries[path] = numbers[event.args[0]]
        elif event.name == "mkdir":
            entries[path] = "directory"
        else:
            entries.pop(path, None)

    found: dict[str, bytes] = {}
    for path, number in entries.items():
        if isinstance(number, str) or "/.tmp/" in path:
            continue
        parent, reachable = os.path.dirname(path), True
        while parent != root:
            reachable = reachable and entries.get(parent) == "directory"
            parent = os.path.dirname(parent)
        if reachable:
            found[os.path.relpath(path, root)] = _bytes_of(events, number, cut, source)
    acknowledged = {e.args[0] for e in events if e.name == "ack" and e.end is not None and e.end < cut}
    return found, acknowledged


def _bytes_of(events: Sequence[Event], number: int, cut: int, source: random.Random) -> bytes:
    writes = [e for e in events if e.name == "write" and e.args[0] == number and e.end is not None and e.end < cut]
    syncs = [e for e in events if e.name == "fdatasync" and e.args[0] == number and e.end is not None and e.end < cut]
    safe = sum(len(w.args[1]) for w in writes if any(s.start > (w.end or 0) for s in syncs))
    data = b"".join(w.args[1] for w in writes)
    keep = source.randint(safe, len(data))
    return data[:keep] + bytes(source.choice((0, len(data) - keep)))
