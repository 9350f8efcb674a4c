"""Election of the process that hosts a database's sequencer: the one whose open file holds an flock next to it.

The clients of a process share one `HostElection` per database. A client that finds no listening sequencer asks its seat
to try: the process that gets the lock starts the sequencer thread. SIGKILL closes the file, which frees the lock.

The descriptor is close-on-exec, and a fork closes its copy. A lock lives as long as any copy is open, so a child that
outlived its killed parent would otherwise keep the database locked.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import threading
from pathlib import Path

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError
from tidemill.consensus.sqlite import schema, sockets
from tidemill.consensus.sqlite.sequencer import Sequencer

_guard = threading.Lock()
_seats: dict[str, HostElection] = {}
_leaked: list[object] = []
generation = 0
"""Counter of forks, incremented in every forked child: clients opened before the fork recognise that they are copies.
"""


class HostElection:
    """One database in this process. All methods are thread-safe."""

    def __init__(self, database: Path, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._lock_fd = -1
        self._sequencer: Sequencer | None = None
        self._mutex = threading.Lock()
        self.users = 0

    def try_host(self) -> None:
        """Start the sequencer here if no process holds the lock. Never blocks on other processes."""
        with self._mutex:
            if self._sequencer is not None:
                return
            fd = _try_lock(sockets.lock_path(self._database))
            if fd < 0:
                return
            self._lock_fd = fd
            try:
                self._sequencer = Sequencer(self._database, self._clock, self._on_sequencer_end)
                self._sequencer.start()
            except BaseException:
                # Out of descriptors or threads. A lock without a sequencer would lock every process out.
                self._sequencer, self._lock_fd = None, -1
                os.close(fd)
                raise

    @property
    def is_hosting(self) -> bool:
        return self._sequencer is not None

    def pop_failure(self) -> TidemillError | None:
        """Return, once, why the sequencer that was started here ended on its own."""
        failure, self._failure = self._failure, None
        return failure

    _failure: TidemillError | None = None

    def _on_sequencer_end(self) -> None:
        """Release the lock; the sequencer thread calls it after closing the database.

        Only then may another process open it.
        """
        sequencer, self._sequencer = self._sequencer, None
        if sequencer is not None:
            self._failure = sequencer.failure
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def stop(self) -> None:
        sequencer = self._sequencer
        if sequencer is not None:
            sequencer.stop()

    def abandon_in_child(self) -> None:
        """Close the copies of the descriptors in a forked child. This does not release the parent's lock."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock_fd)
        if self._sequencer is not None:
            self._sequencer.abandon_in_child()
            # Closing an inherited SQLite connection could checkpoint concurrently with the parent: keep it forever.
            _leaked.append(self._sequencer)


def attach_client(database: Path, clock: Clock) -> HostElection:
    key = os.path.realpath(database)
    with _guard:
        seat = _seats.get(key)
        if seat is None:
            seat = _seats[key] = HostElection(Path(key), clock)
        seat.users += 1
        return seat


def detach_client(seat: HostElection) -> None:
    """Detach a client. The last one of this process stops the sequencer, and blocks until the database is closed."""
    with _guard:
        seat.users -= 1
        if seat.users > 0:
            return
        for key in [key for key, known in _seats.items() if known is seat]:
            del _seats[key]
    seat.stop()


def _try_lock(path: Path) -> int:
    """Return an open, locked descriptor, or -1 if another process holds the lock.

    Raises InvalidError or UnavailableError.
    """
    while True:
        schema.make_directory(path.parent)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            what = "the lock file of the database of consensus.url cannot be opened"
            raise schema.translate_os_error(error, what, path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return -1
        # A lock on a file that was removed in the meantime excludes no other process.
        try:
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


def _after_fork_in_child() -> None:
    global _guard, generation
    _guard = threading.Lock()
    generation += 1
    for seat in _seats.values():
        seat.abandon_in_child()
        _leaked.append(seat)
    _seats.clear()


def _stop_all() -> None:
    for seat in list(_seats.values()):
        seat.stop()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_stop_all)
