"""Commits of processes that do not lead, through two logs that any process may append to (term 0).

    log metastore/<domain>/requests    [nonce, [[key, value]…], {key: seqno}, expires_ms]
                                       no rows: a flush
    log metastore/<domain>/replies     [nonce, kind, seqno, [[key, seqno, value]…], text, fix]
                                       kind: 0 done, 1 conflict (rows: seqno −1 = no such row; no rows: too many
                                       to send), 2 invalid, 3 unavailable, 4 unknown, 5 corrupt
                                       An unknown kind is read as unavailable.

    row 00 "requests"                  [position, seqno_delta, epoch_delta]: the next request to execute, in the
                                       request log that accompanies the log with these deltas

- Invariant (at most once): a request is executed at most once. The row with the next position is written in the same
  batch that executes it, or in a separate batch if it was rejected. It is executed unless it expires before a leader
  exists.
- Invariant (durable replies): a reply is written only when the outcome that it reports is durable.
- Invariant (expiry): a request that was not executed by `expires_ms` (the requester's wall clock) is rejected, never
  executed. So a requester that got UnknownOutcomeError knows after that time that it did not happen, and no later
  leader executes old requests.
- Invariant (unanswered requests): a request below the position that is still in the log may have no reply, since its
  leader may have ended in between. The next leader immediately replies UnknownOutcomeError; an earlier reply is read
  first.
- Untrusted requesters: undecodable requests are skipped; a requester that died gets a reply that no process reads.
- Requests below the position are truncated. The newest REPLIES_KEPT replies are retained.

The two deltas identify the log: a domain that was restored into empty consensus has a position row of its former log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.limits import MIB
from tidemill.consensus.api import Consensus, LogHead, resolve_append
from tidemill.metastore.domain.state import DomainState
from tidemill.metastore.lsm.read_view import Row

POSITION_KEY = b"\x00requests\x00\x01"
REPLIES_KEPT = 1_000
APPEND_BYTES = 4 * MIB
"""Limit of requests or replies in one append. The last one may exceed it."""

CONFLICT_BYTES = 1 * MIB
"""Limit of the rows sent with a conflict; beyond it none are sent."""

RETRY_PAUSE_S = 0.05

DONE, CONFLICT, INVALID, UNAVAILABLE, UNKNOWN, CORRUPT = range(6)


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Request to the leader: a commit, or a flush if it has no rows."""

    nonce: str
    rows: list[tuple[bytes, bytes]]
    expects: dict[bytes, int]
    expires_ms: int

    def has_expired(self, now_ms: int) -> bool:
        return self.expires_ms < now_ms


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Reply to one request, identified by its nonce."""

    nonce: str
    kind: int
    seqno: int = 0
    rows: list[tuple[bytes, int, bytes]] = []
    text: str = ""
    fix: str = ""


class RequestPosition(msgspec.Struct, frozen=True, array_like=True):
    """Value of the row at POSITION_KEY."""

    position: int
    seqno_delta: int
    epoch_delta: int


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_position = msgspec.msgpack.Decoder(RequestPosition).decode


def requests_log(domain: str) -> str:
    return f"metastore/{domain}/requests"


def replies_log(domain: str) -> str:
    return f"metastore/{domain}/replies"


def encode_position(state: DomainState, position: int) -> bytes:
    return _encode(RequestPosition(position, state.seqno_delta, state.epoch_delta))


def decode_position(state: DomainState, value: bytes | None) -> int:
    """Return the position of the next request to execute; 0 if none was ever executed from this log."""
    if value is None:
        return 0
    try:
        place: RequestPosition = _decode_position(value)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the position of requests cannot be read: value={value.hex()}.") from error
    same_log = (place.seqno_delta, place.epoch_delta) == (state.seqno_delta, state.epoch_delta)
    return place.position if same_log else 0


def decode_request(data: bytes) -> Request | None:
    """Decode a request; None if the bytes are not a request."""
    try:
        request: Request = _decode_request(data)
        return request
    except msgspec.MsgspecError:
        return None


def rejection_reply(nonce: str, error: TidemillError) -> Reply:
    """Return the reply for a commit that certainly did not happen."""
    if isinstance(error, ConflictError) and isinstance(error.current, Mapping):
        rows = [
            (key, row.seqno if row is not None else -1, row.value if row is not None else b"")
            for key, row in error.current.items()
        ]
        if sum(len(key) + len(value) for key, _, value in rows) > CONFLICT_BYTES:
            rows = []
        return Reply(nonce, CONFLICT, 0, rows, error.message)
    kind = UNAVAILABLE
    if isinstance(error, InvalidError):
        kind = INVALID
    elif isinstance(error, CorruptError):
        kind = CORRUPT
    return Reply(nonce, kind, 0, [], error.message, error.fix)


def outcome_of_reply(reply: Reply) -> int | TidemillError:
    if reply.kind == DONE:
        return reply.seqno
    if reply.kind == CONFLICT:
        current = {key: None if seqno < 0 else Row(seqno, value) for key, seqno, value in reply.rows}
        return ConflictError(reply.text, current=current or None, fix="Read again and retry.")
    if reply.kind == UNKNOWN:
        return UnknownOutcomeError(reply.text, fix="Read the rows to see whether it was done.")
    if reply.kind == INVALID:
        return InvalidError(reply.text, fix=reply.fix)
    if reply.kind == CORRUPT:
        return CorruptError(reply.text, fix=reply.fix)
    return UnavailableError(reply.text, fix=reply.fix or "Retry.")


async def append_at_end(consensus: Consensus, rand: Rand, log: str, records: Sequence[bytes], at: int) -> LogHead:
    """Append at the log's end, which `at` guesses; return the head, whose `next` is where the records end.

    Raises UnavailableError (it did not happen), UnknownOutcomeError.
    """
    while True:
        nonce = rand.nonce()
        try:
            return await consensus.append(log, 0, at, records, nonce)
        except ConflictError as lost:
            at = lost.current.next if isinstance(lost.current, LogHead) else (await consensus.log_head(log)).next
        except UnknownOutcomeError as unknown:
            try:
                landed = await resolve_append(consensus, log, at, nonce)
            except (MissingError, UnavailableError) as error:
                # The log was truncated beyond the append, or consensus is unavailable: it may have happened.
                raise unknown from error
            if landed:
                return LogHead(0, at, at + len(records))
