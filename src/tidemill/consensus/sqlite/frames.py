"""The wire between clients and the sequencer: requests may be pipelined, answers come back in any order.

frame     length uint32 little-endian | body (msgpack)
request   [id, [tag, field, …]]                id counts from 1 per client; tags: `commands`, 20 Hello, 21 Forget
answer    [id, outcome, body]                  outcome 0: body is the result; else body is [message, fix, current]
bye       [0, 99, nil]                         orderly end: nothing unanswered was executed
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill.base.errors import (
    Closed,
    Conflict,
    Corrupt,
    Fenced,
    Invalid,
    Missing,
    TidemillError,
    Unavailable,
    Unknown,
)
from tidemill.consensus.api import Lease, LogHead, LogSlice, Versioned
from tidemill.consensus.commands import (
    Acquire,
    AnyOp,
    Append,
    Cas,
    Fence,
    Head,
    HeadOfLog,
    Leases,
    Op,
    Read,
    Release,
    Scan,
    Truncate,
    Wait,
)

WIRE_VERSION = 1
FRAME_BYTES = 96 << 20
"""More than the largest append; a longer frame means the peer does not speak this protocol."""

OK = 0
BYE = 99


class Hello(Op, frozen=True, tag=20):
    """First on every connection. Ends the client's earlier connection: what it sent there and was not read is void."""

    version: int
    client: str


class Forget(Op, frozen=True, tag=21):
    """The wait of this request id is no longer wanted."""

    request: int


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: int
    op: AnyOp | Hello | Forget


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: int
    outcome: int
    body: msgspec.Raw


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    message: str
    fix: str
    current: msgspec.Raw


ERRORS: dict[int, type[TidemillError]] = {
    1: Conflict,
    2: Fenced,
    3: Invalid,
    4: Missing,
    5: Unavailable,
    6: Unknown,
    7: Corrupt,
    8: Closed,
}
_OUTCOMES = {kind: number for number, kind in ERRORS.items()}

_RESULTS: dict[type, Any] = {
    Head: Versioned | None,
    Cas: Versioned,
    Scan: list[tuple[str, Versioned]],
    HeadOfLog: LogHead,
    Fence: LogHead,
    Append: LogHead,
    Read: LogSlice,
    Truncate: LogHead,
    Wait: bool,
    Acquire: Lease,
    Release: None,
    Leases: list[Lease],
    Hello: None,
}
_CURRENTS: dict[type, Any] = {Cas: Versioned | None, Append: LogHead, Fence: LogHead, Acquire: Lease | None}

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_answer_decoder = msgspec.msgpack.Decoder(Answer)
_refusal_decoder = msgspec.msgpack.Decoder(Refusal)
_result_decoders = {op: msgspec.msgpack.Decoder(kind) for op, kind in _RESULTS.items()}
_current_decoders = {op: msgspec.msgpack.Decoder(kind) for op, kind in _CURRENTS.items()}


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def encode_request(request_id: int, op: AnyOp | Hello | Forget) -> bytes:
    return _frame(_encoder.encode((request_id, op)))


def decode_request(body: bytes | bytearray | memoryview) -> Request:
    """Raises msgspec.DecodeError on anything but a request."""
    return _request_decoder.decode(body)


def encode_result(request_id: int, result: object) -> bytes:
    return _frame(_encoder.encode((request_id, OK, result)))


def encode_error(request_id: int, error: TidemillError) -> bytes:
    kind = next(_OUTCOMES[base] for base in type(error).__mro__ if base in _OUTCOMES)
    current = getattr(error, "current", None)
    return _frame(_encoder.encode((request_id, kind, (error.message, error.fix, current))))


def encode_bye() -> bytes:
    return _frame(_encoder.encode((0, BYE, None)))


def decode_answer(body: bytes | bytearray | memoryview) -> Answer:
    return _answer_decoder.decode(body)


def decode_result(op: Op, answer: Answer) -> Any:
    return _result_decoders[type(op)].decode(answer.body)


def decode_error(op: Op, answer: Answer) -> TidemillError:
    refusal = _refusal_decoder.decode(answer.body)
    kind = ERRORS.get(answer.outcome, Unknown)
    if kind is Conflict or kind is Fenced:
        decoder = _current_decoders.get(type(op))
        current = decoder.decode(refusal.current) if decoder else None
        return kind(refusal.message, current=current, fix=refusal.fix)
    return kind(refusal.message, fix=refusal.fix)


class Splitter:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Whole bodies so far. Raises Corrupt when the stream cannot be this protocol's."""
        if self._buffer:
            self._buffer += data
            source: bytes | bytearray = self._buffer
        else:
            source = data
        bodies: list[bytes] = []
        start, end = 0, len(source)
        while end - start >= 4:
            size = int.from_bytes(source[start : start + 4], "little")
            if size > FRAME_BYTES:
                raise Corrupt(f"A frame is longer than the protocol allows: size_bytes={size}.")
            if end - start - 4 < size:
                break
            bodies.append(bytes(source[start + 4 : start + 4 + size]))
            start += 4 + size
        if source is self._buffer:
            del self._buffer[:start]
        elif start < end:
            self._buffer += source[start:]
        return bodies
