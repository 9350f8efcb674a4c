"""Objects in a local directory, one file each; `durable_create.py` has the order that makes a create safe.

    ROOT/<key>          the objects; directories are created with their first object and are never removed,
                        so no create can lose its parent to a racing delete
    ROOT/.tmp/<nonce>   objects being written; files left by a killed process are swept by age at open
    ROOT/.id            nonce that identifies the store (`local_root.py`)

Blocking calls run in a small pool of threads. Reads of up to INLINE_READ_BYTES do not: a pread from the page cache
costs a microsecond, the trip through a thread some fifty. Larger ones, up to CACHED_READ_BYTES, are first tried from
the page cache alone (RWF_NOWAIT), which never waits for the disk.

Symbolic links are not followed when a file is read, and a new file never replaces one. A user who can write into the
directory can remove objects, but cannot redirect reads or writes by a link in place of an object. The directories above
it are trusted: an operator may mount or link them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ClosedError, InvalidError, MissingError, to_unavailable
from tidemill.objects.durable_create import (
    AppearedError,
    DirectorySyncer,
    GroupedDirectorySyncs,
    RealSyscalls,
    Syscalls,
    conflict_error,
    create_unpublished,
    durable_create,
    translate_os_error,
)
from tidemill.objects.local_root import LocalRoot
from tidemill.objects.store import Buffer, ObjectMeta, as_buffers, check_key, check_prefix, check_range

INLINE_READ_BYTES = 64 << 10
CACHED_READ_BYTES = 512 << 10
"""Copied in some 100 µs, about the cost of the trip through a thread."""

THREADS = 8
LIST_PAGE = 1000
TEMPORARY_AGE_MS = 60 * 60 * 1000
"""Age from which a temporary file belongs to a dead writer: a live one links it within seconds."""

_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""Flag of preadv; 0 on systems without it."""

T = TypeVar("T")
Pieces = list[bytes]  # Inside the class, `list` is the method.


class LocalObjects:
    """Object store in a local directory.

    `LocalObjects.open` creates it; it may block, since it creates the root and sweeps old temporary files.
    """

    def __init__(self, root: str, clock: Clock, rand: Rand, calls: Syscalls | None = None) -> None:
        self._root = root
        self._clock = clock
        self._rand = rand
        self._calls = calls or RealSyscalls()
        self._directory = LocalRoot(self._calls, rand, root)
        self._prefix = self._directory.prefix
        self._directories = DirectorySyncer(self._calls, root, self._directory.check)
        self._syncs = GroupedDirectorySyncs(self._directories, THREADS)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tidemill-objects")
        self._closed = False
        self._scratch = memoryview(bytearray(CACHED_READ_BYTES)) if _NOWAIT else None

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        clock: Clock,
        rand: Rand,
        calls: Syscalls | None = None,
        *,
        create: bool = True,
    ) -> LocalObjects:
        """Open a store. Without `create`, it must exist.

        Raises InvalidError if the root cannot be used, UnavailableError if the disk is full or, without `create`, if
        the root is not a store: its file system may not be mounted.
        """
        path = os.path.abspath(root)
        store = cls(path, clock, rand, calls)
        try:
            store._prepare(create)
        except OSError as error:
            store._pool.shutdown(wait=False)
            if error.errno == errno.EROFS:
                # A failing disk makes its file system read-only, and repairing it makes it writable again. So this is
                # retriable.
                raise to_unavailable(translate_os_error(error, "opening the object directory", path)) from error
            raise translate_os_error(error, "opening the object directory", path) from error
        except BaseException:
            store._pool.shutdown(wait=False)
            raise
        return store

    @property
    def root(self) -> str:
        return self._root

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await self._put(key, data, unpublished=False)

    async def put_unpublished(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await self._put(key, data, unpublished=True)

    async def _put(self, key: str, data: Buffer | Sequence[Buffer], *, unpublished: bool) -> None:
        self._check_open()
        target = self._prefix + check_key(key)
        buffers = as_buffers(data)
        temporary = f"{self._directory.temporary}/{self._rand.nonce()}"
        await self._run_in_pool(lambda: self._create_file(key, temporary, target, buffers, unpublished=unpublished))

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        fd = self._open_for_read(key)
        if end is not None and 0 <= start < end <= start + INLINE_READ_BYTES:
            # Nearly every read is this one. If it returns all bytes, the size is not needed.
            with contextlib.suppress(OSError):
                data = os.pread(fd, end - start, start)
                if len(data) == end - start:
                    os.close(fd)
                    return data
        return (await self._read_ranges(fd, key, [(start, end)]))[0]

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return await self._read_ranges(self._open_for_read(key), key, ranges)

    async def head(self, key: str) -> ObjectMeta | None:
        self._check_open()
        try:
            found = os.stat(self._prefix + check_key(key), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            self._directory.check()
            return None
        except OSError as error:
            raise translate_os_error(error, f"looking up {key}", self._root) from error
        return None if _is_directory(found.st_mode) else ObjectMeta(key, found.st_size, found.st_mtime_ns // 1_000_000)

    async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        self._check_open()
        check_prefix(prefix)
        self._directory.check()
        found = self._walk(prefix.rpartition("/")[0], prefix, start_after)
        while True:
            page = await self._run_in_pool(lambda: list(islice(found, LIST_PAGE)))
            self._directory.check()  # Otherwise the page may lack the objects of a directory that was unmounted.
            for meta in page:
                yield meta
            if len(page) < LIST_PAGE:
                return
            self._check_open()

    async def delete(self, key: str) -> None:
        self._check_open()
        path = self._prefix + check_key(key)
        await self._run_in_pool(lambda: self._delete_file(key, path))

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._close_pools)

    # blocking ------------------------------------------------------------------------------------

    def _close_pools(self) -> None:
        self._pool.shutdown()
        self._syncs.close()  # After the calls that wait for it.

    def _prepare(self, create: bool) -> None:
        self._directory.prepare(create=create)
        temporary = self._directory.temporary
        probe = f"{temporary}/{self._rand.nonce()}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(probe)
        horizon_ms = self._clock.now_ms() - TEMPORARY_AGE_MS
        with os.scandir(temporary) as entries:
            for entry in entries:
                try:
                    if entry.stat(follow_symlinks=False).st_mtime_ns // 1_000_000 < horizon_ms:
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue  # Its writer, or another process that opens the store, was faster.

    def _create_file(
        self, key: str, temporary: str, target: str, buffers: Sequence[memoryview], *, unpublished: bool
    ) -> None:
        self._directory.check()  # Otherwise the bytes would fill another disk before the link fails.
        try:
            if unpublished:
                create_unpublished(self._calls, self._directories, self._syncs, temporary, target, buffers)
            else:
                durable_create(self._calls, self._directories, temporary, target, buffers)
        except FileExistsError as error:
            if os.path.isdir(target):
                raise InvalidError(
                    f"the key is a directory of other keys: key={key}.",
                    fix="No object key may be a directory of another key.",
                ) from error
            raise conflict_error(key) from error
        except AppearedError as error:
            raise translate_os_error(error.cause, f"writing {key} created it,", self._root, appeared=True) from error
        except OSError as error:
            raise translate_os_error(error, f"writing {key}", self._root) from error

    def _delete_file(self, key: str, path: str) -> None:
        self._directory.check()
        try:
            self._calls.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except IsADirectoryError:
            return
        except OSError as error:
            raise translate_os_error(error, f"deleting {key}", self._root) from error
        try:
            self._syncs.begin_sync(os.path.dirname(path)).result()
        except OSError as error:
            raise translate_os_error(error, f"deleting {key} removed it,", self._root, appeared=True) from error

    def _open_for_read(self, key: str) -> int:
        self._check_open()
        try:
            return os.open(self._prefix + check_key(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._directory.check()
            raise MissingError(f"no such object: key={key}.") from error
        except OSError as error:
            raise translate_os_error(error, f"reading {key}", self._root) from error

    async def _read_ranges(self, fd: int, key: str, ranges: Sequence[tuple[int, int | None]]) -> Pieces:
        """Read the ranges; without an end, up to the object's end.

        Closes `fd`, in the pool's thread if the read runs there.
        """
        try:
            found = os.fstat(fd)
            if _is_directory(found.st_mode):
                raise MissingError(f"no such object: key={key}.")
            whole = [(start, check_range(key, start, end, found.st_size)) for start, end in ranges]
        except BaseException:
            os.close(fd)
            raise
        total = sum(end - start for start, end in whole)
        if total <= INLINE_READ_BYTES:
            return self._read_and_close(fd, key, whole)
        pieces = self._read_cached(fd, whole) if total <= CACHED_READ_BYTES else None
        if pieces is not None:
            os.close(fd)
            return pieces
        return await self._run_in_pool(lambda: self._read_and_close(fd, key, whole), unless_run=lambda: os.close(fd))

    def _read_cached(self, fd: int, ranges: Sequence[tuple[int, int]]) -> Pieces | None:
        """Read the ranges if all of them are in the page cache, else return None. Never waits."""
        scratch = self._scratch  # Read, copied and free again without an await.
        if scratch is None:
            return None
        pieces = []
        for start, end in ranges:
            view = scratch[: end - start]
            try:
                if os.preadv(fd, (view,), start, _NOWAIT) != end - start:
                    return None
            except OSError:  # Not cached, or not supported by the file system.
                return None
            pieces.append(bytes(view))
        return pieces

    def _read_and_close(self, fd: int, key: str, ranges: Sequence[tuple[int, int]]) -> Pieces:
        try:
            return [_pread(fd, start, end - start) for start, end in ranges]
        except OSError as error:
            raise translate_os_error(error, f"reading {key}", self._root) from error
        finally:
            os.close(fd)

    def _walk(self, directory: str, prefix: str, start_after: str) -> Iterator[ObjectMeta]:
        """Walk depth first in key order: a directory sorts by its name with the slash that its keys have."""
        entries: list[tuple[str, os.DirEntry[str]]] = []
        try:
            with os.scandir(self._prefix + directory) as scan:
                for entry in scan:
                    if not entry.name.startswith("."):
                        name = f"{directory}/{entry.name}" if directory else entry.name
                        entries.append((name + "/" if entry.is_dir(follow_symlinks=False) else name, entry))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise translate_os_error(error, f"listing {directory or 'the root'}", self._root) from error
        entries.sort(key=lambda pair: pair[0])
        for name, entry in entries:
            if name.endswith("/"):
                if not (name.startswith(prefix) or prefix.startswith(name)):
                    continue
                if name > start_after or start_after.startswith(name):
                    yield from self._walk(name[:-1], prefix, start_after)
            elif name.startswith(prefix) and name > start_after:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # Deleted since the scan.
                yield ObjectMeta(name, found.st_size, found.st_mtime_ns // 1_000_000)

    # both ----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the object store was closed: root={self._root}.")

    async def _run_in_pool(self, call: Callable[[], T], unless_run: Callable[[], None] | None = None) -> T:
        """Run `call` in the pool.

        After a cancellation `call` still finishes there. If it has not begun, `unless_run` is called instead, so that
        the resources of the call are released exactly once.
        """
        try:
            queued = self._pool.submit(call)
        except RuntimeError as error:
            if unless_run is not None:
                unless_run()
            raise ClosedError(f"the object store was closed: root={self._root}.") from error
        if unless_run is not None:
            given_up = unless_run
            queued.add_done_callback(lambda ended: given_up() if ended.cancelled() else None)
        return await asyncio.wrap_future(queued)


def _is_directory(mode: int) -> bool:
    return mode & 0o170000 == 0o040000


def _pread(fd: int, start: int, length: int) -> bytes:
    data = os.pread(fd, length, start)
    if len(data) == length:
        return data
    pieces = [data]  # A single pread returns at most 2 GiB, and may stop early on a signal.
    missing = length - len(data)
    while missing:
        data = os.pread(fd, missing, start + length - missing)
        if not data:
            raise OSError(5, "the object became shorter while it was read")
        pieces.append(data)
        missing -= len(data)
    return b"".join(pieces)
