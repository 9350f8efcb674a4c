"""Directory of a local object store: created with the cluster, recognized afterwards.

A directory at the same path may be another one: the empty mount point of a file system that is not mounted. It looks
like a store as soon as any process has prepared it. Therefore:

- Invariant (created once): only a process that may create the store prepares an unprepared directory. For the others it
  is unavailable, until it is mounted. One that has the layout of a store is a copy of it.
- Invariant (same directory): a process creates and removes names only in the directory that it opened, and concludes
  only there that an object is missing. The inodes of the directory and of `.tmp` identify it, and the nonce in the file
  `.id`. Inodes alone do not, since the roots of most file systems have the same one; device numbers do not, since some
  file systems have another one after each mount.
"""

from __future__ import annotations

import contextlib
import errno
import os

from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.objects.durable_create import Syscalls

TEMPORARY = ".tmp"
IDENTITY = ".id"
_READ_ONLY = {errno.EPERM, errno.EACCES, errno.EROFS}

_IN_EMPTY_FILE_SYSTEMS = {"lost+found"}
_IN_EVERY_STORE = "metastore"
"""Directory of the claim and the files of the metastore, which are written before any other object."""

_FIX = "Check that its file system is mounted, and objects.url."


class LocalRoot:
    """The directory of one store. All calls block, `check` for microseconds."""

    def __init__(self, calls: Syscalls, rand: Rand, path: str) -> None:
        self.path = path
        self.prefix = path.rstrip("/") + "/"
        self.temporary = self.prefix + TEMPORARY
        self._calls = calls
        self._rand = rand
        self._opened: tuple[int, int, str] | None = None

    def prepare(self, *, create: bool) -> None:
        """Prepare the directory, or without `create` find it prepared, and remember its identity.

        Raises OSError, InvalidError (not a directory), UnavailableError (not prepared, without `create`).
        """
        if create:
            _make_directory(self._calls, self.path)
            with contextlib.suppress(PermissionError):  # Then this user did not create it either.
                # An existing root may have been created a moment ago by a process that has not synced it yet.
                self._calls.fsync_directory(os.path.dirname(self.path))
            with contextlib.suppress(FileExistsError):
                self._calls.mkdir(self.temporary)
            self._calls.fsync_directory(self.path)  # After power loss, too, the others must find it prepared.
        else:
            self._find_prepared()
        self._make_nonce()
        self._opened = self._identity()

    def _find_prepared(self) -> None:
        try:
            os.stat(self.temporary)
            return
        except (FileNotFoundError, NotADirectoryError):
            pass  # any other error is one of this directory
        try:
            names = set(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UnavailableError(f"the object directory does not exist: root={self.path}.", fix=_FIX) from error
        if names <= _IN_EMPTY_FILE_SYSTEMS:
            raise UnavailableError(f"the object directory is empty: root={self.path}.", fix=_FIX)
        if not os.path.isdir(self.prefix + _IN_EVERY_STORE):
            raise UnavailableError(
                f"the object directory is no store, since it has no directory {_IN_EVERY_STORE!r}: root={self.path}"
                f" first={sorted(names)[0]!r}.",
                fix=_FIX,
            )
        # A copy of the objects: names with a dot and empty directories are often omitted.
        with contextlib.suppress(FileExistsError):
            self._calls.mkdir(self.temporary)
        self._calls.fsync_directory(self.path)

    def _make_nonce(self) -> None:
        """Create the nonce of the directory, unless it has one: directories of former versions have none."""
        if self._nonce():
            return
        nonce = self._rand.nonce()
        temporary = f"{self.temporary}/id-{nonce}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, nonce.encode())
                os.fsync(descriptor)
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, self.prefix + IDENTITY)  # complete, or not there
            finally:
                os.close(descriptor)
                os.unlink(temporary)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
        self._calls.fsync_directory(self.path)

    def _nonce(self) -> str:
        try:
            descriptor = os.open(self.prefix + IDENTITY, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return ""
        try:
            return os.read(descriptor, 256).decode()
        finally:
            os.close(descriptor)

    def check(self) -> None:
        """Check that the path still leads to the directory that was opened: in another one, a missing object proves
        nothing, and a new one would be lost. Raises UnavailableError."""
        try:
            found = self._identity()
        except OSError as error:
            raise UnavailableError(
                f"the object directory does not exist any more, {error.strerror}: root={self.path}.", fix=_FIX
            ) from error
        if self._opened is not None and not self._opened[2] and found[:2] == self._opened[:2]:
            self._opened = found  # a process that may write gave the directory its nonce
        if found != self._opened:
            raise UnavailableError(
                f"another directory is in place of the object directory: root={self.path}.",
                fix=f"{_FIX} If its objects were copied to another one, restart this process.",
            )

    def _identity(self) -> tuple[int, int, str]:
        return os.stat(self.path).st_ino, os.stat(self.temporary, follow_symlinks=False).st_ino, self._nonce()


def _make_directory(calls: Syscalls, path: str) -> None:
    """Create the directory and its missing ancestors, and sync the new entries."""
    if os.path.isdir(path):
        return
    if os.path.lexists(path) and not os.path.isdir(path):  # another process may have created it since
        raise InvalidError(f"the object root is not a directory: root={path}.", fix="Point objects.url at a directory.")
    parent = os.path.dirname(path)
    _make_directory(calls, parent)
    try:
        calls.mkdir(path, 0o700)  # The objects are private data of this user.
    except FileExistsError:
        return _make_directory(calls, path)
    calls.fsync_directory(parent)
