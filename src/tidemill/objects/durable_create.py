"""Create a file so that after power loss it either exists completely or does not exist.

The order, each step before the next:

    1  open a temporary file on the same file system, exclusively
    2  write all bytes
    3  fdatasync the file            a name never appears before its bytes are safe
    4  link it to its name           the atomic create; EEXIST = another writer was first
    5  unlink the temporary name
    6  fsync the parent directory    and the parent of every ancestor not known to be safe
    7  acknowledge

Syncing after step 4 instead of before is not enough: a crash in between leaves a torn file that holds a create-only
name forever. A directory counts as known only once this process has synced its entry in its parent: a directory that
merely exists may have been created a moment ago by a writer that has not synced it. A writer that loses (EEXIST) still
does step 6 before it reports the loss: callers that then use the winner's object must not see it vanish after a power
loss.

`create_unpublished` links before it syncs, so that steps 3 and 6 run at the same time and share a commit of the file
system's journal: 1 2 4 5 (3 and 6) 7. An acknowledged object is as safe as above. Until then, power loss may leave a
torn file, which is harmless only under a name without readers.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Protocol

from tidemill.base.errors import ConflictError, InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime import file_descriptors
from tidemill.objects.store import MisconfiguredError

IOVEC_MAX = 1024
"""Limit of buffers per writev (Linux UIO_MAXIOV)."""

_PERMISSION_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS}
_FILE_TYPE_ERRNOS = {errno.ENOTDIR, errno.EISDIR}
_HARD_LINK_ERRNOS = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
_FREE_INODES_MIN = 16
"""Free inodes up to which a failed create counts as "no inodes": concurrent failures free some before statvfs."""
_NO_SPACE_ERRNOS = {errno.ENOSPC, errno.EDQUOT}


class Syscalls(Protocol):
    """System calls whose order makes a create durable. Tests record them; all other code uses `RealSyscalls`."""

    def create(self, path: str) -> int: ...
    def write(self, fd: int, buffers: Sequence[memoryview]) -> int: ...
    def fdatasync(self, fd: int) -> None: ...
    def close(self, fd: int) -> None: ...
    def link(self, source: str, target: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def mkdir(self, path: str, mode: int = 0o755) -> None: ...
    def fsync_directory(self, path: str) -> None: ...


class RealSyscalls:
    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, buffers: Sequence[memoryview]) -> int:
        return os.writev(fd, buffers)

    def fdatasync(self, fd: int) -> None:
        if sys.platform == "darwin":  # There, fsync stops at the drive's cache.
            import fcntl

            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        os.mkdir(path, mode)

    def fsync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class DirectorySyncer:
    """Directories under `root` whose entries are synced in their parents, as far as this process knows.

    Shared by the pool's threads: additions to the set are idempotent, so no lock is needed. `check_root` raises if
    another directory is in place of the root; it is called directly before a name is created.
    """

    def __init__(self, calls: Syscalls, root: str, check_root: Callable[[], None] = lambda: None) -> None:
        self.check_root = check_root
        self._calls = calls
        self._root = root
        self._known = {root}

    def create(self, path: str) -> None:
        """Create `path` and its missing ancestors below root, without syncing."""
        try:
            self._calls.mkdir(path)
        except FileExistsError:
            return
        except FileNotFoundError:
            if path == self._root:
                raise
            self.create(os.path.dirname(path))
            self.create(path)

    def sync(self, path: str) -> None:
        """Sync the entries of `path`, then the entry of every ancestor that is not known to be synced."""
        self._calls.fsync_directory(path)
        unknown = []
        while path not in self._known:
            parent = os.path.dirname(path)
            self._calls.fsync_directory(parent)
            unknown.append(path)
            path = parent
        self._known.update(unknown)


class GroupedDirectorySyncs:
    """Syncs of directories in threads of their own: one at a time of each directory, for all entries that wait for it.

    Invariant (covered): a call joins only a sync that has not begun, so entries made before the call are synced.
    """

    def __init__(self, directories: DirectorySyncer, threads: int) -> None:
        self._directories = directories
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tidemill-directories")
        self._waiting: dict[str, Future[None]] = {}
        self._syncing: set[str] = set()
        self._lock = threading.Lock()

    def begin_sync(self, path: str) -> Future[None]:
        """Begin to sync the entries of `path` and of its ancestors as `DirectorySyncer.sync` does."""
        with self._lock:
            waiting = self._waiting.get(path)
            if waiting is None:
                waiting = self._waiting[path] = Future()
                if path not in self._syncing:
                    self._pool.submit(self._sync, path)
                    self._syncing.add(path)
            return waiting

    def _sync(self, path: str) -> None:
        """Sync `path` until no entry waits for it."""
        while True:
            with self._lock:
                done = self._waiting.pop(path, None)
                if done is None:
                    self._syncing.discard(path)
                    return
            try:
                self._directories.sync(path)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def close(self) -> None:
        """Stop after the syncs that have been requested. Blocks."""
        self._pool.shutdown()


def create_unpublished(
    calls: Syscalls,
    directories: DirectorySyncer,
    syncs: GroupedDirectorySyncs,
    temporary: str,
    target: str,
    buffers: Sequence[memoryview],
) -> None:
    """Create `target`, whose name no reader knows yet, with one wait for both syncs. Blocks.

    Raises FileExistsError if the target exists, and any other OSError if it is not safe. The name is then removed
    again, because a second sync of the same file would succeed although pages of the first were lost. If even that
    fails, the name remains and every later create of it fails.
    """
    fd, temporary = _create(calls, temporary)
    name = temporary
    try:
        try:
            write_all(calls, fd, buffers)
            _link(calls, directories, temporary, target)
            name = target
            calls.unlink(temporary)
            synced = syncs.begin_sync(os.path.dirname(target))
            try:
                calls.fdatasync(fd)
            finally:
                synced.result()
        finally:
            calls.close(fd)
    except BaseException:
        _unlink_quietly(calls, name)
        raise


def durable_create(
    calls: Syscalls, directories: DirectorySyncer, temporary: str, target: str, buffers: Sequence[memoryview]
) -> None:
    """Create `target` with the content `buffers` by the seven steps above. Blocks.

    Raises FileExistsError if the target exists (its directory entry is then safe). Any other OSError before the link
    means that nothing appeared; after it, `AppearedError` carries the cause.
    """
    parent = os.path.dirname(target)
    fd, temporary = _create(calls, temporary)
    try:
        try:
            write_all(calls, fd, buffers)
            calls.fdatasync(fd)
        finally:
            calls.close(fd)
        lost = False
        try:
            _link(calls, directories, temporary, target)
        except FileExistsError:
            lost = True
    except BaseException:
        _unlink_quietly(calls, temporary)
        raise
    try:
        calls.unlink(temporary)
        directories.sync(parent)
    except OSError as error:
        raise AppearedError(error) from error
    if lost:
        raise FileExistsError(errno.EEXIST, "the target exists", target)


class AppearedError(Exception):
    """The name appeared, but syncing it failed: power loss may remove it again."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def write_all(calls: Syscalls, fd: int, buffers: Sequence[memoryview]) -> None:
    """Write every byte; writev may stop early, and takes at most IOVEC_MAX buffers."""
    pending = list(buffers)
    first = 0
    while first < len(pending):
        written = calls.write(fd, pending[first : first + IOVEC_MAX])
        while first < len(pending) and written >= pending[first].nbytes:
            written -= pending[first].nbytes
            first += 1
        if written:
            pending[first] = pending[first][written:]


def _create(calls: Syscalls, stem: str) -> tuple[int, str]:
    """Create a new temporary file. An existing name is left over from a process with the same seed, not a conflict."""
    for attempt in count():
        name = f"{stem}.{attempt}"
        try:
            return calls.create(name), name
        except FileExistsError:
            continue
    raise AssertionError("count() ended")


def _link(calls: Syscalls, directories: DirectorySyncer, temporary: str, target: str) -> None:
    directories.check_root()
    try:
        calls.link(temporary, target)
    except FileNotFoundError:
        directories.check_root()
        directories.create(os.path.dirname(target))
        calls.link(temporary, target)


def _unlink_quietly(calls: Syscalls, path: str) -> None:
    # The failure that matters is already being raised; the next open sweeps left-over files by age.
    try:
        calls.unlink(path)
    except OSError:
        return


def translate_os_error(error: OSError, what: str, root: str, *, appeared: bool = False) -> TidemillError:
    """Translate an operating system error. `appeared`: the call may have had its effect."""
    code = error.errno or 0
    reason = os.strerror(code) if code else str(error)
    where = f"root={root} error={errno.errorcode.get(code, code)}."
    if appeared:
        return UnknownOutcomeError(
            f"{what} but syncing it failed, {reason}: {where}", fix="Check the disk and the mount."
        )
    if code == errno.EEXIST:
        return ConflictError(f"{what} failed, the object exists already: {where}")
    if code in _PERMISSION_ERRNOS:
        return MisconfiguredError(
            f"{what} is not permitted, {reason}: {where}",
            fix="Make the directory writable for this user, or point objects.url at another one.",
        )
    if code in _FILE_TYPE_ERRNOS:
        return InvalidError(
            f"{what} found a file in place of a directory, or the reverse: {where}",
            fix="No object key may be a directory of another key, and objects.url must name a directory.",
        )
    if code in _HARD_LINK_ERRNOS:
        return InvalidError(
            f"{what} needs hard links, {reason}: {where}",
            fix="Put objects.url on a local file system with hard links (ext4, xfs, btrfs, apfs).",
        )
    if code in _NO_SPACE_ERRNOS:
        if _has_no_free_inodes(root):
            return UnavailableError(f"{what} found no free inode: {where}", fix="Remove files from that file system.")
        return UnavailableError(f"{what} found no space: {where}", fix="Free space on the disk, or raise the quota.")
    if code in file_descriptors.EXHAUSTED:
        fix = "Raise the limit of open files (ulimit -n), and check which process holds them: /proc/PID/fd."
        return UnavailableError(f"{what} failed, {reason}: {where}", fix=fix)
    return UnavailableError(f"{what} failed, {reason}: {where}", fix="Check the disk and the mount.")


def _has_no_free_inodes(root: str) -> bool:
    """Return whether the file system has no free inodes; ENOSPC does not distinguish that from a full disk.

    File systems without a limit of inodes report a total of 0.
    """
    try:
        found = os.statvfs(root)
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail <= _FREE_INODES_MIN


def conflict_error(key: str) -> ConflictError:
    return ConflictError(f"the object already exists: key={key}.")
