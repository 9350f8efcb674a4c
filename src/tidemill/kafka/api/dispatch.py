"""What a handler gets and gives; the table row that names an API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import structlog

from tidemill.base.runtime.coop import CoopBudget
from tidemill.base.runtime.tasks import is_own_fault, sentence
from tidemill.kafka.api.required_operations import checked
from tidemill.kafka.error_codes import UNKNOWN_SERVER_ERROR
from tidemill.kafka.schema.codec_compiler import Body, decode_request, encode_response, is_flexible
from tidemill.kafka.schema.primitives import I32, MalformedFrameError, begin_request, read_i16, skip_tags
from tidemill.objects.store import Buffer

if TYPE_CHECKING:
    from tidemill.kafka.api.context import Context
    from tidemill.kafka.net.listener_security import ClientIdentity

HEADER_BYTES_MIN = 10
API_VERSIONS = 18

LARGE_ANSWER_ELEMENTS: Final = 2_000
"""Some 5 ms of writing."""

LARGE_REQUEST_BYTES: Final = 4_096
"""At two bytes an element, some 3 ms of reading."""

AT_ONCE: Final = 32
"""Things of one request that are worked on together."""

T = TypeVar("T")
R = TypeVar("R")

log = structlog.get_logger()

Reply = list[Buffer]
"""The response's body as buffers to be sent back to back."""
Begin = Callable[["Context", "Request"], Awaitable[Reply]]


class Stall(Exception):
    """Raised by `begin` before it has reserved anything: call it again when `until` has ended.

    The session begins nothing else of the connection meanwhile. A refusal instead would let what the client has
    pipelined behind this request overtake it, which is seed 000's fault by another door.
    """

    def __init__(self, until: asyncio.Future[None]) -> None:
        super().__init__()
        self.until = until


class Request(msgspec.Struct):
    """One frame with its header read.

        header v1   api key int16 · api version int16 · correlation id int32 · client id nullable legacy string
        header v2   the same · tagged fields (flexible versions; the client id stays a legacy string)

    `position` is where the body starts in `view`. `answered` is cleared by `begin` when the client expects
    no response (Produce with acks=0). `sender` is the connection's number in this process, `visitor` who is at its
    other end, `throttle_ms` what its answer says of a quota, `spent_s` how long the event loop worked for it, where
    that is limited. `reserving`, set by `begin`: to be awaited before anything else of the connection begins.
    """

    key: int
    version: int
    correlation_id: int
    client_id: str
    view: memoryview
    position: int
    answered: bool = True
    sender: int = 0
    reserving: Awaitable[None] | None = None
    throttle_ms: int = 0
    spent_s: float = 0.0
    visitor: ClientIdentity = None  # type: ignore[assignment]  # set by the session, before `begin`


class Api(msgspec.Struct, frozen=True):
    """One API as served.

    advertised_min  what ApiVersions says, when lower than what is served (Produce: librdkafka's feature test)
    begin           called while the frame is handled; whatever must keep request order happens inside this
                    plain call, whatever may wait happens in the awaitable it returns
    abandon         stop working on it when the client is gone (reads only: writes go on)
    at_once         how many of one connection are worked on together; writes one after the other, in their order
    barrier         what the connection asks behind it, of any API, begins after its end (Kafka: behind every request)
    """

    key: int
    name: str
    min_version: int
    max_version: int
    begin: Begin
    advertised_min: int = -1
    abandon: bool = False
    at_once: int = 1
    barrier: bool = False

    @property
    def lowest_advertised(self) -> int:
        return self.min_version if self.advertised_min < 0 else self.advertised_min


Handle = Callable[["Context", Request, Body], Coroutine[Any, Any, Body]]
Failed = Callable[[Body, int], Body]
"""(the request, an error code) → the answer that says so of everything that was asked for."""


def cold(handle: Handle, failed: Failed) -> Begin:
    """A handler on decoded dicts: nothing happens before its turn on the connection comes.

    It is given what its client may do of what was asked for (`required_operations`), and nothing where that is nothing.
    A fault of `handle`, of whatever type, is this request's: UNKNOWN_SERVER_ERROR, and the connection goes on.
    """

    async def begin(context: Context, request: Request) -> Reply:
        body = await decoded(context.pace, request, _decode)
        try:
            answer = await checked(context, request, body, partial(handle, context, request), failed)
            return await encoded(context.pace, request, answer)
        except BaseException as error:
            if not is_own_fault(error):
                raise
            fault = error
        log.error(
            "kafka.request_fault",
            key=request.key,
            version=request.version,
            client_id=request.client_id,
            error=sentence(fault),
            exc_info=fault,
        )
        return [encode_response(request.key, request.version, failed(body, UNKNOWN_SERVER_ERROR))]

    return begin


def _decode(request: Request) -> Body:
    return decode_request(request.key, request.version, request.view, request.position)


async def decoded(pace: CoopBudget, request: Request, decode: Callable[[Request], T]) -> T:
    """The request's body; a large one is read in a thread, so that it does not hold the loop. Raises
    MalformedFrameError."""

    def work() -> T:
        begin_request()
        return decode(request)

    if len(request.view) > LARGE_REQUEST_BYTES:
        return await asyncio.to_thread(work)
    if pace.due:
        await pace.rest()
    return work()


async def encoded(pace: CoopBudget, request: Request, body: Body) -> Reply:
    """The answer's bytes; a large one is written in a thread."""
    if _weight(body) >= LARGE_ANSWER_ELEMENTS:
        return [await asyncio.to_thread(encode_response, request.key, request.version, body)]
    if pace.due:
        await pace.rest()
    return [encode_response(request.key, request.version, body)]


def _weight(body: Body) -> int:
    """About how many elements an answer has, two arrays deep; LARGE_ANSWER_ELEMENTS or more where there are so many."""
    lists = [value for value in body.values() if isinstance(value, list)]
    weight = sum(map(len, lists))
    for item in chain.from_iterable(lists):
        if weight >= LARGE_ANSWER_ELEMENTS:
            break
        if isinstance(item, dict):
            weight += sum(len(value) for value in item.values() if isinstance(value, list))
    return weight


async def each(items: Sequence[T], work: Callable[[T], Coroutine[Any, Any, R]], pace: CoopBudget) -> list[R]:
    """`work` of every item, in order, a few at a time: a request names thousands of things, and the loop has others."""
    found: list[R] = []
    for at in range(0, len(items), AT_ONCE):
        if pace.due:
            await pace.rest()
        found += await asyncio.gather(*map(work, items[at : at + AT_ONCE]))
    return found


async def within(timeout_ms: int, work: Coroutine[Any, Any, T], *, late: T) -> T:
    """What `work` returns, or `late` when the client's time is up first; below 1 ms the work's own bounds hold."""
    try:
        async with asyncio.timeout(timeout_ms / 1000 if timeout_ms > 0 else None):
            return await work
    except TimeoutError:
        return late


def peek(view: memoryview) -> tuple[int, int, int]:
    """(key, version, correlation id). Raises MalformedFrameError."""
    if len(view) < HEADER_BYTES_MIN - 2:
        raise MalformedFrameError(f"request shorter than a header: bytes={len(view)}.")
    return read_i16(view, 0)[0], read_i16(view, 2)[0], I32.unpack_from(view, 4)[0]


def read_request(view: memoryview, key: int, version: int, correlation_id: int) -> Request:
    """Read the rest of the header of a version we serve. Raises MalformedFrameError."""
    length, position = read_i16(view, 8)
    client_id = ""
    if length >= 0:
        if position + length > len(view):
            raise MalformedFrameError(f"client id passes the end of the frame: length={length}.")
        client_id = str(view[position : position + length], "utf-8", "replace")
        position += length
    if is_flexible(key, version):
        position = skip_tags(view, position)
    return Request(key, version, correlation_id, client_id, view, position)


def response_head(key: int, version: int, correlation_id: int, body_bytes: int) -> bytes:
    """Size prefix and response header: v1 with (empty) tags for flexible versions, but v0 always for ApiVersions."""
    flexible = key != API_VERSIONS and is_flexible(key, version)
    size = 4 + flexible + body_bytes
    return I32.pack(size) + I32.pack(correlation_id) + (b"\x00" if flexible else b"")
