"""Interface between sessions and handlers: requests, replies, and the table row that describes an API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import structlog

from tidemill.base.runtime.coop import CoopBudget
from tidemill.base.runtime.tasks import error_sentence, is_own_fault_of_await
from tidemill.kafka.api.required_operations import authorize_and_handle
from tidemill.kafka.error_codes import UNKNOWN_SERVER_ERROR
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.schema.codec_compiler import Body, decode_request, encode_response, is_flexible
from tidemill.kafka.schema.primitives import I32, MalformedFrameError, read_i16, reset_element_count, skip_tags
from tidemill.objects.store import Buffer

if TYPE_CHECKING:
    from tidemill.kafka.api.context import Context
    from tidemill.kafka.net.listener_security import ClientIdentity

HEADER_BYTES_MIN = 10
API_VERSIONS = 18

LARGE_ANSWER_ELEMENTS: Final = 2_000
"""Number of elements from which an answer is encoded in a thread: some 5 ms of work."""

LARGE_REQUEST_BYTES: Final = 4_096
"""Size from which a request is decoded in a thread: at two bytes an element, some 3 ms of work."""

CONCURRENT_ITEMS_MAX: Final = 32
"""Number of items of one request that are processed concurrently."""

T = TypeVar("T")
R = TypeVar("R")

log = structlog.get_logger()

Reply = list[Buffer]
"""Response body as buffers to be sent back to back."""
Begin = Callable[["Context", "Request"], "Awaitable[Reply] | PlainOutcome"]


class PlainOutcome:
    """Outcome of a request that ends in a callback: a future whose callback runs immediately.

    A future would run it in the next turn of the loop, at the cost of that turn.
    """

    __slots__ = ("_error", "_reply", "_then")

    def __init__(self) -> None:
        self._reply: Reply | None = None
        self._error: BaseException | None = None
        self._then: Callable[[PlainOutcome], object] | None = None

    def done(self) -> bool:
        return self._reply is not None or self._error is not None

    def cancelled(self) -> bool:
        return False

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Reply:
        if self._reply is None:
            raise self._error or asyncio.InvalidStateError("the request has not ended")
        return self._reply

    def set_result(self, reply: Reply) -> None:
        self._reply = reply
        self._run_callback()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._run_callback()

    def add_done_callback(self, then: Callable[[PlainOutcome], object]) -> None:
        """Set the only callback. It runs in the next turn of the loop if the request has ended already."""
        if self.done():
            asyncio.get_running_loop().call_soon(then, self)
        else:
            self._then = then

    def _run_callback(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(self)


class Stall(Exception):
    """Raised by `begin` before it has reserved anything: the session calls `begin` again when `until` has ended.

    The session begins no other request of the connection in the meantime. A rejection would instead let the requests
    that the client has pipelined overtake this one.
    """

    def __init__(self, until: asyncio.Future[None]) -> None:
        super().__init__()
        self.until = until


class Request(msgspec.Struct):
    """Request of one frame, with its header decoded.

        header v1   api key int16 · api version int16 · correlation id int32 · client id nullable legacy string
        header v2   the same · tagged fields (flexible versions; the client id stays a legacy string)

    position     where the body starts in `view`
    answered     cleared by `begin` if the client expects no response (Produce with acks=0)
    sender       number of the connection in this process
    visitor      identity of the client
    throttle_ms  throttle time that the answer reports
    spent_s      time that the event loop worked for it, where a quota limits it
    reserving    set by `begin`: awaited before the next request of the connection begins
    is_kept      set by `begin`: it is processed also when the client is gone, though its API is abandoned
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
    is_kept: bool = False
    throttle_ms: int = 0
    spent_s: float = 0.0
    visitor: ClientIdentity = None  # type: ignore[assignment]  # set by the session, before `begin`


class Api(msgspec.Struct, frozen=True):
    """One supported API.

    advertised_min  the minimum that ApiVersions reports, if lower than supported (Produce: librdkafka's feature test)
    begin           called while the frame is handled; work that must keep request order happens inside this
                    plain call, work that may wait happens in the awaitable that it returns
    abandon         cancel the request when the client is gone (reads only: writes continue)
    at_once         requests of one connection that run concurrently; writes run one after the other, in order
    barrier         later requests of the connection, of any API, begin after its end (Kafka: after every request)
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
ErrorAnswer = Callable[[Body, int], Body]
"""Function of the request and an error code; returns the answer that reports the code for every requested item."""


def begin_decoded(handle: Handle, failed: ErrorAnswer) -> Begin:
    """Return the `begin` of a handler on decoded dicts, which does nothing before its turn on the connection.

    `handle` receives the authorized part of the request (`required_operations`), and is not called if that is empty.
    A GroupUnavailableError of `handle` is answered with its code. Any other error fails only this request: the answer
    is UNKNOWN_SERVER_ERROR, and the connection continues.
    """

    async def begin_request(context: Context, request: Request) -> Reply:
        body = await decode_body(context.pace, request, _decode)
        try:
            try:
                answer = await authorize_and_handle(context, request, body, partial(handle, context, request), failed)
            except GroupUnavailableError as unavailable:
                answer = failed(body, unavailable.code)
            return await encode_answer(context.pace, request, answer)
        except BaseException as error:
            if not is_own_fault_of_await(error):
                raise
            fault = error
        log.error(
            "kafka.request_fault",
            key=request.key,
            version=request.version,
            client_id=request.client_id,
            error=error_sentence(fault),
            exc_info=fault,
        )
        return [encode_response(request.key, request.version, failed(body, UNKNOWN_SERVER_ERROR))]

    return begin_request


def _decode(request: Request) -> Body:
    return decode_request(request.key, request.version, request.view, request.position)


async def decode_body(pace: CoopBudget, request: Request, decode: Callable[[Request], T]) -> T:
    """Decode the request's body; a large one in a thread, so that it does not block the loop.

    Raises MalformedFrameError.
    """

    def work() -> T:
        reset_element_count()
        return decode(request)

    if len(request.view) > LARGE_REQUEST_BYTES:
        return await asyncio.to_thread(work)
    if pace.is_used_up:
        await pace.wait_for_turn()
    return work()


async def encode_answer(pace: CoopBudget, request: Request, body: Body) -> Reply:
    """Encode the answer; a large one in a thread."""
    if _count_elements(body) >= LARGE_ANSWER_ELEMENTS:
        return [await asyncio.to_thread(encode_response, request.key, request.version, body)]
    if pace.is_used_up:
        await pace.wait_for_turn()
    return [encode_response(request.key, request.version, body)]


def _count_elements(body: Body) -> int:
    """Return about how many elements an answer has, two arrays deep; counting stops at LARGE_ANSWER_ELEMENTS."""
    lists = [value for value in body.values() if isinstance(value, list)]
    weight = sum(map(len, lists))
    for item in chain.from_iterable(lists):
        if weight >= LARGE_ANSWER_ELEMENTS:
            break
        if isinstance(item, dict):
            weight += sum(len(value) for value in item.values() if isinstance(value, list))
    return weight


async def map_items(items: Sequence[T], work: Callable[[T], Coroutine[Any, Any, R]], pace: CoopBudget) -> list[R]:
    """Return the results of `work` for all items, in order.

    A few items run concurrently: a request can name thousands, and the loop serves other requests too.
    """
    found: list[R] = []
    for at in range(0, len(items), CONCURRENT_ITEMS_MAX):
        if pace.is_used_up:
            await pace.wait_for_turn()
        found += await asyncio.gather(*map(work, items[at : at + CONCURRENT_ITEMS_MAX]))
    return found


async def run_with_timeout(timeout_ms: int, work: Coroutine[Any, Any, T], *, late: T) -> T:
    """Return what `work` returns, or `late` if the client's timeout expires first.

    Below 1 ms there is no timeout but the work's own limits.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1000 if timeout_ms > 0 else None):
            return await work
    except TimeoutError:
        return late


def peek_header(view: memoryview) -> tuple[int, int, int]:
    """Return (key, version, correlation id) of a request. Raises MalformedFrameError."""
    if len(view) < HEADER_BYTES_MIN - 2:
        raise MalformedFrameError(f"request shorter than a header: bytes={len(view)}.")
    return read_i16(view, 0)[0], read_i16(view, 2)[0], I32.unpack_from(view, 4)[0]


def read_request(view: memoryview, key: int, version: int, correlation_id: int) -> Request:
    """Decode the rest of the header of a supported version. Raises MalformedFrameError."""
    length, position = read_i16(view, 8)
    client_id = ""
    if length >= 0:
        if position + length > len(view):
            raise MalformedFrameError(f"client id exceeds the frame: length={length}.")
        client_id = str(view[position : position + length], "utf-8", "replace")
        position += length
    if is_flexible(key, version):
        position = skip_tags(view, position)
    return Request(key, version, correlation_id, client_id, view, position)


def response_head(key: int, version: int, correlation_id: int, body_bytes: int) -> bytes:
    """Return the size prefix and response header: v1 with empty tags for flexible versions, but always v0 for
    ApiVersions.
    """
    flexible = key != API_VERSIONS and is_flexible(key, version)
    size = 4 + flexible + body_bytes
    return I32.pack(size) + I32.pack(correlation_id) + (b"\x00" if flexible else b"")
