"""A shard as rows: after each group that a checkpoint writes they form a valid state, with the contents of each
time."""

from __future__ import annotations

import pytest

from tidemill.shards.api import Batch, Column, Part, ShardSchema
from tidemill.shards.state.apply import RejectedCommand, apply, batch_id
from tidemill.shards.state.checkpoint import assemble_state, shard_row_changes, state_header
from tidemill.shards.state.codec import decode_batch
from tidemill.shards.state.commands import Append, Command, Create, DowngradeSince, Replace
from tidemill.shards.state.state import ShardState, broken_invariant

SCHEMA = ShardSchema((Column("id", "int64"),), ("id",))


def part(data: bytes) -> tuple[Part, ...]:
    return (Part(1, 10, inline=data, max_hash=2**64 - 1),)


def after(state: ShardState | None, *commands: Command) -> ShardState:
    for command in commands:
        found = apply(state, command)
        assert not isinstance(found, RejectedCommand), found
        state = found
    assert state is not None
    return state


def states_between(old: ShardState, new: ShardState) -> list[ShardState]:
    """Return the states that a restore would find after each group of changes, from the rows of `old` on."""
    batches, header = {batch.lower: batch for batch in old.batches}, state_header(old)
    known, uppers = dict(batches), {batch.lower: batch.upper for batch in old.batches}
    found: list[ShardState] = []
    for group in shard_row_changes(header, uppers, new, lambda batch: known.get(batch.lower) == batch):
        for lower in group.removed:
            del batches[lower]
        batches |= {row.lower: decode_batch(row.data) for row in group.batches}
        header = group.header or header
        found.append(assemble_state(header, [batches[lower] for lower in sorted(batches)]))
        assert not broken_invariant(found[-1])
    assert (header, found[-1].batches) == (state_header(new), new.batches)
    return found


@pytest.mark.parametrize("upper", [0, 1_001])
def test_rows_of_a_shard_whose_since_passed_their_upper_are_a_state_after_every_group(upper: int) -> None:
    old = after(None, Create("s", "id", SCHEMA))
    if upper:
        old = after(old, Append(Batch(0, upper, part(b"1"), "w", "t1")))
    appended = Append(Batch(upper, 300_001, part(b"2"), "w", "t2"))
    new = after(old, appended, DowngradeSince("retention", 1, 240_000, 0))
    assert new.since > old.upper
    assert [state.since for state in states_between(old, new)][-1] == new.since


def test_a_batch_that_passes_the_upper_of_the_rows_comes_with_the_header_that_counts_it() -> None:
    """Compaction moved all its times beyond that upper: until then a restore would have no rows in its place."""
    old = after(
        None,
        Create("s", "id", SCHEMA),
        *(Append(Batch(lower, lower + 100, part(b"%d" % lower), "w", str(lower))) for lower in (0, 100, 200)),
    )
    new = after(
        old,
        *(Append(Batch(lower, lower + 100, part(b"%d" % lower), "w", str(lower))) for lower in (300, 400, 500)),
        DowngradeSince("retention", 1, 450, 0),
    )
    low = Batch(0, 200, part(b"low"), "c", "low", 199)
    across = Batch(200, 500, part(b"across"), "c", "across", -1)
    for merged in (low, across):
        run = tuple(batch_id(batch) for batch in new.batches if merged.lower <= batch.lower < merged.upper)
        new = after(new, Replace(run, merged, 0))
    found = states_between(old, new)
    assert len(found) == 4, "a header, the lower batch, the newest one, and what passes the old upper with the header"
    for state in found[:-1]:
        assert (state.upper, state.since) == (300, 299)
        assert "across" not in {batch.token for batch in state.batches}
