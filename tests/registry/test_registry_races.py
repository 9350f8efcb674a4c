"""Concurrent changes from many nodes: one schema has one id and one version, no id is assigned twice, and an
unacknowledged registration counts once.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from support.registry.world import Cluster, Faulty, record
from tidemill.base.errors import UnknownOutcomeError
from tidemill.metastore.rows import DIGESTS, REGISTRY_HEADS, SCHEMAS, USES, VERSIONS
from tidemill.metastore.rows.registry import RegistryHeadRow
from tidemill.registry.errors import RegistryError
from tidemill.registry.registry import Registry
from tidemill.registry.schema import SubmittedSchema
from tidemill.registry.transitions import Change


async def settled(cluster: Cluster) -> None:
    """Check the invariants between the rows, which hold after any history."""
    metastore = cluster.metastore()
    schemas = {row.id: row for row in await metastore.rows(SCHEMAS)}
    versions = await metastore.rows(VERSIONS)
    head = (await metastore.rows(REGISTRY_HEADS))[0]
    assert {row.id for row in versions} == set(schemas)
    assert len({row.digest for row in schemas.values()}) == len(schemas), "equal schemas have one id"
    assert {row.digest: row.id for row in await metastore.rows(DIGESTS)} == {r.digest: i for i, r in schemas.items()}
    assert {(row.id, row.subject, row.version) for row in await metastore.rows(USES)} == {
        (row.id, row.subject, row.version) for row in versions
    }
    subjects = {row.subject for row in versions}
    assert (head.schemas, head.versions, head.subjects) == (len(schemas), len(versions), len(subjects))
    assert head.next_id > max(schemas, default=0)


async def test_one_schema_registered_by_many_nodes_has_one_id_and_one_version() -> None:
    async with Cluster() as cluster:
        nodes = [cluster.node() for _ in range(4)]
        given = SubmittedSchema("AVRO", record("a:int"))
        found = await asyncio.gather(*(node.register("s", given) for node in nodes for _ in range(5)))
        assert {(one.version.id, one.version.version) for one in found} == {(1, 1)}
        assert [row.version for row in await nodes[0].book.versions("s", fresh=True)] == [1]
        await settled(cluster)


async def test_different_schemas_of_racing_nodes_get_ids_and_versions_without_gaps() -> None:
    async with Cluster() as cluster:
        nodes = [cluster.node() for _ in range(3)]
        await nodes[0].set_level("", "NONE")
        texts = [record(f"f{n}:int") for n in range(6)]
        found = await asyncio.gather(
            *(
                node.register("s", SubmittedSchema("AVRO", text))
                for node in nodes
                for text in random.Random(1).sample(texts, 6)
            )
        )
        assert {one.version.id for one in found} == set(range(1, 7))
        assert {one.version.version for one in found} == set(range(1, 7))
        await settled(cluster)


async def test_a_registration_of_unknown_outcome_counts_once() -> None:
    async with Cluster() as cluster:
        for number, faults in enumerate((["after"], ["before"], ["after", "before"], ["before", "after", "after"])):
            faulty = Faulty(cluster.metastore())
            node = cluster.node(metastore=faulty)
            faulty.faults = [(when, UnknownOutcomeError("nobody knows.")) for when in faults]
            subject = f"s{number}"
            found = await node.register(subject, SubmittedSchema("AVRO", record(f"a{number}:int")))
            assert (found.version.id, found.version.version) == (number + 1, 1)
            assert [row.version for row in await node.book.versions(subject, fresh=True)] == [1]
        await settled(cluster)


async def test_a_deletion_of_unknown_outcome_is_told_as_done() -> None:
    async with Cluster() as cluster:
        faulty = Faulty(cluster.metastore())
        node = cluster.node(metastore=faulty)
        for permanent in (False, True):
            for version in (1, None):
                await node.register("s", SubmittedSchema("AVRO", record("a:int")))
                number = (await node.find("s", None)).version.version
                if permanent:
                    await node.delete("s", None)
                faulty.faults = [("after", UnknownOutcomeError("nobody knows."))]
                await node.delete("s", number if version else None, permanent=permanent)
                shown = await node.book.versions("s", fresh=True)
                assert all(row.deleted for row in shown)
        await settled(cluster)


async def test_a_version_that_comes_after_a_deletion_has_read_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion that read the versions twice answered [1] and wrote nothing, because the first read had no rows."""
    async with Cluster() as cluster:
        node, other = cluster.node(), cluster.node()
        reads, versions = 0, node.book.versions

        async def read_and_move(*args: Any, **options: Any) -> Any:
            nonlocal reads
            found = await versions(*args, **options)
            reads += 1
            if reads == 1:
                await other.register("s", SubmittedSchema("AVRO", record("a:int")))
            return found

        monkeypatch.setattr(node.book, "versions", read_and_move)
        assert await node.delete("s", None) == [1]
        assert [row.deleted for row in await other.book.versions("s", fresh=True)] == [True]
        await settled(cluster)


async def test_a_decision_that_writes_nothing_counts_only_if_the_registry_is_unchanged() -> None:
    async with Cluster() as cluster:
        node, other = cluster.node(), cluster.node()
        seen: list[int] = []

        async def decide(head: RegistryHeadRow) -> Change[int]:
            if not seen:
                await other.register("s", SubmittedSchema("AVRO", record("a:int")))
            seen.append(head.versions)
            return Change([], head, head.versions)

        assert await node._changes.apply_change(decide) == 1
        assert seen == [0, 1]


async def test_any_mixture_of_changes_by_many_nodes_with_faults_leaves_whole_rows() -> None:
    """Registrations and deletions of both kinds race, by a seed, and a third of the commits has an unknown outcome."""
    async with Cluster() as cluster:
        for seed in range(4):
            rand = random.Random(seed)
            faulties = [Faulty(cluster.metastore()) for _ in range(3)]
            nodes = [cluster.node(metastore=faulty) for faulty in faulties]
            if seed == 0:
                await nodes[0].set_level("", "NONE")
            for faulty in faulties:
                outcomes = rand.choices(("before", "after", ""), (1, 1, 4), k=200)
                faulty.faults = [(when, UnknownOutcomeError("nobody knows.")) for when in outcomes]
            await asyncio.gather(*(_work(node, random.Random(seed * 10 + n)) for n, node in enumerate(nodes)))
            await settled(cluster)


NOT_THERE = {40401, 40402, 40403, 40404, 40405, 40406, 40407}


async def _work(node: Registry, rand: random.Random) -> None:
    """Register and delete at random. Only errors that a faster competitor explains are accepted."""
    for _ in range(12):
        subject, text = rand.choice("st"), record(f"f{rand.randrange(4)}:int")
        codes = set()
        try:
            match rand.randrange(5):
                case 0 | 1 | 2:
                    await node.register(subject, SubmittedSchema("AVRO", text))
                case 3:
                    await node.delete(subject, None, permanent=rand.random() < 0.5)
                case 4:
                    await node.delete(subject, rand.randrange(1, 5), permanent=rand.random() < 0.5)
        except RegistryError as refused:
            codes.add(refused.code)
        assert codes <= NOT_THERE
