"""Permitted changes of a schema, their reporting to readers and writers, and concurrent changes that end in one
schema."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pyarrow as pa
import pytest

from support.shards.world import SCHEMA, FlakyConsensus, World, append, updates
from tidemill.base.errors import ClosedError, InvalidError, UnknownOutcomeError
from tidemill.shards.api import Batch, Column, Part, SchemaEvolvedError, ShardSchema
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.parts.row_hash import bucket_of, hash_rows
from tidemill.shards.parts.schema import hash_columns
from tidemill.shards.parts.schema_evolution import (
    SchemaChanges,
    canonical_default,
    default_value,
    evolve_schema,
    schema_changes,
)
from tidemill.shards.state.apply import apply, batch_id
from tidemill.shards.state.checkpoint import (
    assemble_state,
    decode_header,
    encode_header,
    shard_row_changes,
    state_header,
)
from tidemill.shards.state.codec import decode_batch
from tidemill.shards.state.commands import Append, Create, Evolve, Replace
from tidemill.shards.state.restore import restore_shard
from tidemill.shards.state.state import SchemaVersion, broken_invariant

N = Column("n", "int16", "7")
BASE = ShardSchema(
    (Column("k", "int16"), Column("f", "float32"), Column("d", "decimal(5,2)"), Column("s", "string")), ("k",), 4
)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("k", ["int32", "int64"]), ("f", ["float64"]), ("d", ["decimal(6,2)", "decimal(38,2)"])],
)
def test_a_type_widens_to_every_one_that_holds_its_values_exactly(name: str, kinds: list[str]) -> None:
    for kind in kinds:
        found = evolve_schema(BASE, SchemaChanges(widen=(Column(name, kind),)))
        assert found.version == 2 and {c.name: c.type for c in found.columns}[name] == kind


@pytest.mark.parametrize(
    "refused",
    [
        SchemaChanges(widen=(Column("k", "float64"),)), SchemaChanges(widen=(Column("k", "decimal(38,0)"),)),
        SchemaChanges(widen=(Column("d", "decimal(9,3)"),)), SchemaChanges(widen=(Column("d", "float64"),)),
        SchemaChanges(widen=(Column("s", "json"),)), SchemaChanges(widen=(Column("x", "int32"),)),
        SchemaChanges(widen=(Column("s", "binary"),)), SchemaChanges(add=(Column("s", "int16"),)),
        SchemaChanges(add=(Column("_time", "int16"),)), SchemaChanges(add=(Column("n", "int16", "x"),)),
        SchemaChanges(add=(Column("n", "int16", "70000"),)), SchemaChanges(add=(Column("n", "json", "{"),)),
        SchemaChanges(add=(Column("n", "int99"),)), SchemaChanges(add=(Column("k", "int16", "1"),)),
    ],
)  # fmt: skip
def test_what_would_not_leave_every_value_as_it_was_is_refused(refused: SchemaChanges) -> None:
    with pytest.raises(InvalidError) as error:
        evolve_schema(BASE, refused)
    assert (refused.add + refused.widen)[0].name in error.value.message


def test_narrowing_is_no_change_for_whoever_asks_for_less() -> None:
    wide = evolve_schema(BASE, SchemaChanges(widen=(Column("k", "int64"),)))
    assert evolve_schema(wide, SchemaChanges(widen=(Column("k", "int32"),))) == wide


@pytest.mark.parametrize(
    ("kind", "text", "kept"),
    [("float32", "0.1", "0.10000000149011612"), ("float64", "0.1", "0.1"), ("decimal(5,2)", "1.5", "1.50"),
     ("decimal(20,10)", "0", "0.0000000000"), ("bool", "TRUE", "t"), ("int16", "07", "7"), ("json", "[1]", "[1]"),
     ("string", "", ""), ("float32", "-0.0", "-0.0"), ("float32", "NaN", "nan"), ("timestamp", "infinity", "infinity")],
)  # fmt: skip
def test_a_default_is_kept_as_the_text_that_means_the_same_under_every_wider_type(
    kind: str, text: str, kept: str
) -> None:
    assert canonical_default(Column("n", kind, text)) == kept
    value = default_value(Column("n", kind, kept))
    assert canonical_default(Column("n", kind, kept)) == kept
    wider = {"float32": pa.float64(), "decimal(5,2)": pa.decimal128(9, 2)}.get(kind, value.type)
    again = default_value(Column("n", {"float32": "float64", "decimal(5,2)": "decimal(9,2)"}.get(kind, kind), kept))
    assert repr(pa.scalar(value, value.type).cast(wider)) == repr(again)


def test_the_difference_is_told_when_a_schema_cannot_become_another() -> None:
    want = ShardSchema((Column("k", "int32"), Column("s", "string"), Column("n", "bool")), ("k",), 4)
    with pytest.raises(InvalidError, match=r"-f float32, -d decimal\(5,2\), \+n bool, k int16→int32"):
        schema_changes(BASE, want)
    for other in (ShardSchema(BASE.columns, ("k", "s"), 4), ShardSchema(BASE.columns, ("k",), 8)):
        with pytest.raises(InvalidError, match="difference"):
            schema_changes(BASE, other)


def test_columns_may_stand_in_any_order_where_a_schema_is_asked_for() -> None:
    want = ShardSchema((Column("n", "bool"), *reversed(BASE.columns)), ("k",), 4)
    changes = schema_changes(BASE, want)
    assert changes == SchemaChanges((Column("n", "bool"),)) and not schema_changes(evolve_schema(BASE, changes), want)


def test_a_row_has_one_hash_and_one_bucket_under_every_version() -> None:
    keyless = ShardSchema((Column("a", "int16"), Column("f", "float32"), Column("d", "decimal(5,2)")), ())
    rows = pa.table(
        {"a": [1, -2, None], "f": pa.array([0.1, float("nan"), -0.0], pa.float32()),
         "d": pa.array([Decimal("1.25"), None, Decimal("-3.00")], pa.decimal128(5, 2))},
    )  # fmt: skip
    wide = rows.cast(pa.schema([("a", pa.int64()), ("f", pa.float64()), ("d", pa.decimal128(30, 2))]))
    before, after = hash_rows(rows, ["a", "f", "d"]), hash_rows(wide, ["a", "f", "d"])
    assert (before == after).all() and (bucket_of(before, 7) == bucket_of(after, 7)).all()
    assert hash_columns(evolve_schema(keyless, SchemaChanges((N,)))) == ("a", "f", "d")


async def test_a_shard_evolves_and_times_before_and_after_read_exactly() -> None:
    world = World()
    old = await world.open()
    await append(old, 0, 5, [(1, "a", 1, 1), (2, "b", 2, 1)])
    assert (await old.evolve(SchemaChanges((N,)))).version == 2
    new = await world.open(schema=None, writer="new")
    assert [c.name for c in new.schema.columns] == ["k", "v", "n"]
    changed = updates([(1, "a", 6, -1), (1, "a", 6, 1)]).append_column("n", pa.array([7, 8], pa.int16()))
    await new.compare_and_append(5, 9, [await new.write_part(changed)], "")
    untouched = {"k": 2, "v": "b", "n": 7}
    assert by_key(await new.snapshot(4)) == [{"k": 1, "v": "a", "n": 7}, untouched]
    assert by_key(await new.snapshot(8)) == [{"k": 1, "v": "a", "n": 8}, untouched]
    assert by_key(await old.snapshot(4)) == [{"k": 1, "v": "a"}, {"k": 2, "v": "b"}]
    with pytest.raises(SchemaEvolvedError):
        await old.snapshot(8)
    with pytest.raises(SchemaEvolvedError):
        await anext(old.listen(5))


def by_key(table: pa.Table) -> list[dict[str, object]]:
    return sorted(table.to_pylist(), key=lambda row: row["k"])


async def test_a_merge_by_a_handle_of_before_keeps_the_new_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.shards.compaction.compaction.FAN_IN", 2)
    world = World()
    old = await world.open()
    await append(old, 0, 5, [(1, "a", 1, 1)])
    await old.evolve(SchemaChanges((N,)))
    new = await world.open(schema=None)
    rows = updates([(2, "b", 6, 1)]).append_column("n", pa.array([9], pa.int16()))
    await new.compare_and_append(5, 7, [await new.write_part(rows)], "")
    done = await compact_once(old, world.objects, world.rand)
    assert done is not None and done.shown and done.batches == 2
    found = await new.snapshot(6)
    assert sorted(found.column("n").to_pylist()) == [7, 9]
    assert old.state.batches[0].schema_version == 2
    with pytest.raises(SchemaEvolvedError):
        await old.snapshot(4)  # merged since under the newest version


async def test_a_writer_of_an_older_version_is_fenced_with_rows_and_without() -> None:
    """The fence also applies without rows: a record that changes only the new column is no change for the old
    version."""
    world = World()
    old = await world.open()
    part = await old.write_part(updates([(1, "a", 1, 1)]))
    await (await world.open()).evolve(SchemaChanges((N,)))
    with pytest.raises(SchemaEvolvedError, match="version=2 written=1"):
        await old.compare_and_append(0, 5, [part], "t")
    with pytest.raises(SchemaEvolvedError, match="version=2 written=1"):
        await old.compare_and_append(0, 3, [], "")
    assert (await old.frontiers())[1] == 0


async def test_an_append_that_landed_before_the_schema_changed_is_found_again_by_its_token() -> None:
    world = World()
    old = await world.open()
    part = await old.write_part(updates([(1, "a", 1, 1)]))
    await old.compare_and_append(0, 5, [part], "t")
    await old.evolve(SchemaChanges((N,)))
    assert await old.compare_and_append(0, 5, [part], "t") == 5


async def test_evolvers_that_race_end_in_one_schema() -> None:
    world = World()
    handles = [await world.open(writer=f"w{i}") for i in range(6)]
    asked = [
        SchemaChanges((N,)), SchemaChanges((Column("n", "int64", "7"),)), SchemaChanges((Column("m", "string"),)),
        SchemaChanges((Column("m", "string"), N)), SchemaChanges((Column("n", "int32", "7"),)), SchemaChanges((N,)),
    ]  # fmt: skip
    await asyncio.gather(*(h.evolve(changes) for h, changes in zip(handles, asked, strict=True)))
    found = {(await world.open(schema=None)).schema for _ in handles}
    assert len(found) == 1
    schema = found.pop()
    assert {(c.name, c.type, c.default) for c in schema.columns[2:]} == {("n", "int64", "7"), ("m", "string", None)}
    for handle in handles:
        await handle.frontiers()
        assert handle.state.schema == schema
        reported = handle.state.versions
        assert [v.version for v in reported] == list(range(2, schema.version + 1))
    with pytest.raises(InvalidError, match="another default: column=n default='7' wanted='8'"):
        await handles[0].evolve(SchemaChanges((Column("n", "int16", "8"),)))
    with pytest.raises(InvalidError, match="some values would change: column=v type=string wanted=bool"):
        await handles[0].evolve(SchemaChanges(widen=(Column("v", "bool"),)))


async def test_an_evolution_of_unknown_outcome_may_be_asked_for_again() -> None:
    world = World()
    consensus = FlakyConsensus(world.durable)
    shard = await world.open(consensus=consensus)
    consensus.script = [(True, False)]
    try:
        await shard.evolve(SchemaChanges((N,)))
    except UnknownOutcomeError:
        await shard.evolve(SchemaChanges((N,)))
    assert (await shard.evolve(SchemaChanges((N,)))).version == 2
    await shard.close()
    with pytest.raises(ClosedError):
        await shard.evolve(SchemaChanges((Column("z", "bool"),)))


async def test_versions_are_in_rollups_in_checkpoint_rows_and_in_a_restored_shard() -> None:
    world = World()
    shard = await world.open()
    await append(shard, 0, 5, [(1, "a", 1, 1)])
    await shard.evolve(SchemaChanges((N,), (Column("k", "int64"),)))
    await shard.rollup()
    again = await world.open(schema=None)
    assert again.state == shard.state
    (version,) = again.state.versions
    assert version == SchemaVersion(2, 5, version.at_ms, ("n",)) and version.at_ms > 0
    restored = assemble_state(decode_header(encode_header(again.state)), again.state.batches)
    assert restored == again.state
    elsewhere = World()
    elsewhere.objects = world.objects
    await restore_shard(elsewhere.consensus(), elsewhere.rand, restored, "attempt")
    found = await elsewhere.open(schema=None)
    assert (found.schema, found.state.versions) == (again.schema, again.state.versions)
    assert (await found.snapshot(4)).to_pylist() == [{"k": 1, "v": "a", "n": 7}]


async def test_what_a_version_widened_is_told_with_the_type_it_had() -> None:
    world = World()
    small = ShardSchema((Column("k", "int16"), Column("v", "string")), ("k",))
    shard = await world.open(name="s", schema=small)
    await shard.evolve(SchemaChanges(widen=(Column("k", "int32"),)))
    assert shard.state.versions[0].widened == (("k", "int16"),)
    assert SCHEMA.version == shard.schema.version == 1


def test_no_prefix_of_a_checkpoint_has_a_batch_that_is_newer_than_its_schema() -> None:
    """A round finds a new version and a batch rewritten under it. A manifest may be cut between its groups."""

    def part(data: bytes) -> Part:
        return Part(1, 10, inline=data, max_hash=2**64 - 1)

    state = apply(None, Create("t", "id", ShardSchema((Column("id", "int64"),), ("id",))))
    for n in range(2):
        state = apply(state, Append(Batch(n * 100, n * 100 + 100, (part(b"x%d" % n),), "w", f"a{n}")))
    before, batches = state_header(state), {batch.lower: batch for batch in state.batches}
    state = apply(state, Evolve(SchemaChanges((Column("n", "int32", "5"),)), 1))
    merged = Batch(0, 200, (part(b"m"),), "c", "m", -1, state.schema.version)
    state = apply(state, Replace(tuple(batch_id(batch) for batch in state.batches), merged, 0))
    uppers = {batch.lower: batch.upper for batch in batches.values()}
    header = before
    for group in shard_row_changes(before, uppers, state, lambda batch: batches.get(batch.lower) == batch):
        header = group.header or header
        for lower in group.removed:
            batches.pop(lower)
        for row in group.batches:
            batches[row.lower] = decode_batch(row.data)
        assert not broken_invariant(assemble_state(header, [batches[lower] for lower in sorted(batches)]))
    assert header == state_header(state)
