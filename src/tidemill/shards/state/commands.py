"""What may be asked of a shard. Each command is one small record of its log; tags are append-only (codec).

Time and identity ride inside the command, chosen by the proposer, so that applying is pure.
"""

from __future__ import annotations

import msgspec

from tidemill.shards.api import Batch, ShardSchema
from tidemill.shards.parts.schema_evolution import Changes

PREFIX = "shard/"
"""Registers that name shards: the newest command about each name."""


class Create(msgspec.Struct, frozen=True):
    name: str
    shard_id: str
    schema: ShardSchema


class Append(msgspec.Struct, frozen=True):
    """Show `batch` and move upper from batch.lower to batch.upper. No parts = progress only."""

    batch: Batch


class SetHold(msgspec.Struct, frozen=True):
    """Take, renew or move forward a leased hold until `expires_ms`. Expired holds are dropped as of `now_ms`."""

    reader: str
    since: int
    expires_ms: int
    now_ms: int


class ReleaseHold(msgspec.Struct, frozen=True):
    reader: str
    now_ms: int


class DowngradeSince(msgspec.Struct, frozen=True):
    """Move the critical hold `owner` (made at first use) to `since`, as its owner in `epoch`.

    A newer epoch takes the hold over; an older one is fenced. While at least one critical hold exists,
    since is the least of all holds.
    """

    owner: str
    epoch: int
    since: int
    now_ms: int


class BatchId(msgspec.Struct, frozen=True):
    """Names one batch as it was seen; a batch that was extended or merged meanwhile has another."""

    lower: int
    upper: int
    token: str


class Replace(msgspec.Struct, frozen=True):
    """Put `merged` in the place of consecutive batches, if they are all still there as they were.

    Their objects are garbage from `at_ms` on. 0 (a record from before there was garbage): they are left to the sweep.
    """

    replaced: tuple[BatchId, ...]
    merged: Batch
    at_ms: int = 0


class Close(msgspec.Struct, frozen=True):
    """No append is ever accepted again; reads go on."""


class Drop(msgspec.Struct, frozen=True):
    """The shard is no more: nothing is read or written again, and it refers to no object.

    The same record in the shard's register frees the name for a shard with another id.
    """

    shard_id: str


class Collected(msgspec.Struct, frozen=True):
    """The objects of every garbage entry up to `version` are deleted."""

    version: int


class Sweep(msgspec.Struct, frozen=True):
    """From now on no part may be shown that was written before `before_ms`: those that nobody refers to are orphans."""

    before_ms: int


class Evolve(msgspec.Struct, frozen=True):
    """Give the schema these columns and types, from upper on. What it has already changes nothing (RFC 0003)."""

    changes: Changes
    at_ms: int


Command = Create | Append | SetHold | ReleaseHold | DowngradeSince | Replace | Close | Drop | Collected | Sweep | Evolve
