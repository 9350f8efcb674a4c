"""The upsert operator of one writer: commands in, updates out, at the pace of the output shard.

    ingest     commands come in; what lies below the upper is dropped at once
    advance    the source is complete for every time below its frontier
    drain      the updates for [upper, output frontier), against the mirror: a pending result, not yet true
    committed  our append landed: the mirror takes the pending changes
    feedback   a peer's append landed instead: the pending result is discarded, the mirror takes theirs

Nothing is emitted twice: `drain` does not consume. Commands leave the stash by being found below the
upper, whoever moved it, so a lost race is recomputed by the next drain and never trimmed (U4).
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import pyarrow as pa

from tidemill.base.errors import InvalidError
from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.spark.upsert.classify import AT, BELOW, classify
from tidemill.spark.upsert.commands import Commands, join, no_commands, select, times_of
from tidemill.spark.upsert.lookup import HashRows
from tidemill.spark.upsert.mirror import Mirror
from tidemill.spark.upsert.resolve import Resolved, resolve


class Fault(Enum):
    """Planted faults, for tests and the simulation only."""

    NONE = "none"
    KEEP_BELOW_UPPER = "keep below upper"
    """Seed 001: commands below the upper are kept for later, and pin the output frontier."""


class Upsert:
    def __init__(
        self, schema: ShardSchema, mirror: Mirror, *, hasher: HashRows = hash_rows, fault: Fault = Fault.NONE
    ) -> None:
        if not schema.key:
            raise InvalidError("an upsert needs a key.", fix="Name the key columns of the table.")
        self.schema = schema
        self.mirror = mirror
        self.source_frontier = mirror.upper
        self.dropped = 0
        """Commands found below the upper so far, put there by a peer."""
        self._stash = no_commands(schema)
        self._hasher = hasher
        self._fault = fault

    @property
    def upper(self) -> int:
        return self.mirror.upper

    @property
    def stashed(self) -> int:
        return len(self._stash)

    def ingest(self, commands: Commands) -> None:
        """Take commands of any time; their source need not be complete yet."""
        self._stash = join(self.schema, [self._stash, self._without_below(commands)])

    def begin(self, commands: Commands) -> None:
        """Take every command that the source has for times from the upper on, up to where it is complete: what was
        taken in before is among them, so that a step which cannot be appended and is read again is held once. It may be
        read again up to less: what is complete now is for `advance` to say."""
        self.source_frontier = self.mirror.upper
        self._stash = self._without_below(commands)

    def advance(self, source_frontier: int) -> None:
        """The source has delivered every command with time < source_frontier."""
        self.source_frontier = max(self.source_frontier, source_frontier)

    def adopt(self, before: Upsert) -> None:
        """Go on with what another operator of this writer has taken in, on this one's mirror (which was rebuilt)."""
        self.source_frontier = max(self.source_frontier, before.source_frontier)
        self.dropped += before.dropped
        self._stash = self._without_below(before._stash)

    @property
    def output_frontier(self) -> int:
        """Times below it are either in the shard or in what `drain` returns: what this writer may append up to.

        The source's frontier, unless something kept lies below it. With the rule intact nothing ever does.
        """
        times = times_of(self._stash)
        kept = times[classify(times, self.upper, self.source_frontier) != AT]
        return min(int(kept.min()), self.source_frontier) if len(kept) else self.source_frontier

    def drain(self) -> Resolved:
        """Updates for [upper, output_frontier), computed against the mirror; drops from the stash what is BELOW."""
        self._stash = self._without_below(self._stash)
        times = times_of(self._stash)
        ready = select(self._stash, classify(times, self.upper, self.source_frontier) == AT)
        return resolve(self.schema, ready, self.mirror, self.upper, self.output_frontier, self._hasher)

    def committed(self, pending: Resolved) -> None:
        """Our compare-and-append of `pending` landed."""
        self.mirror.advance(pending.changes, pending.lower, pending.upper)
        self._stash = self._without_below(self._stash, lost=False)

    def feedback(self, updates: pa.Table, lower: int, upper: int) -> None:
        """A peer's updates for [lower, upper), complete. Any pending result is void."""
        self.mirror.apply(updates, lower, upper)
        self._stash = self._without_below(self._stash)

    def _without_below(self, commands: Commands, *, lost: bool = True) -> Commands:
        if self._fault is Fault.KEEP_BELOW_UPPER or not len(commands):
            return commands
        times = times_of(commands)
        below = classify(times, self.upper, max(self.upper, self.source_frontier)) == BELOW
        self.dropped += int(np.count_nonzero(below)) if lost else 0
        return select(commands, ~below)
