"""The state of one shard, as replayed from the log. Frozen; only `apply` makes the next one.

Invariants:

- Frontiers: since and upper only advance, and since < upper once anything is written: the newest time stays readable.
- Contiguity: the first batch begins at 0, each begins where the previous ended, the last ends at upper.
- Holds: since never passes a hold that was live when it moved.
- Sums: `rows`, `size_bytes` and `inline_bytes` are the sums over all parts.
- Garbage: it is in order of its versions, and no batch refers to an object of it.
- Schema: no batch was written under a newer schema than the state's.

`apply` rejects a command that would break one of them, with the reason: a rejected command changes nothing.
"""

from __future__ import annotations

import msgspec

from tidemill.base.errors import CorruptError
from tidemill.shards.api import Batch, ShardSchema

WRITER_TOKENS_MAX = 64
"""Number of writer tokens, newest last. A writer resolves an unknown outcome immediately, so few are ever needed."""


HOLDS_MAX = 256
"""Limit of concurrent holds. Each is part of every rollup; another reader waits until one of them ends."""

GARBAGE_OBJECTS_MAX = 20_000
"""Limit of replaced objects that wait for deletion, about 2 MB of a rollup. Above it, nothing is merged."""


class ReadHold(msgspec.Struct, frozen=True):
    """A read hold, which keeps the shard's since at or below `since`.

    `expires_ms` 0 = critical: the hold never expires, and `epoch` fences its owners.
    A leased hold also protects every object that the state contained at `version` or later: its reader chose from
    there.
    """

    reader: str
    since: int
    expires_ms: int = 0
    epoch: int = 0
    version: int = 0

    def is_live(self, now_ms: int) -> bool:
        return self.expires_ms == 0 or self.expires_ms > now_ms


class Garbage(msgspec.Struct, frozen=True):
    """Objects to which no batch refers since `version`, at `at_ms`. Readers that chose batches before may read them."""

    version: int
    at_ms: int
    size_bytes: int
    objects: tuple[str, ...]


SCHEMA_VERSIONS_MAX = 32
"""Number of schema versions stored, for people: readers and writers need only the newest schema."""


class SchemaVersion(msgspec.Struct, frozen=True):
    """A change of the schema to `version` at `at_ms`, when upper was `upper`.

    `widened` has columns with their earlier types, `retired` those that the source has no more. A column that the
    source has again is among the `added`.
    """

    version: int
    upper: int
    at_ms: int
    added: tuple[str, ...] = ()
    widened: tuple[tuple[str, str], ...] = ()
    retired: tuple[str, ...] = ()


class WriterToken(msgspec.Struct, frozen=True):
    """The newest append of one writer: proof that the append with this token landed."""

    writer: str
    token: str
    lower: int
    upper: int


_FROM_INPUT = "history"
"""First part of the tokens of appends that derive from one input; the second part is the id of the input."""


def input_token(input_id: str, nonce: str) -> str:
    """Return the token of an append whose rows derive from the shard `input_id`."""
    return f"{_FROM_INPUT}/{input_id}/{nonce}"


def input_of_token(token: str) -> str:
    """Return the id of the shard that the rows of an append derive from; "" if its token names none."""
    kind, _, rest = token.partition("/")
    return rest.partition("/")[0] if kind == _FROM_INPUT else ""


class ShardState(msgspec.Struct, frozen=True):
    """`shard_id` names the shard's objects and, unlike the name, is never reused. `version` counts applied commands."""

    name: str
    shard_id: str
    schema: ShardSchema
    since: int = 0
    upper: int = 0
    batches: tuple[Batch, ...] = ()
    holds: tuple[ReadHold, ...] = ()
    writers: tuple[WriterToken, ...] = ()
    closed: bool = False
    rows: int = 0
    size_bytes: int = 0
    inline_bytes: int = 0
    version: int = 0
    garbage: tuple[Garbage, ...] = ()
    swept_ms: int = 0
    """Parts written before this time can no longer be appended."""
    dropped: bool = False
    versions: tuple[SchemaVersion, ...] = ()
    """History of the schema, oldest first, without the first version."""


def is_garbage_full(state: ShardState) -> bool:
    return sum(len(garbage.objects) for garbage in state.garbage) >= GARBAGE_OBJECTS_MAX


def batch_sums(batch: Batch) -> tuple[int, int, int]:
    """Return (rows, bytes, inline bytes) of one batch."""
    return (
        sum(p.rows for p in batch.parts),
        sum(p.size_bytes for p in batch.parts),
        sum(len(p.inline) for p in batch.parts),
    )


def broken_invariant_of_step(old: ShardState, new: ShardState) -> str:
    """Return the invariant that one transition would break, or "".

    The cost does not grow with the number of batches.
    """
    if new.since < old.since:
        return f"since went back: old={old.since} new={new.since}"
    if new.upper < old.upper:
        return f"upper went back: old={old.upper} new={new.upper}"
    if new.since and new.since >= new.upper:
        return f"nothing is readable: since={new.since} upper={new.upper}"
    if (new.batches[-1].upper if new.batches else 0) != new.upper:
        return f"the last batch does not end at upper: upper={new.upper}"
    if len(new.batches) > 1 and new.batches[-2].upper != new.batches[-1].lower:
        return f"hole before the last batch: lower={new.batches[-1].lower}"
    if new.since != old.since and any(hold.since < new.since for hold in new.holds):
        return f"since passed a hold: since={new.since}"
    if min(new.rows, new.size_bytes, new.inline_bytes) < 0:
        return "sums went below zero"
    if len(new.garbage) > 1 and new.garbage[-2].version >= new.garbage[-1].version:
        return f"garbage out of order: version={new.garbage[-1].version}"
    if new.batches and new.batches[-1].schema_version > new.schema.version:
        return f"the last batch is of a newer schema: version={new.schema.version}"
    if new.schema.version < old.schema.version:
        return f"the schema went back: old={old.schema.version} new={new.schema.version}"
    return ""


def broken_invariant(state: ShardState) -> str:
    """Return the invariant that one state breaks, or "", walking everything."""
    at = 0
    for batch in state.batches:
        if not batch.lower == at < batch.upper:
            return f"hole or overlap: at={at} lower={batch.lower} upper={batch.upper}"
        at = batch.upper
    if at != state.upper:
        return f"the last batch does not end at upper: at={at} upper={state.upper}"
    if state.since and state.since >= state.upper:
        return f"nothing is readable: since={state.since} upper={state.upper}"
    sums = [batch_sums(b) for b in state.batches]
    if tuple(sum(s[i] for s in sums) for i in range(3)) != (state.rows, state.size_bytes, state.inline_bytes):
        return "sums do not match the parts"
    named = {part.object_key for batch in state.batches for part in batch.parts if part.object_key}
    if any(not named.isdisjoint(garbage.objects) for garbage in state.garbage):
        return "a batch refers to garbage"
    if any(batch.schema_version > state.schema.version for batch in state.batches):
        return "a batch is of a newer schema"
    return ""


def check_invariants(state: ShardState) -> None:
    """Raise CorruptError if an invariant is broken. For tests, the simulation and `doctor`."""
    broken = broken_invariant(state)
    if broken:
        raise CorruptError(f"a table's state breaks its invariants: table={state.name} {broken}.")
