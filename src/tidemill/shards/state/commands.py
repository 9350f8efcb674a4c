"""Commands of a shard. Each is one small record of its log; tags are append-only (codec).

Times and identities are part of the command, chosen by the proposer, so that applying is pure.
"""

from __future__ import annotations

import msgspec

from tidemill.shards.api import Batch, ShardSchema
from tidemill.shards.parts.schema_evolution import SchemaChanges

REGISTER_PREFIX = "shard/"
"""Prefix of the registers that name shards; each has the newest command about its name."""


class Create(msgspec.Struct, frozen=True):
    name: str
    shard_id: str
    schema: ShardSchema


class Append(msgspec.Struct, frozen=True):
    """Make `batch` visible and move upper from batch.lower to batch.upper. No parts = progress only."""

    batch: Batch


class SetHold(msgspec.Struct, frozen=True):
    """Create, renew or advance a leased hold until `expires_ms`. Expired holds are dropped as of `now_ms`."""

    reader: str
    since: int
    expires_ms: int
    now_ms: int


class ReleaseHold(msgspec.Struct, frozen=True):
    reader: str
    now_ms: int


class DowngradeSince(msgspec.Struct, frozen=True):
    """Advance the critical hold `owner` (created at first use) to `since`, as its owner in `epoch`.

    A newer epoch takes over the hold; an older one is fenced. While at least one critical hold exists, since is the
    minimum of all holds.
    """

    owner: str
    epoch: int
    since: int
    now_ms: int


class BatchId(msgspec.Struct, frozen=True):
    """Identity of one batch at the time of a read; a batch that was extended or merged since has another."""

    lower: int
    upper: int
    token: str


class Replace(msgspec.Struct, frozen=True):
    """Replace consecutive batches by `merged`, if all of them are unchanged.

    Their objects are garbage from `at_ms` on. 0 (a record of an older format): they are left to the sweep.
    """

    replaced: tuple[BatchId, ...]
    merged: Batch
    at_ms: int = 0


class Close(msgspec.Struct, frozen=True):
    """Reject all further appends; reads continue."""


class Drop(msgspec.Struct, frozen=True):
    """Drop the shard: all further reads and writes are rejected, and it refers to no object.

    The same record in the shard's register frees the name for a shard with another id.
    """

    shard_id: str


class MarkCollected(msgspec.Struct, frozen=True):
    """The objects of every garbage entry up to `version` were deleted."""

    version: int


class Sweep(msgspec.Struct, frozen=True):
    """Reject parts written before `before_ms` from now on: those without a reference are orphans."""

    before_ms: int


class Evolve(msgspec.Struct, frozen=True):
    """Add these columns and types to the schema, from upper on. Changes that it already has are no-ops (RFC 0003)."""

    changes: SchemaChanges
    at_ms: int


Command = (
    Create | Append | SetHold | ReleaseHold | DowngradeSince | Replace | Close | Drop | MarkCollected | Sweep | Evolve
)
