"""Transitions of a shard: state and command in, next state or a rejection out. Pure.

A rejected command changes nothing, on every process that replays the log. `committed` is a success that changes
nothing: the same append has landed before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from typing import assert_never

import msgspec
from msgspec.structs import replace

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Batch, written_ms
from tidemill.shards.parts.schema_evolution import evolve_schema
from tidemill.shards.state.commands import (
    Append,
    BatchId,
    Close,
    Command,
    Create,
    DowngradeSince,
    Drop,
    Evolve,
    MarkCollected,
    ReleaseHold,
    Replace,
    SetHold,
    Sweep,
)
from tidemill.shards.state.state import (
    HOLDS_MAX,
    SCHEMA_VERSIONS_MAX,
    WRITER_TOKENS_MAX,
    Garbage,
    ReadHold,
    SchemaVersion,
    ShardState,
    WriterToken,
    batch_sums,
    broken_invariant_of_step,
    is_garbage_full,
)


class RejectionReason(StrEnum):
    ABSENT = "absent"
    EXISTS = "exists"
    CLOSED = "closed"
    BOUNDS = "bounds"
    UPPER = "upper"
    TOKEN = "token"
    COMMITTED = "committed"
    HISTORY = "history"
    FENCED = "fenced"
    MOVED = "moved"
    FULL = "full"
    STALE = "stale"
    DROPPED = "dropped"
    BROKEN = "broken"
    SCHEMA = "schema"
    EVOLVED = "evolved"


class RejectedCommand(msgspec.Struct, frozen=True):
    """A rejection: nothing changed. COMMITTED is the only reason that means success."""

    reason: RejectionReason
    detail: str = ""


def batch_bounds_error(batch: Batch) -> str:
    """Return why these bounds can never be appended, or "". Depends on the input alone, so it needs no request."""
    if batch.lower < 0 or batch.upper <= batch.lower:
        return f"a batch needs 0 ≤ lower < upper: lower={batch.lower} upper={batch.upper}"
    if any(p.rows <= 0 or (not p.object_key and not p.inline) for p in batch.parts):
        return "a part is empty or has no data"
    return ""


def batch_id(batch: Batch) -> BatchId:
    return BatchId(batch.lower, batch.upper, batch.token)


def apply(state: ShardState | None, command: Command) -> ShardState | RejectedCommand:
    """Return the next state, or a rejection. Checks everything before it builds anything."""
    if isinstance(command, Create):
        if state is not None:
            return RejectedCommand(RejectionReason.EXISTS, f"table={state.name}")
        return ShardState(command.name, command.shard_id, command.schema, version=1)
    if state is None:
        return RejectedCommand(RejectionReason.ABSENT)
    if state.dropped:
        return RejectedCommand(RejectionReason.DROPPED)
    match command:
        case Append():
            new = _append(state, command)
        case SetHold():
            new = _set_hold(state, command)
        case ReleaseHold():
            new = _with_holds(state, tuple(h for h in state.holds if h.reader != command.reader), command.now_ms)
        case DowngradeSince():
            new = _downgrade(state, command)
        case Replace():
            new = _replace(state, command)
        case Close():
            new = RejectedCommand(RejectionReason.CLOSED) if state.closed else replace(state, closed=True)
        case Drop():
            new = _drop(state, command)
        case MarkCollected():
            new = replace(state, garbage=tuple(g for g in state.garbage if g.version > command.version))
        case Sweep():
            new = replace(state, swept_ms=max(state.swept_ms, command.before_ms))
        case Evolve():
            new = _evolve(state, command)
        case _:
            assert_never(command)
    if isinstance(new, RejectedCommand):
        return new
    new = replace(new, version=state.version + 1)
    broken = broken_invariant_of_step(state, new)
    return RejectedCommand(RejectionReason.BROKEN, broken) if broken else new


def _append(state: ShardState, command: Append) -> ShardState | RejectedCommand:
    batch = command.batch
    bad = batch_bounds_error(batch)
    if bad:
        return RejectedCommand(RejectionReason.BOUNDS, bad)
    if batch.token:
        for known in reversed(state.writers):
            if known.token == batch.token:
                if (known.lower, known.upper) != (batch.lower, batch.upper):
                    return RejectedCommand(RejectionReason.TOKEN, f"token used for [{known.lower}, {known.upper})")
                return RejectedCommand(RejectionReason.COMMITTED)
    if state.closed:
        return RejectedCommand(RejectionReason.CLOSED)
    if batch.schema_version != state.schema.version:
        # The writer does not know the new columns, so equal writers would write unequal rows. This includes intervals
        # without rows: a change in the new columns alone looks like no change to the writer.
        return RejectedCommand(
            RejectionReason.EVOLVED, f"version={state.schema.version} written={batch.schema_version}"
        )
    if _is_stale(state, batch):
        return RejectedCommand(RejectionReason.STALE, f"swept_ms={state.swept_ms}")
    if state.upper != batch.lower:
        return RejectedCommand(RejectionReason.UPPER, f"upper={state.upper} lower={batch.lower}")
    rows, size_bytes, inline_bytes = batch_sums(batch)
    batches = state.batches
    if batches and not batch.parts and not batches[-1].parts:
        # Idle ticks must not grow the state. Only an empty batch is extended: parts registered with narrower bounds
        # than written would otherwise reveal their hidden rows.
        batches = (*batches[:-1], replace(batch, lower=batches[-1].lower))
    else:
        batches = (*batches, batch)
    token = WriterToken(batch.writer, batch.token, batch.lower, batch.upper)
    others = tuple(w for w in state.writers if w.writer != batch.writer)
    return replace(
        state,
        upper=batch.upper,
        batches=batches,
        writers=(*others, token)[-WRITER_TOKENS_MAX:] if batch.token else state.writers,
        rows=state.rows + rows,
        size_bytes=state.size_bytes + size_bytes,
        inline_bytes=state.inline_bytes + inline_bytes,
    )


def _set_hold(state: ShardState, command: SetHold) -> ShardState | RejectedCommand:
    if command.since < state.since:
        return RejectedCommand(RejectionReason.HISTORY, f"since={state.since} wanted={command.since}")
    if command.expires_ms <= command.now_ms:
        return RejectedCommand(RejectionReason.BOUNDS, "a lease must end in the future")
    old = _find_hold(state, command.reader)
    if old is not None and (old.expires_ms == 0 or old.since > command.since):
        return RejectedCommand(
            RejectionReason.BOUNDS,
            f"hold is critical or has advanced further: reader={command.reader} since={old.since}",
        )
    others = tuple(h for h in state.holds if h.reader != command.reader and h.is_live(command.now_ms))
    if len(others) >= HOLDS_MAX:
        return RejectedCommand(RejectionReason.FULL, f"holds={len(others)}")
    # A mere renewal still protects the batches that its reader chose long ago; a lapsed or advanced hold starts from
    # here.
    renewed = old is not None and old.is_live(command.now_ms) and old.since == command.since
    version = old.version if old is not None and renewed else state.version + 1
    hold = ReadHold(command.reader, command.since, command.expires_ms, version=version)
    return _with_holds(state, (*others, hold), command.now_ms)


def _downgrade(state: ShardState, command: DowngradeSince) -> ShardState | RejectedCommand:
    old = _find_hold(state, command.owner)
    if old is not None and old.expires_ms:
        return RejectedCommand(RejectionReason.BOUNDS, f"hold is leased: reader={command.owner}")
    if old is not None and command.epoch < old.epoch:
        return RejectedCommand(RejectionReason.FENCED, f"owner={command.owner} epoch={old.epoch}")
    since = max(command.since, state.since if old is None else old.since)
    hold = ReadHold(command.owner, since, 0, command.epoch)
    others = tuple(h for h in state.holds if h.reader != command.owner)
    return _with_holds(state, (*others, hold), command.now_ms)


def _find_hold(state: ShardState, reader: str) -> ReadHold | None:
    return next((h for h in state.holds if h.reader == reader), None)


def _with_holds(state: ShardState, holds: tuple[ReadHold, ...], now_ms: int) -> ShardState:
    """Drop expired leases, then advance since to the minimum of the holds. Leased holds alone never advance since."""
    live = tuple(h for h in holds if h.is_live(now_ms))
    since = state.since
    if any(h.expires_ms == 0 for h in live):
        since = max(since, min(min(h.since for h in live), state.upper - 1))
    return replace(state, holds=live, since=since)


def _replace(state: ShardState, command: Replace) -> ShardState | RejectedCommand:
    old, merged = command.replaced, command.merged
    if not old or merged.lower != old[0].lower or merged.upper != old[-1].upper or batch_bounds_error(merged):
        return RejectedCommand(RejectionReason.BOUNDS, "a merged batch must cover exactly what it replaces")
    at = bisect_left(state.batches, merged.lower, key=lambda b: b.lower)
    run = state.batches[at : at + len(old)]
    if tuple(batch_id(b) for b in run) != old:
        return RejectedCommand(RejectionReason.MOVED, f"lower={merged.lower} upper={merged.upper}")
    if not max(b.schema_version for b in run) <= merged.schema_version <= state.schema.version:
        return RejectedCommand(
            RejectionReason.EVOLVED, f"version={state.schema.version} written={merged.schema_version}"
        )
    if _is_stale(state, merged):
        return RejectedCommand(RejectionReason.STALE, f"swept_ms={state.swept_ms}")
    if is_garbage_full(state):
        return RejectedCommand(RejectionReason.FULL, f"garbage={len(state.garbage)}")
    gone = [batch_sums(b) for b in run]
    rows, size_bytes, inline_bytes = batch_sums(merged)
    return replace(
        state,
        garbage=_with_garbage(state, run, merged, command.at_ms),
        batches=(*state.batches[:at], merged, *state.batches[at + len(old) :]),
        rows=state.rows + rows - sum(g[0] for g in gone),
        size_bytes=state.size_bytes + size_bytes - sum(g[1] for g in gone),
        inline_bytes=state.inline_bytes + inline_bytes - sum(g[2] for g in gone),
    )


def _with_garbage(state: ShardState, run: Sequence[Batch], merged: Batch, at_ms: int) -> tuple[Garbage, ...]:
    """Return the garbage plus the objects of `run` to which `merged` does not refer."""
    kept = {part.object_key for part in merged.parts}
    gone = [part for batch in run for part in batch.parts if part.object_key and part.object_key not in kept]
    if not gone or not at_ms:
        return state.garbage
    size_bytes = sum(part.size_bytes for part in gone)
    return (*state.garbage, Garbage(state.version + 1, at_ms, size_bytes, tuple(part.object_key for part in gone)))


def _is_stale(state: ShardState, batch: Batch) -> bool:
    """Return whether one of its objects is so old that a sweep may have deleted it as an orphan."""
    return state.swept_ms > 0 and any(0 <= written_ms(part.object_key) < state.swept_ms for part in batch.parts)


def _drop(state: ShardState, command: Drop) -> ShardState | RejectedCommand:
    if command.shard_id != state.shard_id:
        return RejectedCommand(RejectionReason.BOUNDS, f"another table: id={state.shard_id} wanted={command.shard_id}")
    batches = (Batch(0, state.upper, ()),) if state.upper else ()
    return replace(
        state, batches=batches, holds=(), writers=(), garbage=(), rows=0, size_bytes=0, inline_bytes=0,
        closed=True, dropped=True,
    )  # fmt: skip


def _evolve(state: ShardState, command: Evolve) -> ShardState | RejectedCommand:
    if state.closed:
        return RejectedCommand(RejectionReason.CLOSED)
    try:
        schema = evolve_schema(state.schema, command.changes)
    except InvalidError as error:
        return RejectedCommand(RejectionReason.SCHEMA, error.message)
    if schema == state.schema:
        return RejectedCommand(RejectionReason.COMMITTED)
    old = {column.name: column for column in state.schema.columns}
    kept = [(old[c.name], c) for c in schema.columns if c.name in old]
    added = tuple(c.name for c in schema.columns if c.name not in old or (old[c.name].retired and not c.retired))
    widened = tuple((was.name, was.type) for was, c in kept if c.type != was.type)
    retired = tuple(c.name for was, c in kept if c.retired and not was.retired)
    version = SchemaVersion(schema.version, state.upper, command.at_ms, added, widened, retired)
    return replace(state, schema=schema, versions=(*state.versions, version)[-SCHEMA_VERSIONS_MAX:])


def collectable_garbage(state: ShardState, before_ms: int, now_ms: int, seen: int = 0) -> tuple[Garbage, ...]:
    """Return the garbage, oldest first, that was replaced before `before_ms` and that no live hold may read. Pure.

    Garbage up to version `seen` was replaced before that also if its time is later: the clock of its merge may have
    been ahead. Always a prefix: `MarkCollected` names it by its last version.
    """
    chosen_from = min((h.version for h in state.holds if h.expires_ms and h.is_live(now_ms)), default=None)
    out: list[Garbage] = []
    for garbage in state.garbage:
        young = garbage.at_ms >= before_ms and garbage.version > seen
        if young or (chosen_from is not None and garbage.version > chosen_from):
            break
        out.append(garbage)
    return tuple(out)
