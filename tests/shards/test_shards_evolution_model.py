"""The pure core under evolution: state, parts, sums and merges, against a plain list of rows.

Oracle: contents at every readable time equal the list, with defaults for the columns that older rows lack. A reader of
an older version sees exactly its columns of the rows written up to then. A complete merge holds each row once, so
retractions of one version met the insertions of another. Bytes of state and commands survive a round trip.
"""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tidemill.shards.api import DIFF, TIME, Batch, Column, Part, ShardSchema
from tidemill.shards.compaction import compaction
from tidemill.shards.parts.consolidate import merge_updates, sum_contents
from tidemill.shards.parts.parts import decode_part, encode_part, rows_within
from tidemill.shards.parts.schema import contents_schema, update_schema
from tidemill.shards.parts.schema_evolution import SchemaChanges, default_value
from tidemill.shards.state.apply import RejectedCommand, RejectionReason, apply, batch_id
from tidemill.shards.state.codec import decode_command, decode_state, encode_command, encode_state
from tidemill.shards.state.commands import Append, Command, Create, DowngradeSince, Evolve, Replace
from tidemill.shards.state.state import ShardState, check_invariants

TYPES = ["float32", "int16", "decimal(4,2)", "string", "bool"]
WIDER = {"int16": "int32", "int32": "int64", "float32": "float64", "decimal(4,2)": "decimal(9,2)"}
DEFAULTS = {"int": "7", "float": "0.1", "decimal": "1.5", "string": "é", "bool": "true"}
FLOATS = [0.0, -0.0, 0.1, float("nan"), float("inf"), -1.5]
Row = tuple[str, ...]
"""repr of each value, in the column order of the version under which it was written."""


def kind_of(type_name: str) -> str:
    return type_name.rstrip("=0123456789").partition("(")[0]


def value_of(type_name: str, seed: int) -> Any:
    match kind_of(type_name):
        case "int":
            return seed % 5 - 2
        case "float":
            found = FLOATS[seed % len(FLOATS)]
            return float(np.float32(found)) if type_name == "float32" else found
        case "decimal":
            return Decimal(seed % 7) * Decimal("0.25")
        case "bool":
            return seed % 2 == 0
        case _:
            return "abc"[: seed % 4]


class EvolutionModel(RuleBasedStateMachine):
    keyed = True

    @initialize(buckets=st.sampled_from([1, 4]))
    def start(self, buckets: int) -> None:
        schema = ShardSchema(
            (Column("k", "int16"), Column("v", "float32"), Column("d", "decimal(4,2)")),
            ("k", "d") if self.keyed else (),
            buckets,
        )
        self.state: ShardState = apply(None, Create("t", "id", schema))  # type: ignore[assignment]
        self.schemas = [schema]
        self.rows: list[tuple[dict[str, Any], int, int]] = []
        """(values by name as written, time, diff)"""
        self.live: list[dict[str, Any]] = []
        self.decoded: dict[tuple[bytes, int], pa.Table] = {}

    def take(self, command: Command) -> ShardState | RejectedCommand:
        assert decode_command(encode_command(command)) == command
        found = apply(self.state, command)
        if isinstance(found, ShardState):
            self.state = found
            check_invariants(found)
            assert decode_state(encode_state(found)) == found
        return found

    def key_of(self, row: dict[str, Any]) -> Row:
        return tuple(repr(row[name]) for name in self.state.schema.key)

    def filled(self, row: dict[str, Any], schema: ShardSchema) -> Row:
        return tuple(repr(row[c.name] if c.name in row else default_value(c).as_py()) for c in schema.columns)

    def part(self, schema: ShardSchema, updates: list[tuple[dict[str, Any], int, int]]) -> Part:
        columns = {
            c.name: [row[c.name] if c.name in row else default_value(c).as_py() for row, _, _ in updates]
            for c in schema.columns
        }
        table = pa.table({**columns, TIME: [t for _, t, _ in updates], DIFF: [d for _, _, d in updates]})
        return self.stored(schema, table)

    @staticmethod
    def stored(schema: ShardSchema, table: pa.Table, bucket: int = 0) -> Part:
        found = encode_part(schema, pa.table(table.to_pydict(), schema=update_schema(schema)))
        data = found.data.to_pybytes()
        return Part(found.rows, len(data), bucket, "", data, found.min_hash, found.max_hash)

    @rule(
        changes=st.lists(st.sampled_from(["widen", *TYPES]) | st.sampled_from([f"{t}=" for t in TYPES]), max_size=2),
        steps=st.lists(st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=3), min_size=1, max_size=3),
        since=st.integers(0, 3),
        merge=st.none() | st.tuples(st.integers(0, 9), st.integers(1, 9), st.booleans()),
    )
    def a_round(self, changes: list[str], steps: Any, since: int, merge: tuple[int, int, bool] | None) -> None:
        self.evolve(changes)
        self.append(steps)
        self.take(DowngradeSince("model", 1, self.state.since + since, 5))
        if merge is not None:
            at, count, newest = merge
            self.merge(self.state.batches[at % len(self.state.batches) :][:count], newest)

    @rule()
    def everything_is_merged(self) -> None:
        self.take(DowngradeSince("model", 1, self.state.upper - 1, 5))
        if self.state.batches:
            self.merge(self.state.batches, True)

    def append(self, steps: list[list[tuple[int, bool]]]) -> None:
        schema, updates = self.state.schema, []
        for offset, step in enumerate(steps):
            time = self.state.upper + offset
            touched: list[Row] = []
            for seed, goes in step:
                row = {c.name: None if (seed + at) % 11 == 10 else value_of(c.type, seed + at * 3)
                       for at, c in enumerate(schema.columns)}  # fmt: skip
                if self.keyed:
                    key = self.key_of(row)
                    if key in touched:
                        continue  # a writer says one thing of a key at a time
                    touched.append(key)
                    gone = [r for r in self.live if self.key_of(r) == key]
                else:
                    gone = self.live[seed % len(self.live) :][:1] if goes and self.live else []
                for old in gone:
                    self.live = [r for r in self.live if r is not old]
                    updates.append((old, time, -1))
                if not goes:
                    self.live.append(row)
                    updates.append((row, time, 1))
        lower, upper = self.state.upper, self.state.upper + len(steps)
        parts = (self.part(schema, updates),) if updates else ()
        if parts and schema.version > 1:
            late = Batch(lower, upper, parts, "w", "late", schema_version=schema.version - 1)
            refused = self.take(Append(late))
            assert isinstance(refused, RejectedCommand) and refused.reason is RejectionReason.EVOLVED
        batch = Batch(lower, upper, parts, "w", f"t{lower}", schema_version=schema.version)
        assert isinstance(self.take(Append(batch)), ShardState)
        self.rows += updates

    def evolve(self, asked: list[str]) -> None:
        """Evolve the schema. `widen`: widen the newest column that permits it; a type: add a column of it, with `=` one
        with a default."""
        before = self.state.schema
        kinds = [kind for kind in asked if kind != "widen"]
        add = tuple(
            Column(f"c{before.version}{at}", kind.rstrip("="), DEFAULTS[kind_of(kind)] if "=" in kind else None)
            for at, kind in enumerate(kinds)
        )
        can = [Column(c.name, WIDER[c.type]) for c in before.columns if c.type in WIDER]
        command = Evolve(SchemaChanges(add, tuple(can[-1:] if "widen" in asked else ())), 5)
        result = self.take(command)
        if isinstance(result, RejectedCommand):
            assert not command.changes or result.reason is RejectionReason.SCHEMA, result
            assert self.state.schema == before
            return
        assert self.state.schema.version == before.version + 1
        self.schemas.append(self.state.schema)
        for row in self.live:
            # Readers from now on see these columns too, and a retraction must contain them.
            for column in self.state.schema.columns:
                row.setdefault(column.name, default_value(column).as_py())
        again = self.take(command)
        assert isinstance(again, RejectedCommand) and again.reason is RejectionReason.COMMITTED

    def merge(self, run: tuple[Batch, ...], newest: bool) -> None:
        least = max(batch.schema_version for batch in run)
        schema = self.state.schema if newest else self.schemas[least - 1]
        lower, upper = run[0].lower, run[-1].upper
        advance_to = min(self.state.since, upper - 1)
        parts: list[Part] = []
        for low, high in compaction.hash_ranges(8 * compaction.RANGE_BYTES):
            rows = pa.concat_tables([update_schema(schema).empty_table(), *self.of_hashes(schema, run, low, high)])
            for bucket, split in compaction._split_parts(schema, merge_updates(schema, rows, advance_to)):
                parts.append(self.stored(schema, split, bucket))
        whole = Batch(lower, upper, tuple(parts), "c", f"m{self.state.version}", schema_version=schema.version)
        command = Replace(tuple(batch_id(b) for b in run), whole, 7)
        if least > 1:
            older = Batch(lower, upper, tuple(parts), "c", "older", schema_version=least - 1)
            refused = self.take(Replace(command.replaced, older, 7))
            assert isinstance(refused, RejectedCommand) and refused.reason is RejectionReason.EVOLVED
        assert isinstance(self.take(command), ShardState)
        if lower == 0 and advance_to == upper - 1:
            listed = Counter(self.filled(row, schema) for row, t, d in self.rows if t < upper for _ in range(d))
            listed -= Counter(self.filled(row, schema) for row, t, d in self.rows if t < upper and d < 0)
            assert sum(p.rows for p in parts) == len(listed), "a retraction missed what it retracts"

    def of_hashes(self, schema: ShardSchema, run: tuple[Batch, ...], low: int, high: int) -> list[pa.Table]:
        found = [compaction._slice_hashes(rows, low, high) for batch in run for rows in self.read(schema, batch)]
        return [rows.select(update_schema(schema).names) for rows in found]

    def read(self, schema: ShardSchema, batch: Batch) -> list[pa.Table]:
        found = []
        for part in batch.parts:
            key = (part.inline, schema.version)
            if key not in self.decoded:
                self.decoded[key] = decode_part(schema, part.inline, part)
            found.append(rows_within(self.decoded[key], batch.lower, batch.upper))
        return found

    def contents_at(self, schema: ShardSchema, as_of: int, batches: tuple[Batch, ...]) -> Counter[Row]:
        tables = [rows_within(rows, 0, as_of + 1) for b in batches if b.lower <= as_of for rows in self.read(schema, b)]
        if not tables:
            return Counter()
        found = sum_contents(schema, pa.concat_tables(tables))
        assert found.schema == contents_schema(schema)
        return Counter(tuple(repr(v) for v in row.values()) for row in found.to_pylist())

    def expected(self, schema: ShardSchema, as_of: int) -> Counter[Row]:
        out: Counter[Row] = Counter()
        for row, time, diff in self.rows:
            if time <= as_of:
                out[self.filled(row, schema)] += diff
        assert all(n >= 0 for n in out.values())
        return +out

    @invariant()
    def contents_are_exact_at_every_readable_time(self) -> None:
        if not hasattr(self, "state"):
            return
        since, upper = self.state.since, self.state.upper
        for as_of in {*range(since, upper, max(1, (upper - since) // 3)), upper - 1} - {-1}:
            chosen = tuple(b for b in self.state.batches if b.lower <= as_of)
            able = [s for s in self.schemas if all(b.schema_version <= s.version for b in chosen)]
            for schema in {able[0], able[-1]}:
                assert self.contents_at(schema, as_of, chosen) == self.expected(schema, as_of)


class KeylessModel(EvolutionModel):
    keyed = False


@pytest.mark.parametrize("model", [EvolutionModel, KeylessModel])
def test_contents_stay_what_they_were_through_every_version(model: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(model, settings=settings(max_examples=40, stateful_step_count=20, deadline=None))
