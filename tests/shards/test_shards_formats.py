"""Logs of earlier versions open: records without the fields that came later, and rollups of format 1."""

from __future__ import annotations

import msgspec
import pytest
from shard_world import SCHEMA

from tidemill.base.errors import Corrupt
from tidemill.shards.apply import apply, collectable
from tidemill.shards.codec import decode_command, decode_state, encode_command, encode_state
from tidemill.shards.commands import Append, BatchId, Collected, Create, Drop, Replace, SetHold, Sweep
from tidemill.shards.front import Batch, Part, part_key, written_ms
from tidemill.shards.state import Garbage, Hold, ShardState

PART = [3, 100, 0, "shards/id/w-0af3.parquet", b"", 1, 9]
SCHEMA_OUT = [[["k", "int64"], ["v", "string"]], ["k"], 1]
encode = msgspec.msgpack.encode


def test_records_of_earlier_versions_mean_what_they_meant() -> None:
    assert decode_command(encode([2, [0, 10, "w", "t", [PART]]])) == Append(Batch(0, 10, (Part(*PART),), "w", "t"))
    replaced = decode_command(encode([6, [[0, 10, "t"]], [0, 10, "c", "m", []]]))
    assert replaced == Replace((BatchId(0, 10, "t"),), Batch(0, 10, (), "c", "m"), at_ms=0)
    state: ShardState | None = None
    for command in (Create("t", "id", SCHEMA), decode_command(encode([2, [0, 10, "w", "t", [PART]]])), replaced):
        found = apply(state, command)
        assert isinstance(found, ShardState)
        state = found
    assert state is not None and state.garbage == (), "what an older version replaced is left to the sweep"


def test_a_rollup_of_format_1_opens_and_is_written_as_format_2() -> None:
    old = [
        1,
        "t",
        "id",
        SCHEMA_OUT,
        4,
        10,
        False,
        7,
        [["r", 4, 900, 0]],
        [["w", "t", 0, 10]],
        [[0, 10, "w", "t", [PART]]],
    ]
    state = decode_state(encode(old))
    assert (state.since, state.upper, state.version, state.holds) == (4, 10, 7, (Hold("r", 4, 900),))
    assert (state.garbage, state.swept_ms, state.dropped, state.batches[0].summed_to) == ((), 0, False, -1)
    assert decode_state(encode_state(state)) == state
    with pytest.raises(Corrupt, match="unknown rollup format"):
        decode_state(encode([3, *old[1:]]))


def test_everything_new_survives_its_bytes() -> None:
    for command in (
        Replace((BatchId(0, 10, "t"),), Batch(0, 10, (), "c", "m", 9), 77), Drop("id"), Collected(12), Sweep(34),
    ):  # fmt: skip
        assert decode_command(encode_command(command)) == command
    garbage = (Garbage(5, 50, 100, ("a", "b")), Garbage(9, 60, 10, ("c",)))
    state = ShardState(
        "t", "id", SCHEMA, 4, 10, (Batch(0, 10, (), summed_to=4),), (Hold("r", 4, 900, 0, 6),),
        version=9, garbage=garbage, swept_ms=30, dropped=True,
    )  # fmt: skip
    assert decode_state(encode_state(state)) == state


def test_garbage_goes_oldest_first_and_up_to_the_oldest_hold() -> None:
    garbage = tuple(Garbage(version, version * 10, 1, (f"o{version}",)) for version in (3, 5, 8))
    state = ShardState("t", "id", SCHEMA, 0, 10, (Batch(0, 10, ()),), version=9, garbage=garbage)
    held = msgspec.structs.replace(state, holds=(Hold("a", 0, 1000, 0, 5), Hold("retention", 0)))

    def versions(of: ShardState, before_ms: int, now_ms: int) -> list[int]:
        return [g.version for g in collectable(of, before_ms, now_ms)]

    assert versions(state, 999, 0) == [3, 5, 8]
    assert versions(state, 60, 0) == [3, 5]
    assert versions(held, 999, 0) == [3, 5], "chosen at version 5 or later: what went at 8 may be read"
    assert versions(held, 999, 1000) == [3, 5, 8], "the hold has lapsed"


def test_a_parts_key_tells_when_it_was_written() -> None:
    assert written_ms(part_key("id", "w@1-x", 1234567, "0af3")) == 1234567
    assert [written_ms(key) for key in ("", "shards/id/w-0af3.parquet", "shards/id/w@-1.parquet")] == [-1, -1, -1]


def test_commands_of_a_dropped_shard_are_refused() -> None:
    state: ShardState | None = None
    for command in (Create("t", "id", SCHEMA), Append(Batch(0, 10, (), "w", "t")), SetHold("r", 1, 99, 1), Drop("id")):
        found = apply(state, command)
        assert isinstance(found, ShardState)
        state = found
    assert state is not None and state.holds == () and state.closed
    for command in (Append(Batch(10, 20, (), "w", "u")), SetHold("r", 1, 99, 1), Drop("id"), Sweep(5)):
        assert not isinstance(apply(state, command), ShardState)
