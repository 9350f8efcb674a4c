"""Layouts of logs and rollups, and records without their optional fields."""

from __future__ import annotations

import msgspec
import pytest

from support.shards.world import SCHEMA
from tidemill.base.errors import CorruptError
from tidemill.shards.api import Batch, Column, Part, ShardSchema, part_key, written_ms
from tidemill.shards.state.apply import apply, collectable_garbage
from tidemill.shards.state.codec import decode_command, decode_state, encode_command, encode_state
from tidemill.shards.state.commands import Append, BatchId, Create, Drop, MarkCollected, Replace, SetHold, Sweep
from tidemill.shards.state.state import Garbage, ReadHold, ShardState, WriterToken

PART = [3, 100, 0, "shards/id/w-0af3.parquet", b"", 1, 9]
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


def test_a_rollup_of_an_unknown_format_is_refused() -> None:
    with pytest.raises(CorruptError, match="unknown rollup format"):
        decode_state(encode([5, *msgspec.msgpack.decode(bytes.fromhex(UNCHANGED["rollup"]))[1:]]))


UNCHANGED = {
    "rollup": "9e02a174a26964939292a16ba5696e74363492a176ac646563696d616c28342c322991a16b04040ac2079195a17204cd0384"
    "00029194a177a174000a9196000aa177a1749197036400ba7368617264732f69642f7740352d306166332e70617271756574"
    "c400010904919405326492a161a16203c2",
    "create": "9401a174a26964939292a16ba5696e74363492a176ac646563696d616c28342c322991a16b04",
    "append": "920296000aa177a1749197036400ba7368617264732f69642f7740352d306166332e70617271756574c4000109ff",
}
"""Records of the last version before schemas had versions."""


def test_a_shard_whose_schema_never_changed_is_written_as_before_there_were_versions() -> None:
    part = Part(3, 100, 0, "shards/id/w@5-0af3.parquet", b"", 1, 9)
    schema = ShardSchema((Column("k", "int64"), Column("v", "decimal(4,2)")), ("k",), 4)
    state = ShardState(
        "t", "id", schema, 4, 10, (Batch(0, 10, (part,), "w", "t", 4),), (ReadHold("r", 4, 900, 0, 2),),
        (WriterToken("w", "t", 0, 10),), False, 3, 100, 0, 7, (Garbage(5, 50, 100, ("a", "b")),), 3, False,
    )  # fmt: skip
    create, append = Create("t", "id", schema), Append(Batch(0, 10, (part,), "w", "t"))
    assert decode_state(bytes.fromhex(UNCHANGED["rollup"])) == state
    assert encode_state(state).hex() == UNCHANGED["rollup"]
    for command, name in ((create, "create"), (append, "append")):
        assert decode_command(bytes.fromhex(UNCHANGED[name])) == command
        assert encode_command(command).hex() == UNCHANGED[name]


def test_everything_new_survives_its_bytes() -> None:
    for command in (
        Replace((BatchId(0, 10, "t"),), Batch(0, 10, (), "c", "m", 9), 77), Drop("id"), MarkCollected(12), Sweep(34),
    ):  # fmt: skip
        assert decode_command(encode_command(command)) == command
    garbage = (Garbage(5, 50, 100, ("a", "b")), Garbage(9, 60, 10, ("c",)))
    state = ShardState(
        "t", "id", SCHEMA, 4, 10, (Batch(0, 10, (), summed_to=4),), (ReadHold("r", 4, 900, 0, 6),),
        version=9, garbage=garbage, swept_ms=30, dropped=True,
    )  # fmt: skip
    assert decode_state(encode_state(state)) == state


def test_garbage_goes_oldest_first_and_up_to_the_oldest_hold() -> None:
    garbage = tuple(Garbage(version, version * 10, 1, (f"o{version}",)) for version in (3, 5, 8))
    state = ShardState("t", "id", SCHEMA, 0, 10, (Batch(0, 10, ()),), version=9, garbage=garbage)
    held = msgspec.structs.replace(state, holds=(ReadHold("a", 0, 1000, 0, 5), ReadHold("retention", 0)))

    def versions(of: ShardState, before_ms: int, now_ms: int) -> list[int]:
        return [g.version for g in collectable_garbage(of, before_ms, now_ms)]

    assert versions(state, 999, 0) == [3, 5, 8]
    assert versions(state, 60, 0) == [3, 5]
    assert versions(held, 999, 0) == [3, 5], "chosen at version 5 or later: what went at 8 may be read"
    assert versions(held, 999, 1000) == [3, 5, 8], "the hold has lapsed"


def test_garbage_with_a_time_in_the_future_goes_once_it_was_seen_for_long_enough() -> None:
    """An entry whose merge ran under a clock that was ahead must not retain the garbage after it."""
    garbage = (Garbage(3, 999_999, 1, ("o3",)), Garbage(5, 50, 1, ("o5",)), Garbage(8, 80, 1, ("o8",)))
    state = ShardState("t", "id", SCHEMA, 0, 10, (Batch(0, 10, ()),), version=9, garbage=garbage)

    def versions(seen: int, state: ShardState = state) -> list[int]:
        return [g.version for g in collectable_garbage(state, 60, 100, seen)]

    assert versions(2) == []
    assert versions(3) == versions(4) == [3, 5]
    assert versions(8) == [3, 5, 8]
    assert versions(8, msgspec.structs.replace(state, holds=(ReadHold("a", 0, 1000, 0, 4),))) == [3]


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
