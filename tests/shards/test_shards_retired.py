"""A column that the source dropped stays in its shard, null from then on; one that returns is added back."""

from __future__ import annotations

import pytest

from support.shards.world import World, append, updates
from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column, SchemaEvolvedError, ShardSchema
from tidemill.shards.parts.schema_evolution import SchemaChanges, evolve_schema, schema_changes
from tidemill.shards.state.checkpoint import assemble_state, decode_header, encode_header
from tidemill.shards.state.codec import decode_command, encode_command
from tidemill.shards.state.commands import Evolve
from tidemill.shards.state.restore import restore_shard

K, V = Column("k", "int64"), Column("v", "string")
HAVE = ShardSchema((K, V), ("k",))
WANT = ShardSchema((K,), ("k",))
RETIRED = ShardSchema((K, Column("v", "string", retired=2)), ("k",), version=2)


def test_a_column_is_retired_once_somebody_has_accepted_it_and_only_that_one() -> None:
    with pytest.raises(InvalidError, match="-v string"):
        schema_changes(HAVE, WANT)
    with pytest.raises(InvalidError, match="-v string"):
        schema_changes(HAVE, WANT, ("w",))
    changes = schema_changes(HAVE, WANT, ("v", "w"))
    assert changes == SchemaChanges(retire=("v",)) and "v is null from then on" in str(changes)
    assert evolve_schema(HAVE, changes) == RETIRED == evolve_schema(RETIRED, changes)
    assert not schema_changes(RETIRED, WANT), "it lacks nothing any more"


@pytest.mark.parametrize(
    ("schema", "name"), [(HAVE, "k"), (HAVE, "x"), (ShardSchema((K, V), ()), "v")]
)  # fmt: skip
def test_no_column_of_a_rows_hash_is_retired(schema: ShardSchema, name: str) -> None:
    with pytest.raises(InvalidError, match=name):
        evolve_schema(schema, SchemaChanges(retire=(name,)))


def test_a_column_comes_back_where_the_rows_without_it_hold_null_and_else_not() -> None:
    back = schema_changes(RETIRED, HAVE)
    assert back == SchemaChanges(add=(V,))
    assert evolve_schema(RETIRED, back) == ShardSchema((K, V), ("k",), version=3)
    for column, words in ((Column("v", "string", "x"), "rows are null"), (Column("v", "int64"), "int64")):
        with pytest.raises(InvalidError, match=words):
            schema_changes(RETIRED, ShardSchema((K, column), ("k",)))


async def test_times_read_as_they_did_and_an_older_writer_is_fenced() -> None:
    world = World()
    old = await world.open()
    await append(old, 0, 5, [(1, "a", 1, 1), (2, "b", 2, 1)])
    await old.evolve(SchemaChanges(retire=("v",)))
    with pytest.raises(SchemaEvolvedError):
        await append(old, 5, 6, [(3, "c", 5, 1)])
    new = await world.open(schema=None, writer="new")
    rows = updates([(1, "a", 6, -1), (1, None, 6, 1)])
    await new.compare_and_append(5, 9, [await new.write_part(rows)], "")
    now = [{"k": 1, "v": None}, {"k": 2, "v": "b"}]
    assert sorted((await new.snapshot(8)).to_pylist(), key=lambda r: r["k"]) == now
    assert sorted((await new.snapshot(4)).column("v").to_pylist()) == ["a", "b"]
    (version,) = new.state.versions
    assert (version.retired, version.added, version.widened) == (("v",), (), ())
    await new.evolve(SchemaChanges(add=(V,)))
    assert new.state.versions[-1].added == ("v",) and not new.state.schema.columns[1].retired


async def test_it_is_in_the_log_in_rollups_in_checkpoint_rows_and_in_a_restored_shard() -> None:
    command = Evolve(SchemaChanges((Column("n", "int16", "7"),), (K,), ("v",)), 9)
    assert decode_command(encode_command(command)) == command
    world = World()
    shard = await world.open()
    await append(shard, 0, 5, [(1, "a", 1, 1)])
    await shard.evolve(SchemaChanges(retire=("v",)))
    by_log = await world.open(schema=None)
    await shard.rollup()
    again = await world.open(schema=None)
    assert by_log.state.schema == again.state.schema == RETIRED and again.state == shard.state
    restored = assemble_state(decode_header(encode_header(again.state)), again.state.batches)
    assert restored == again.state
    elsewhere = World()
    elsewhere.objects = world.objects
    await restore_shard(elsewhere.consensus(), elsewhere.rand, restored, "attempt")
    found = await elsewhere.open(schema=None)
    assert (found.schema, found.state.versions) == (RETIRED, again.state.versions)
