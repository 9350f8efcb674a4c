"""Objects in a bucket: the contract of `store` on obstore's stores of S3, GCS and Azure.

A put creates the object on the condition that it does not exist (S3 and Azure: `If-None-Match: *`, GCS:
`x-goog-if-generation-match: 0`), with the attempt's nonce in the object's metadata. The library's own retries are off:
it repeats a conditional put after a 5xx, and would report our own success as "already exists". So one call here is one
request, its AlreadyExists is real, and an unclear outcome is UnknownOutcomeError. `retrying` repeats attempts under one
nonce, and reads the nonce back to distinguish our object from another's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore

from tidemill.base.clock import Rand
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    InvalidError,
    MissingError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.objects.buckets.errors import StoreLocation, translate_obstore_error, translate_rejected_create
from tidemill.objects.buckets.pending_calls import wait_for_call
from tidemill.objects.reads import plan_reads, split_response
from tidemill.objects.store import Buffer, ObjectMeta, as_buffers, check_key, check_prefix, check_range

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Store

    BucketStore = S3Store | GCSStore | AzureStore

NONCE = "tidemill-nonce"
REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
LIST_PAGE = 1000


def client_options(endpoint: str, timeout_s: float) -> ClientConfig:
    return {
        "allow_http": endpoint.startswith("http://"),
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s)),
    }


def no_retries(timeout_s: float) -> RetryConfig:
    return {
        "max_retries": 0,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        },
    }


class BucketObjects:
    """Object store in a bucket.

    `prefix` is empty or ends with '/'.
    `nonce_name`: name of the nonce in an object's metadata.
    """

    def __init__(
        self, store: BucketStore, place: StoreLocation, prefix: str, rand: Rand, *, nonce_name: str = NONCE
    ) -> None:
        self._store = store
        self._place = place
        self._prefix = prefix
        self._rand = rand
        self._nonce_name = nonce_name
        self._closed = False

    @property
    def raw_store(self) -> BucketStore:
        """Underlying store of the library, for benchmarks that measure the overhead of this class."""
        return self._store

    # the contract --------------------------------------------------------------------------------

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await self.put_with_nonce(key, data, self._rand.nonce())

    async def put_unpublished(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await self.put(key, data)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._path(key)
        if start == 0 and end is None:
            try:
                found = await wait_for_call(obstore.get_async(self._store, path))
                return bytes(await wait_for_call(found.bytes_async()))
            except Exception as error:
                raise translate_obstore_error(error, "get", key, self._place, writes=False) from error
        if end is None or not 0 <= start < end:
            # Empty and open ranges have no portable meaning in HTTP, so the size is needed first.
            size = await self._size(key)
            end = check_range(key, start, end, size)
            if start == end:
                return b""
        try:
            data = bytes(await wait_for_call(obstore.get_range_async(self._store, path, start=start, end=end)))
        except Exception as error:
            if "<Code>InvalidRange</Code>" in str(error) or " 416 " in str(error):
                raise await self._wrong_size_error(key, start, end, 0) from error
            raise translate_obstore_error(error, "get", key, self._place, writes=False) from error
        if len(data) != end - start:
            raise await self._wrong_size_error(key, start, end, len(data))
        return data

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read the ranges with one request after another; `retrying` runs them concurrently under its limit."""
        for start, end in ranges:
            if not 0 <= start <= end:
                check_range(key, start, end, max(start, end, 0))
        into = [b""] * len(ranges)
        requests = plan_reads(ranges)
        if not requests:
            await self._size(key)
        for request in requests:
            split_response(request, await self.get(key, request.start, request.end), into)
        return into

    async def head(self, key: str) -> ObjectMeta | None:
        path = self._path(key)
        try:
            found = await wait_for_call(obstore.head_async(self._store, path))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise translate_obstore_error(error, "head", key, self._place, writes=False) from error
        return self._meta(found)

    async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        self._check_open()
        full = self._prefix + check_prefix(prefix)
        # The library lists whole path segments; the rest of the prefix is matched here.
        directory = full.rpartition("/")[0]
        offset = self._prefix + start_after if start_after else None
        try:
            pages = obstore.list(self._store, directory or None, offset=offset, chunk_size=LIST_PAGE)
            while True:
                try:
                    page = await wait_for_call(pages.__anext__())
                except StopAsyncIteration:
                    break
                for found in page:
                    path = found["path"]
                    if path.startswith(full) and (offset is None or path > offset):
                        yield self._meta(found)
                    elif path[: len(full)] > full:
                        return
                self._check_open()
        except Exception as error:
            if isinstance(error, ClosedError):
                raise
            raise translate_obstore_error(error, "list", prefix, self._place, writes=False) from error

    async def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            await wait_for_call(obstore.delete_async(self._store, path))
        except Exception as error:
            failure = translate_obstore_error(error, "delete", key, self._place, writes=True)
            if not isinstance(failure, MissingError):
                raise failure from error

    async def aclose(self) -> None:
        self._closed = True

    # attempts under a nonce, for `retrying` -------------------------------------------------------

    async def put_with_nonce(self, key: str, data: Buffer | Sequence[Buffer], nonce: str) -> None:
        """Create an object with one request, with `nonce` in its metadata."""
        path = self._path(key)
        buffers = as_buffers(data)
        # Views are passed on without copying; the request body is the only copy.
        body = buffers[0] if len(buffers) == 1 else buffers or b""
        try:
            await wait_for_call(
                obstore.put_async(self._store, path, body, mode="create", attributes={self._nonce_name: nonce})
            )
        except Exception as error:
            failure = translate_obstore_error(error, "put", key, self._place, writes=True)
            if isinstance(failure, ConflictError):
                # Conflict is certain only if the object exists, and it may be ours: a gateway may repeat a create.
                try:
                    current = await self.head(key)
                except (UnavailableError, InvalidError) as unread:
                    raise UnknownOutcomeError(
                        f"the object existed, but cannot be read back: key={key} reason={unread.message!r}.",
                        fix=unread.fix,
                    ) from error
                if current is None:
                    raise translate_rejected_create(failure) from error
                raise ConflictError(failure.message, current=current) from error
            raise failure from error

    async def nonce_of(self, key: str) -> str | None:
        """Return the nonce of the attempt that created the object ("" if it has none), or None without an object."""
        path = self._path(key)
        try:
            found = await wait_for_call(obstore.get_async(self._store, path, options={"head": True}))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise translate_obstore_error(error, "head", key, self._place, writes=False) from error
        attributes = {str(name).lower(): str(value) for name, value in found.attributes.items()}
        return attributes.get(self._nonce_name, "")

    # ---------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the object store was closed: {self._place}.")

    def _path(self, key: str) -> str:
        self._check_open()
        return self._prefix + check_key(key)

    async def _size(self, key: str) -> int:
        found = await self.head(key)
        if found is None:
            raise MissingError(f"no such object: key={key} {self._place}.")
        return found.size_bytes

    async def _wrong_size_error(self, key: str, start: int, end: int, received: int) -> UnavailableError:
        """Return the error of an answer that is not the whole range. Raises RangeError if the object is shorter."""
        check_range(key, start, end, await self._size(key))
        return UnavailableError(
            f"the object store answered a read with a wrong number of bytes: key={key} start={start} end={end}"
            f" received_bytes={received} {self._place}."
        )

    def _meta(self, found: Any) -> ObjectMeta:
        modified_ms = int(found["last_modified"].timestamp() * 1000)
        return ObjectMeta(found["path"].removeprefix(self._prefix), found["size"], modified_ms)
