"""Upsert operator of one writer: commands in, updates out, as far as the output shard allows.

    ingest     add commands; those below the upper are dropped immediately
    advance    the source is complete for every time below its frontier
    drain      the updates for [upper, output frontier), against the mirror: a pending result, not committed yet
    committed  our append landed: the mirror applies the pending changes
    feedback   a peer's append landed instead: the pending result is discarded, the mirror applies the peer's updates

Invariant (three-way rule): the action for a command at time t when the shard's upper is p:

    t < p             BELOW  drop: a peer committed this time; its retractions can no longer be computed
    p ≤ t < through   AT     process: the mirror is complete up to p, the source up to `through`
    t ≥ through       ABOVE  stash for later

`classify` is its only implementation. It is applied when commands are ingested and again at every drain, because a peer
may move the upper between the two. If a BELOW command were stashed instead of dropped, it would pin the writer's output
frontier below the shard's upper permanently: nothing would be appended any more while the source advances.

Invariant (recompute): `drain` does not consume. Commands leave the stash only because they are below the upper, no
matter which writer moved it, so nothing is emitted twice, and a lost race is recomputed by the next drain, never
trimmed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.base.errors import InvalidError
from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.spark.merge.commands import Commands, filter_commands, join_commands, no_commands, times_of
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.resolve import HashRows, Resolved, resolve, resolve_in_sequence
from tidemill.spark.merge.sequence import Sequence
from tidemill.spark.predicates.expectations import ExpectationCheck

BELOW = np.int8(-1)
AT = np.int8(0)
ABOVE = np.int8(1)


def classify(times: npt.NDArray[np.int64], upper: int, through: int) -> npt.NDArray[np.int8]:
    """Return BELOW, AT or ABOVE for each time (ms). `through` is exclusive; if through ≤ upper, nothing is AT."""
    out = np.full(len(times), ABOVE, dtype=np.int8)
    out[times < through] = AT
    out[times < upper] = BELOW
    return out


class UpsertOperator:
    def __init__(
        self,
        schema: ShardSchema,
        mirror: Mirror,
        *,
        hasher: HashRows = hash_rows,
        check: ExpectationCheck | None = None,
        sequence: Sequence | None = None,
    ) -> None:
        if not schema.key:
            raise InvalidError("an upsert needs a key.", fix="Name the key columns of the table.")
        self.schema = schema
        self.mirror = mirror
        self.source_frontier = mirror.upper
        self.dropped = 0
        """Number of commands that were found below the upper because a peer moved it."""
        self._stash = no_commands(schema)
        self._hasher = hasher
        self._check = check
        self._sequence = sequence

    @property
    def upper(self) -> int:
        return self.mirror.upper

    @property
    def stashed(self) -> int:
        return len(self._stash)

    def ingest(self, commands: Commands) -> None:
        """Add commands of any time; their source need not be complete yet."""
        self._stash = join_commands(self.schema, [self._stash, self._drop_below(commands)])

    def replace_stash(self, commands: Commands) -> None:
        """Replace the stash with every command that the source has for times from the upper on, up to where it is
        complete.

        Commands that were added before are among them, so a step that could not be appended and is read again is held
        once. It may be read again up to a lower time: `advance` then sets the time up to which the source is complete.
        """
        self.source_frontier = self.mirror.upper
        self._stash = self._drop_below(commands)

    def advance(self, source_frontier: int) -> None:
        """Record that the source has delivered every command with time < source_frontier."""
        self.source_frontier = max(self.source_frontier, source_frontier)

    def adopt_stash(self, before: UpsertOperator) -> None:
        """Take over the stash of another operator of this writer, on this operator's mirror, which was rebuilt."""
        self.source_frontier = max(self.source_frontier, before.source_frontier)
        self.dropped += before.dropped
        self._stash = self._drop_below(before._stash)

    @property
    def output_frontier(self) -> int:
        """Frontier up to which this writer may append: times below it are in the shard or in the result of `drain`.

        It is the source's frontier, unless a stashed command is below it. With the three-way rule intact that never
        happens.
        """
        times = times_of(self._stash)
        kept = times[classify(times, self.upper, self.source_frontier) != AT]
        return min(int(kept.min()), self.source_frontier) if len(kept) else self.source_frontier

    def drain(self) -> Resolved:
        """Return the updates for [upper, output_frontier), computed against the mirror; drop what is BELOW from the
        stash."""
        self._stash = self._drop_below(self._stash)
        times = times_of(self._stash)
        ready = filter_commands(self._stash, classify(times, self.upper, self.source_frontier) == AT)
        step = self.upper, self.output_frontier
        if self._sequence is not None:
            return resolve_in_sequence(self.schema, ready, self.mirror, *step, self._sequence, self._hasher)
        return resolve(self.schema, ready, self.mirror, *step, self._hasher, self._check)

    def committed(self, pending: Resolved) -> None:
        """Apply `pending`, whose compare-and-append landed."""
        self.mirror.advance(pending.changes, pending.lower, pending.upper)
        self._stash = self._drop_below(self._stash, lost=False)

    def apply_peer(self, updates: pa.Table, lower: int, upper: int) -> None:
        """Apply a peer's updates for [lower, upper), complete. Any pending result is void."""
        self.mirror.apply(updates, lower, upper)
        self._stash = self._drop_below(self._stash)

    def _drop_below(self, commands: Commands, *, lost: bool = True) -> Commands:
        if not len(commands):
            return commands
        times = times_of(commands)
        below = classify(times, self.upper, max(self.upper, self.source_frontier)) == BELOW
        self.dropped += int(np.count_nonzero(below)) if lost else 0
        return filter_commands(commands, ~below)
