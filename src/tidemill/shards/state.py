"""The state of one shard, as the log gives it. Frozen; only `apply` makes the next one.

S1  since and upper only advance, and since < upper once anything is written: the newest time stays readable.
S2  the batches are contiguous: the first begins at 0, each begins where the last ended, the last ends at upper.
S3  since never passes a hold that stood when it moved.
S4  `rows`, `size_bytes` and `inline_bytes` are the sums over all parts.
"""

from __future__ import annotations

import msgspec

from tidemill.shards.front import Batch, ShardSchema

WRITERS_KEPT = 64
"""Tokens remembered, newest last. A writer resolves an unknown outcome at once, so few are ever asked for."""


class Hold(msgspec.Struct, frozen=True):
    """Keeps since at or below `since`. `expires_ms` 0 = critical: never expires, and `epoch` fences its owners."""

    reader: str
    since: int
    expires_ms: int = 0
    epoch: int = 0


class WriterToken(msgspec.Struct, frozen=True):
    """The newest append of one writer: proof, for that token, that it landed."""

    writer: str
    token: str
    lower: int
    upper: int


class ShardState(msgspec.Struct, frozen=True):
    """`shard_id` names the shard's objects and is never reused, unlike the name. `version` counts commands applied."""

    name: str
    shard_id: str
    schema: ShardSchema
    since: int = 0
    upper: int = 0
    batches: tuple[Batch, ...] = ()
    holds: tuple[Hold, ...] = ()
    writers: tuple[WriterToken, ...] = ()
    closed: bool = False
    rows: int = 0
    size_bytes: int = 0
    inline_bytes: int = 0
    version: int = 0


def batch_sums(batch: Batch) -> tuple[int, int, int]:
    """(rows, bytes, inline bytes) of one batch."""
    return (
        sum(p.rows for p in batch.parts),
        sum(p.size_bytes for p in batch.parts),
        sum(len(p.inline) for p in batch.parts),
    )


def check_step(old: ShardState, new: ShardState) -> None:
    """S1 to S4 across one transition, at a cost that does not grow with the number of batches."""
    assert old.since <= new.since, "S1: since went back"
    assert old.upper <= new.upper, "S1: upper went back"
    assert new.since == 0 or new.since < new.upper, "S1: nothing is readable"
    assert (new.batches[-1].upper if new.batches else 0) == new.upper, "S2: the last batch does not end at upper"
    assert len(new.batches) < 2 or new.batches[-2].upper == new.batches[-1].lower, "S2: hole before the last batch"
    assert new.version == old.version + 1, "one command, one version"
    if new.since != old.since:
        assert all(h.since >= new.since for h in new.holds), "S3: since passed a hold"
    assert min(new.rows, new.size_bytes, new.inline_bytes) >= 0, "S4: sums went below zero"


def check_whole(state: ShardState) -> None:
    """S1 to S4 of one state, walking everything: for tests, the simulation and `doctor`."""
    at = 0
    for batch in state.batches:
        assert batch.lower == at < batch.upper, f"S2: hole or overlap at {at}"
        at = batch.upper
    assert at == state.upper, "S2: the last batch does not end at upper"
    assert state.since == 0 or state.since < state.upper, "S1: nothing is readable"
    sums = [batch_sums(b) for b in state.batches]
    want = tuple(sum(s[i] for s in sums) for i in range(3))
    assert want == (state.rows, state.size_bytes, state.inline_bytes), "S4: sums drifted"
