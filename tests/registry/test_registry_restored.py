"""A restore from the bucket brings every schema back, and the deep check covers the registry's rows."""

from __future__ import annotations

import msgspec
import pytest

from support.registry.world import Cluster, record
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.maintenance.check.deep_check import deep_check
from tidemill.maintenance.restore.restore import SCHEMA_IDS_SKIPPED, Restorer
from tidemill.metastore.rows import DIGESTS, REFERRERS, REGISTRY_HEADS, SCHEMAS, USES, VERSIONS
from tidemill.metastore.rows.registry import Reference
from tidemill.registry.registry import Registry
from tidemill.registry.schema import SubmittedSchema

INNER = SubmittedSchema("AVRO", record("x:int", name="n.Inner"))
OUTER = SubmittedSchema("AVRO", record("i:n.Inner", name="n.Outer"), (Reference("n.Inner", "inner", 1),))
PROTO = SubmittedSchema("PROTOBUF", 'syntax = "proto3"; message M { int32 a = 1; }')


async def filled(cluster: Cluster) -> Registry:
    registry = cluster.node()
    await registry.register("inner", INNER)
    await registry.register("outer", OUTER)
    await registry.register("proto", PROTO)
    await registry.register("copy", INNER)
    await registry.delete("copy", None)
    await registry.set_level("outer", "FULL")
    return registry


@pytest.mark.processes
async def test_a_bucket_alone_brings_schemas_versions_and_configuration_back() -> None:
    async with Cluster() as cluster:
        before = await filled(cluster)
        await cluster.persisted()
        state = MemoryState()
        consensus = MemoryConsensus(cluster.clock, state)
        done = await Restorer(consensus, cluster.objects, cluster.clock, cluster.rand).run()
        assert done.findings.clean, done.findings.broken
        async with Cluster(state, cluster.objects) as again:
            after = again.node()
            for schema_id in (1, 2, 3):
                assert await after.book.schema(schema_id) == await before.book.schema(schema_id)
            assert await after.book.all_versions() == await before.book.all_versions()
            assert await after.level("outer") == "FULL"
            assert (await after.register("outer", OUTER)).version.id == 2
            found = await after.register("new", SubmittedSchema("AVRO", '"long"'))
            assert found.version.id == 4 + SCHEMA_IDS_SKIPPED, "lost ids may stand in records, and mean nothing else"


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (SCHEMAS.key(3), "version proto/1"),
        (DIGESTS, "its digest row is missing"),
        (VERSIONS.key("inner", 1), "the version that it refers to does not exist"),
        (USES.key(2, "outer", 1), "use row and version row do not match"),
        (REFERRERS.key("inner", 1, 2), "reference and referrer row do not match"),
        (REGISTRY_HEADS.key("head"), "is already assigned"),
    ],
)
@pytest.mark.processes
async def test_the_deep_check_names_every_broken_reference(key: object, found: str) -> None:
    async with Cluster() as cluster:
        await filled(cluster)
        metastore = cluster.metastore()
        if key is DIGESTS:
            row = (await metastore.rows(DIGESTS))[0]
            broken = DIGESTS.key(row.digest)
        else:
            assert isinstance(key, bytes)
            broken = key
        consensus = MemoryConsensus(cluster.clock, cluster.state)
        checked = await deep_check(consensus, cluster.objects, cluster.clock, cluster.rand)
        assert [str(one) for one in checked.findings.broken] == []
        await metastore.commit([(broken, b"")])
        checked = await deep_check(consensus, cluster.objects, cluster.clock, cluster.rand)
        reported = [str(one) for one in checked.findings.broken]
        assert any(found in line for line in reported), reported


def test_rows_grow_at_their_end_only() -> None:
    """Rows in a bucket today stay readable by every later version."""
    row = REGISTRY_HEADS.decode(REGISTRY_HEADS.key("head"), b"\x01" + msgspec.msgpack.encode([7, 1, 2, 3, 0]))
    assert (row.next_id, row.schemas, row.subjects, row.versions, row.configs) == (7, 1, 2, 3, 0)
    value = b"\x01" + msgspec.msgpack.encode(["AVRO", '"int"', [["n", "s", 1]], "d", b""])
    schema = SCHEMAS.decode(SCHEMAS.key(1), value)
    assert schema.references == (Reference("n", "s", 1),) and SCHEMAS.encode(schema)[1] == value
    assert VERSIONS.decode(VERSIONS.key("s", 1), b"\x01" + msgspec.msgpack.encode([5])).id == 5
