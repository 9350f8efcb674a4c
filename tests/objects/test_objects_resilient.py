"""Retries, lost acknowledgements, the limit on concurrency, and the classification of S3 failures."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import REGISTRY

from support.ports import free_address
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.objects import MemoryObjects, ObjectMeta
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.s3 import S3Objects
from tidemill.objects.store import Buffer, MisconfiguredError

Script = list[tuple[bool, type[TidemillError] | None]]
"""One entry per call: whether it takes effect, and the error that the caller gets (None = the true outcome)."""


class Scripted(MemoryObjects):
    """Memory objects whose first calls follow a script."""

    def __init__(self, script: Script, reads: Sequence[type[TidemillError] | None] = ()) -> None:
        super().__init__(SystemClock())
        self.script = list(script)
        self.reads = list(reads)
        self.calls = 0
        self.running = 0
        self.most = 0

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        self.calls += 1
        effect, reported = self.script.pop(0) if self.script else (True, None)
        if effect:
            await super().put(key, data)
        if reported is not None:
            raise reported("scripted.")

    async def delete(self, key: str) -> None:
        self.calls += 1
        effect, reported = self.script.pop(0) if self.script else (True, None)
        if effect:
            await super().delete(key)
        if reported is not None:
            raise reported("scripted.")

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._fail()
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.002)
        self.running -= 1
        return await super().get(key, start, end)

    async def head(self, key: str) -> ObjectMeta | None:
        self._fail()
        return await super().head(key)

    async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        count = 0
        async for meta in super().list(prefix, start_after):
            if count == 2:
                self._fail()
            count += 1
            yield meta

    def _fail(self) -> None:
        reported = self.reads.pop(0) if self.reads else None
        if reported is not None:
            raise reported("scripted.")


def resilient(inner: MemoryObjects, budget_s: float = 5.0, **options: bool | int) -> RetryingObjects:
    return RetryingObjects(inner, SystemClock(), Rand(1), store="scripted", budget_s=budget_s, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "script",
    [
        [(False, UnavailableError), (False, UnavailableError)],
        [(False, UnknownOutcomeError)],
        [(True, UnknownOutcomeError)],
        [(False, UnknownOutcomeError), (False, UnavailableError), (True, UnknownOutcomeError)],
        [(False, UnavailableError), (True, UnknownOutcomeError)],
        # The store itself repeats the lost request and reports our own object as a conflict.
        [(False, UnknownOutcomeError), (True, ConflictError)],
    ],
)
async def test_a_put_in_trouble_ends_as_the_success_it_is(script: Script) -> None:
    inner = Scripted(script)
    await resilient(inner).put("k", [b"ours", b"!"])
    assert await MemoryObjects.get(inner, "k") == b"ours!"


async def test_a_late_duplicate_of_our_own_put_is_not_a_conflict() -> None:
    inner = Scripted([(False, UnknownOutcomeError)])
    first_head = inner.head

    async def head_then_late_arrival(key: str) -> ObjectMeta | None:
        found = await first_head(key)
        if found is None:  # read back: absent; now the lost request lands after all
            await MemoryObjects.put(inner, key, b"ours")
        return found

    inner.head = head_then_late_arrival  # type: ignore[method-assign]
    await resilient(inner).put("k", b"ours")
    assert inner.calls == 2


async def test_our_own_object_that_a_sweep_took_before_it_was_read_back_is_no_conflict() -> None:
    """The put was delayed until its object was old enough for the sweep. No other writer exists, so none is blamed."""
    inner = Scripted([(True, UnknownOutcomeError), (False, ConflictError)])
    first_head = inner.head

    async def swept_then_head(key: str) -> ObjectMeta | None:
        await MemoryObjects.delete(inner, key)
        return await first_head(key)

    inner.head = swept_then_head  # type: ignore[method-assign]
    with pytest.raises(UnknownOutcomeError, match="deleted before"):
        await resilient(inner).put("k", b"ours")
    assert inner.calls == 2, "its key is never used again"


@pytest.mark.parametrize("script", [[], [(False, UnavailableError)], [(False, UnknownOutcomeError)]])
async def test_another_writers_object_is_a_conflict(script: Script) -> None:
    inner = Scripted([(True, None), *script])
    await inner.put("k", b"theirs")
    with pytest.raises(ConflictError):
        await resilient(inner).put("k", b"ours!!")
    assert await MemoryObjects.get(inner, "k") == b"theirs"


async def test_when_the_budget_ends_the_caller_hears_the_truth() -> None:
    with pytest.raises(UnavailableError):
        await resilient(Scripted([(False, UnavailableError)] * 100), 0.2).put("k", b"x")
    with pytest.raises(UnknownOutcomeError):
        await resilient(Scripted([(False, UnknownOutcomeError)] + [(False, UnavailableError)] * 100), 0.2).put(
            "k", b"x"
        )
    with pytest.raises(UnknownOutcomeError):  # it cannot be read back
        await resilient(Scripted([(True, UnknownOutcomeError)], [UnavailableError] * 100), 0.2).put("k", b"x")


@pytest.mark.parametrize("kind", [InvalidError, MissingError, CorruptError])
async def test_what_a_retry_cannot_mend_is_not_retried(kind: type[TidemillError]) -> None:
    inner = Scripted([(False, kind)])
    with pytest.raises(kind):
        await resilient(inner).put("k", b"x")
    assert inner.calls == 1


async def test_reads_lists_and_deletes_retry_too() -> None:
    inner = Scripted([], [UnavailableError, UnavailableError, None, UnavailableError])
    for i in range(5):
        await MemoryObjects.put(inner, f"k{i}", b"x")
    store = resilient(inner)
    assert await store.get("k0") == b"x"
    inner.reads = [UnavailableError]
    assert await store.head("k0") is not None
    inner.reads = [UnavailableError, None]
    assert [meta.key async for meta in store.list("k")] == [f"k{i}" for i in range(5)]
    inner.script = [(True, UnknownOutcomeError), (False, UnavailableError)]
    await store.delete("k0")
    assert await store.head("k0") is None


async def test_concurrency_is_bounded_and_ranges_are_merged() -> None:
    inner = Scripted([])
    data = bytes(range(256)) * 4000
    await inner.put("k", data)
    store = resilient(inner, concurrency=3, coalesce=True)
    wanted = [(i * 100_000, i * 100_000 + 10) for i in range(10)] + [(20, 30), (5, 5)]
    assert await store.get_ranges("k", wanted) == [data[a:b] for a, b in wanted]
    assert inner.most == 3
    await asyncio.gather(*(store.get("k") for _ in range(20)))
    assert inner.most == 3
    with pytest.raises(InvalidError):
        await store.get_ranges("k", [(0, 1), (500_000, len(data) + 1)])
    with pytest.raises(MissingError):
        await store.get_ranges("absent", [(0, 1), (500_000, 500_001)])


class Held(MemoryObjects):
    """A store whose reads and deletes wait for `go`."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.go = asyncio.Event()
        self.waiting = 0

    async def _wait(self) -> None:
        self.waiting += 1
        await self.go.wait()

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        await self._wait()
        return await super().get(key, start, end)

    async def delete(self, key: str) -> None:
        await self._wait()
        await super().delete(key)


async def test_a_put_does_not_stand_behind_any_number_of_reads_and_deletes() -> None:
    inner = Held()
    await inner.put("k", b"data")
    store = resilient(inner, concurrency=16)
    others = [asyncio.ensure_future(store.get("k")) for _ in range(500)]
    others += [asyncio.ensure_future(store.get_ranges("k", [(0, 2)])) for _ in range(500)]
    others += [asyncio.ensure_future(store.delete(f"gone{number}")) for number in range(500)]
    async with asyncio.timeout(30):
        while not inner.waiting:
            await asyncio.sleep(0)
        await asyncio.gather(*(store.put(f"p{number}", b"batch") for number in range(4)))
    assert inner.waiting == 12
    inner.go.set()
    await asyncio.gather(*others)


async def test_metrics_count_calls_bytes_retries_and_what_reading_back_showed() -> None:
    def value(metric: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(metric, labels) or 0.0

    inner = Scripted([(False, UnavailableError), (True, UnknownOutcomeError)])
    store = RetryingObjects(inner, SystemClock(), Rand(1), store="metered")
    await store.put("k", [b"abc", b"de"])
    await store.get("k", 1, 3)
    with pytest.raises(MissingError):
        await store.get("nothing")
    assert value("tidemill_objects_requests_total", store="metered", operation="put", outcome="ok") == 1
    assert value("tidemill_objects_requests_total", store="metered", operation="get", outcome="missing") == 1
    assert value("tidemill_objects_bytes_total", store="metered", operation="put") == 5
    assert value("tidemill_objects_bytes_total", store="metered", operation="get") == 2
    assert value("tidemill_objects_retries_total", store="metered", operation="put") == 2
    assert value("tidemill_objects_resolved_total", store="metered", found="ours") == 1
    assert value("tidemill_objects_seconds_count", store="metered", operation="put") == 1


class Server:
    """An HTTP server that gives every request the same answer, or none."""

    def __init__(self) -> None:
        outer = self
        self.status, self.body, self.hang, self.cut = 200, b"", threading.Event(), False

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                if outer.cut:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if outer.status == 0:
                    outer.hang.wait(5)
                    return
                self.send_response(outer.status)
                self.send_header("content-length", str(len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body)

            do_GET = do_DELETE = do_HEAD = do_PUT

            def log_message(self, format: str, *args: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.hang.set()
    made.server.shutdown()
    made.server.server_close()


def s3(endpoint: str, timeout_s: float = 0.5) -> S3Objects:
    config = {"endpoint": endpoint, "region": "us-east-1", "access_key_id": "k", "secret_access_key": "s"}
    return S3Objects("bucket", "", config, Rand(1), timeout_s=timeout_s)


def code(name: str) -> bytes:
    return f"<Error><Code>{name}</Code><Message>said so</Message></Error>".encode()


@pytest.mark.parametrize(
    ("status", "body", "on_put", "on_get"),
    [
        (500, code("InternalError"), UnknownOutcomeError, UnavailableError),
        (503, code("SlowDown"), UnavailableError, UnavailableError),
        (503, b"", UnknownOutcomeError, UnavailableError),
        (429, b"", UnavailableError, UnavailableError),
        (403, code("AccessDenied"), MisconfiguredError, MisconfiguredError),
        (403, code("SignatureDoesNotMatch"), MisconfiguredError, MisconfiguredError),
        (404, code("NoSuchBucket"), MisconfiguredError, MisconfiguredError),
        (400, code("RequestTimeout"), UnknownOutcomeError, UnavailableError),
        (404, code("NoSuchKey"), UnknownOutcomeError, MissingError),
        (404, b"", UnknownOutcomeError, MissingError),
        (400, code("EntityTooLarge"), InvalidError, InvalidError),
        (0, b"", UnknownOutcomeError, UnavailableError),
    ],
)
async def test_every_answer_of_s3_has_its_kind(
    server: Server, status: int, body: bytes, on_put: type[TidemillError], on_get: type[TidemillError]
) -> None:
    server.status, server.body = status, body
    with pytest.raises(TidemillError) as raised:
        await s3(server.endpoint).put("503-connect-error/k", b"x")
    assert type(raised.value) is on_put
    with pytest.raises(TidemillError) as raised:
        await s3(server.endpoint).get("503-connect-error/k")
    assert type(raised.value) is on_get
    if status in (403, 404) and on_put is MisconfiguredError:
        assert raised.value.fix


async def test_a_cut_connection_is_unknown_and_a_refused_one_unavailable(server: Server) -> None:
    server.cut = True
    with pytest.raises(UnknownOutcomeError):
        await s3(server.endpoint).put("k", b"x")
    with pytest.raises(UnavailableError, match="endpoint"):
        await s3(f"http://{free_address()}").put("k", b"x")


async def test_on_s3_the_nonce_tells_our_object_from_an_equal_one(
    s3_endpoint: str, new_bucket: Callable[[], str]
) -> None:
    config = {"endpoint": s3_endpoint, "region": "us-east-1", "access_key_id": "k", "secret_access_key": "s"}
    bucket = new_bucket()

    class LosesAcknowledgements(S3Objects):
        lost = 0

        async def put_with_nonce(self, key: str, data: Buffer | Sequence[Buffer], nonce: str) -> None:
            await super().put_with_nonce(key, data, nonce)
            if self.lost < 1:
                self.lost += 1
                raise UnknownOutcomeError("scripted.")

    class NeverSends(S3Objects):
        async def put_with_nonce(self, key: str, data: Buffer | Sequence[Buffer], nonce: str) -> None:
            raise UnknownOutcomeError("scripted.")

    ours = RetryingObjects(LosesAcknowledgements(bucket, "", config, Rand(1)), SystemClock(), Rand(2), store="s3")
    await ours.put("k", b"equal bytes")
    other = RetryingObjects(NeverSends(bucket, "", config, Rand(3)), SystemClock(), Rand(4), store="s3")
    with pytest.raises(ConflictError):
        await other.put("k", b"equal bytes")
