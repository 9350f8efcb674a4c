"""The state of one shard, as the log gives it. Frozen; only `apply` makes the next one.

S1  since and upper only advance, and since < upper once anything is written: the newest time stays readable.
S2  the batches are contiguous: the first begins at 0, each begins where the last ended, the last ends at upper.
S3  since never passes a hold that stood when it moved.
S4  `rows`, `size_bytes` and `inline_bytes` are the sums over all parts.
S5  garbage is in order of its versions, and no batch names an object of it.
S6  no batch was written under a newer schema than the state's.

`apply` refuses what would break one of them, with the reason: a refused command changes nothing.
"""

from __future__ import annotations

import msgspec

from tidemill.base.errors import CorruptError
from tidemill.shards.api import Batch, ShardSchema

WRITERS_KEPT = 64
"""Tokens remembered, newest last. A writer resolves an unknown outcome at once, so few are ever asked for."""


HOLDS_KEPT = 256
"""Holds at once. Each travels in every rollup; one more reader waits until one of them ends."""

GARBAGE_OBJECTS = 20_000
"""Replaced objects that wait for deletion: some 2 MB of a rollup. With more, nothing is merged until some went."""


class Hold(msgspec.Struct, frozen=True):
    """Keeps since at or below `since`. `expires_ms` 0 = critical: never expires, and `epoch` fences its owners.

    A leased hold also keeps every object that the state named at `version` or later: its reader chose from there.
    """

    reader: str
    since: int
    expires_ms: int = 0
    epoch: int = 0
    version: int = 0

    def live(self, now_ms: int) -> bool:
        return self.expires_ms == 0 or self.expires_ms > now_ms


class Garbage(msgspec.Struct, frozen=True):
    """Objects that no batch names since `version`, of `at_ms`. Whoever chose before may read them."""

    version: int
    at_ms: int
    size_bytes: int
    objects: tuple[str, ...]


VERSIONS_KEPT = 32
"""Facts for people: what reads or writes needs the newest schema only."""


class SchemaVersion(msgspec.Struct, frozen=True):
    """The schema became `version` at `at_ms`, when upper was `upper`. `widened`: columns with the types they had.
    `retired`: columns that the source has no more; one that it has again is among the `added`."""

    version: int
    upper: int
    at_ms: int
    added: tuple[str, ...] = ()
    widened: tuple[tuple[str, str], ...] = ()
    retired: tuple[str, ...] = ()


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
    garbage: tuple[Garbage, ...] = ()
    swept_ms: int = 0
    """No part that was written before may be shown any more."""
    dropped: bool = False
    versions: tuple[SchemaVersion, ...] = ()
    """How the schema came to be what it is, oldest first; the first version is not told."""


def garbage_full(state: ShardState) -> bool:
    return sum(len(garbage.objects) for garbage in state.garbage) >= GARBAGE_OBJECTS


def batch_sums(batch: Batch) -> tuple[int, int, int]:
    """(rows, bytes, inline bytes) of one batch."""
    return (
        sum(p.rows for p in batch.parts),
        sum(p.size_bytes for p in batch.parts),
        sum(len(p.inline) for p in batch.parts),
    )


def broken_step(old: ShardState, new: ShardState) -> str:
    """What of S1 to S6 one transition would break, or "": at a cost that does not grow with the number of batches."""
    if new.since < old.since:
        return f"S1: since went back: old={old.since} new={new.since}"
    if new.upper < old.upper:
        return f"S1: upper went back: old={old.upper} new={new.upper}"
    if new.since and new.since >= new.upper:
        return f"S1: nothing is readable: since={new.since} upper={new.upper}"
    if (new.batches[-1].upper if new.batches else 0) != new.upper:
        return f"S2: the last batch does not end at upper: upper={new.upper}"
    if len(new.batches) > 1 and new.batches[-2].upper != new.batches[-1].lower:
        return f"S2: hole before the last batch: lower={new.batches[-1].lower}"
    if new.since != old.since and any(hold.since < new.since for hold in new.holds):
        return f"S3: since passed a hold: since={new.since}"
    if min(new.rows, new.size_bytes, new.inline_bytes) < 0:
        return "S4: sums went below zero"
    if len(new.garbage) > 1 and new.garbage[-2].version >= new.garbage[-1].version:
        return f"S5: garbage out of order: version={new.garbage[-1].version}"
    if new.batches and new.batches[-1].schema_version > new.schema.version:
        return f"S6: the last batch is of a newer schema: version={new.schema.version}"
    if new.schema.version < old.schema.version:
        return f"S6: the schema went back: old={old.schema.version} new={new.schema.version}"
    return ""


def broken_whole(state: ShardState) -> str:
    """What of S1 to S6 one state breaks, walking everything, or ""."""
    at = 0
    for batch in state.batches:
        if not batch.lower == at < batch.upper:
            return f"S2: hole or overlap: at={at} lower={batch.lower} upper={batch.upper}"
        at = batch.upper
    if at != state.upper:
        return f"S2: the last batch does not end at upper: at={at} upper={state.upper}"
    if state.since and state.since >= state.upper:
        return f"S1: nothing is readable: since={state.since} upper={state.upper}"
    sums = [batch_sums(b) for b in state.batches]
    if tuple(sum(s[i] for s in sums) for i in range(3)) != (state.rows, state.size_bytes, state.inline_bytes):
        return "S4: sums drifted"
    named = {part.object_key for batch in state.batches for part in batch.parts if part.object_key}
    if any(not named.isdisjoint(garbage.objects) for garbage in state.garbage):
        return "S5: a batch names garbage"
    if any(batch.schema_version > state.schema.version for batch in state.batches):
        return "S6: a batch is of a newer schema"
    return ""


def check_whole(state: ShardState) -> None:
    """For tests, the simulation and `doctor`. Raises CorruptError."""
    broken = broken_whole(state)
    if broken:
        raise CorruptError(f"a shard's state breaks its invariants: shard={state.name} {broken}.")
