"""Rows F801 to F804 of docs/internals/faults.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from support.registry.world import Cluster, Faulty, Rest, record
from tidemill.base.clock import Rand
from tidemill.base.config.sections import RegistrySection
from tidemill.base.errors import FencedError, UnavailableError, UnknownOutcomeError
from tidemill.registry.errors import RegistryError
from tidemill.registry.protobuf import compile as compiler
from tidemill.registry.registry import Registry
from tidemill.registry.schema import SubmittedSchema
from tidemill.registry.schema_types import parse_schema

STRINGS = {"type": "string"}
CHAIN = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(2_000)}
HOSTILE = [
    ("AVRO", "[" * 50_000, 42201),
    ("AVRO", '{"type":"array","items":' * 120 + '"int"' + "}" * 120, 42201),
    ("AVRO", json.dumps([f"t{n}" for n in range(15_000)]), 42201),
    ("AVRO", '"' + "a" * 300_000 + '"', 42209),
    ("JSON", '{"items":' * 99 + "{}" + "}" * 99 + "}", 42201),
    ("JSON", json.dumps({"$defs": CHAIN, "$ref": "#/$defs/d0"}), 42201),
    ("JSON", json.dumps([0] * 60_000), 42201),
    ("PROTOBUF", 'syntax = "proto3"; ' + "message A {" * 3_000 + "}" * 3_000, 42201),
    ("PROTOBUF", "\x00" * 1_000, 42201),
]


@pytest.mark.parametrize(("kind", "text", "code"), HOSTILE)
@pytest.mark.processes
def test_f801_a_hostile_schema_ends_its_own_request(rest: Rest, kind: str, text: str, code: int) -> None:
    assert rest.error("POST", "/subjects/s/versions", {"schema": text, "schemaType": kind}) == code
    assert rest.ask("GET", "/subjects") == (200, [])


def test_f801_a_comparison_of_hostile_schemas_ends(rest: Rest) -> None:
    bomb = {"type": "object", "patternProperties": {"^(a+)+$": STRINGS}, "additionalProperties": False}
    rest.register("bomb", json.dumps(bomb), "JSON")
    named = {**bomb, "properties": {"a" * 60 + "!": STRINGS}}
    rest.register("bomb", json.dumps(named), "JSON")
    wide = [{"type": "object", "properties": {f"p{n}": STRINGS}, "additionalProperties": False} for n in range(230)]
    rest.register("wide", json.dumps({"oneOf": wide}), "JSON")
    other = json.dumps({"oneOf": [*wide, {"type": "null"}]}).replace('"string"', '"number"')
    assert rest.error("POST", "/subjects/wide/versions", {"schema": other, "schemaType": "JSON"}) == 42201


async def test_f802_what_the_thread_does_not_get_through_is_turned_away() -> None:
    async with Cluster() as cluster:
        gate = asyncio.Event()

        async def slow(work: Callable[[], Any]) -> Any:
            await gate.wait()
            return work()

        registry = Registry(cluster.metastore(), cluster.clock, Rand(), slow, RegistrySection(waiting=2))
        given = [SubmittedSchema("AVRO", record(f"f{n}:int")) for n in range(3)]
        waiting = [asyncio.ensure_future(registry.register(f"s{n}", given[n])) for n in range(2)]
        async with asyncio.timeout(30):
            while registry.facts()["waiting"] != 2:
                await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="too many"):
            await registry.register("s2", given[2])
        assert registry.facts()["turned_away"] == 1
        assert await registry.book.all_versions() == [], "what reads no schema goes on"
        gate.set()
        assert {(await one).version.version for one in waiting} == {1}
        assert (await registry.register("s2", given[2])).version.version == 1


TEXT = 'syntax = "proto3"; message Fault { int32 a = 1; }'


@pytest.mark.parametrize(
    ("child", "error"),
    [
        ("import time; time.sleep(600)", UnavailableError),
        ("import os; os.abort()", RegistryError),
        ("raise SystemExit(3)", RegistryError),
    ],
)
@pytest.mark.processes
def test_f803_a_compiler_that_hangs_or_crashes_ends_the_request(
    monkeypatch: pytest.MonkeyPatch, child: str, error: type[Exception]
) -> None:
    monkeypatch.setattr(compiler, "_LIMITED_PROTOC", child)
    monkeypatch.setattr(compiler, "TIMEOUT_S", 0.5)
    with pytest.raises(error):
        parse_schema(SubmittedSchema("PROTOBUF", TEXT), {})
    monkeypatch.undo()
    assert parse_schema(SubmittedSchema("PROTOBUF", TEXT), {}).descriptor


@pytest.mark.processes
def test_f803_a_compiler_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.sys, "executable", "/nowhere/python")
    with pytest.raises(UnavailableError, match="protoc"):
        parse_schema(SubmittedSchema("PROTOBUF", TEXT), {})


async def test_f804_a_change_goes_on_over_what_the_metastore_meets() -> None:
    async with Cluster() as cluster:
        faulty = Faulty(cluster.metastore())
        node, other = cluster.node(metastore=faulty), cluster.node()
        faulty.faults = [
            ("before", FencedError("a newer term.")),
            ("after", UnknownOutcomeError("lost.")),
            ("before", UnknownOutcomeError("lost.")),
        ]
        assert (await node.register("s", SubmittedSchema("AVRO", record("a:int")))).version.version == 1
        faulty.faults = [("after", UnknownOutcomeError("lost."))]
        assert await node.delete("s", None) == [1]
        assert [row.deleted for row in await other.book.versions("s", fresh=True)] == [True]
        faulty.faults = [("before", UnavailableError("the store is away."))]
        with pytest.raises(UnavailableError):
            await node.register("s", SubmittedSchema("AVRO", record("b:int")))
        assert [row.version for row in await other.book.versions("s", fresh=True)] == [1]
