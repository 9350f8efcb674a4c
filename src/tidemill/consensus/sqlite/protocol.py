"""The protocol between clients and the sequencer: requests may be pipelined, answers arrive in any order.

    frame     length uint32 little-endian | body (msgpack): a list of requests, or a list of answers
    request   [id, [tag, field, …]]          id counts from 1 per client; tags: `operations`, 20 Hello, 21 CancelWait
    answer    [id, outcome, body]            outcome 0: body is the result; else body is [message, fix, current]
    bye       [0, 99, nil]                   orderly end: unanswered requests were not executed

All messages of one side in one turn form one frame, so that one call encodes many.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    CorruptError,
    FencedError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.consensus.operations import AnyOp, Op

WIRE_VERSION = 4
FRAME_BYTES = 96 << 20
"""Frame limit, above the largest append. A longer frame means that the peer does not speak this protocol."""

OK = 0
GOODBYE_OUTCOME = 99


class Hello(Op[str], frozen=True, tag=20):
    """First request on a connection. Ends the client's earlier connection; requests not yet read from it are void. The
    result is the life of the sequencer: another one for each that opens the database."""

    version: int
    client: str


class CancelWait(Op[None], frozen=True, tag=21):
    """Cancel the wait with this request id."""

    request: int


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: int
    op: AnyOp | Hello | CancelWait


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    id: int
    outcome: int
    body: msgspec.Raw


class ErrorAnswer(msgspec.Struct, frozen=True, array_like=True):
    message: str
    fix: str
    current: msgspec.Raw


ERRORS: dict[int, type[TidemillError]] = {
    1: ConflictError,
    2: FencedError,
    3: InvalidError,
    4: MissingError,
    5: UnavailableError,
    6: UnknownOutcomeError,
    7: CorruptError,
    8: ClosedError,
}
_OUTCOMES = {kind: number for number, kind in ERRORS.items()}

_OPERATIONS: list[type[Op[Any]]] = [*get_args(AnyOp), Hello]

_encoder = msgspec.msgpack.Encoder()
_requests_decoder = msgspec.msgpack.Decoder(list[Request])
_answers_decoder = msgspec.msgpack.Decoder(list[Answer])
_refusal_decoder = msgspec.msgpack.Decoder(ErrorAnswer)
_result_decoders = {
    kind: msgspec.msgpack.Decoder(get_args(kind.__dict__["__orig_bases__"][0])[0]) for kind in _OPERATIONS
}
_current_decoders = {kind: msgspec.msgpack.Decoder(kind.current) for kind in _OPERATIONS if kind.current is not None}


Message = tuple[int, Any] | tuple[int, int, Any]
"""A request or an answer before encoding."""


def encode_frames(said: list[Any]) -> bytes:
    """Encode one frame, or one frame per message if together they would be too long."""
    body = _encoder.encode(said)
    if len(body) > FRAME_BYTES and len(said) > 1:
        return b"".join(encode_frames([one]) for one in said)
    return len(body).to_bytes(4, "little") + body


def result_answer(request_id: int, value: object) -> Message:
    return (request_id, OK, value)


def error_answer(request_id: int, error: TidemillError) -> Message:
    kind = next(_OUTCOMES[base] for base in type(error).__mro__ if base in _OUTCOMES)
    return (request_id, kind, (error.message, error.fix, getattr(error, "current", None)))


GOODBYE: Message = (0, GOODBYE_OUTCOME, None)


def decode_requests(body: bytes) -> list[Request]:
    """Decode the body of a frame of requests. Raises msgspec.MsgspecError."""
    return _requests_decoder.decode(body)


def decode_answers(body: bytes) -> list[Answer]:
    return _answers_decoder.decode(body)


def decode_result(op: Op[Any], answer: Answer) -> Any:
    return _result_decoders[type(op)].decode(answer.body)


def decode_error(op: Op[Any], answer: Answer) -> TidemillError:
    refusal = _refusal_decoder.decode(answer.body)
    kind = ERRORS.get(answer.outcome, UnknownOutcomeError)
    if kind is ConflictError or kind is FencedError:
        decoder = _current_decoders.get(type(op))
        current = decoder.decode(refusal.current) if decoder else None
        return kind(refusal.message, current=current, fix=refusal.fix)
    return kind(refusal.message, fix=refusal.fix)


class FrameSplitter:
    """Splitter of a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that are complete so far. Raises CorruptError if the stream cannot be of this protocol."""
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
                raise CorruptError(f"a frame is longer than the protocol allows: size_bytes={size}.")
            if end - start - 4 < size:
                break
            bodies.append(bytes(source[start + 4 : start + 4 + size]))
            start += 4 + size
        if source is self._buffer:
            del self._buffer[:start]
        elif start < end:
            self._buffer += source[start:]
        return bodies
