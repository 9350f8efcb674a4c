"""The domain of a key, the stored number of domains, and scans over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.metastore.memory_rows import Shared, opener
from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import ClosedError, CorruptError, InvalidError, UnknownOutcomeError
from tidemill.consensus.api import Versioned
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore import cluster as clusters
from tidemill.metastore.cluster import domain_of, open_cluster
from tidemill.metastore.metastore import Metastore, merge_scans
from tidemill.metastore.rows import ALL, EXTENTS, GROUP_OFFSETS, PARTITIONS, PIPELINES, TOPICS
from tidemill.metastore.rows.catalogue import PipelineRow, TopicRow
from tidemill.metastore.rows.groups import GroupOffsetRow
from tidemill.metastore.rows.key_encoding import Kind
from tidemill.metastore.rows.partitions import ExtentRow


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def consensus(clock: ManualClock) -> MemoryConsensus:
    return MemoryConsensus(clock)


@pytest.fixture
def rand() -> Rand:
    return Rand(1)


# routing ------------------------------------------------------------------------------------------


def test_routing_is_what_the_documents_say_for_ever() -> None:
    """Every cluster stores rows by these numbers: a changed one loses its rows."""
    assert [domain_of(GROUP_OFFSETS.key(g, "t", 0), 3) for g in ("a", "b", "c", "grüße", "x\x00y")] == [0, 2, 1, 2, 1]
    assert domain_of(GROUP_OFFSETS.key("a", "t", 0), 7) == 0xC1D04330 % 7  # crc32c("a")


def test_rows_of_one_entity_share_a_domain_over_all_families() -> None:
    for topic in map(str, range(50)):
        keys = [
            PARTITIONS.key(topic, 0),
            PARTITIONS.key(topic, 99),
            EXTENTS.key(topic, 7, 2**40),
            EXTENTS.prefix(topic),
        ]
        assert len({domain_of(key, 5) for key in keys}) == 1


def test_rows_of_the_catalogue_are_in_domain_0() -> None:
    catalogue = [family for family in ALL if family.tag < 0x10]
    keys = [
        family.key(*("name" if column.kind is Kind.TEXT else 1 for column in family.columns)) for family in catalogue
    ]
    assert {domain_of(key, 64) for key in keys} == {0}


def test_entities_spread_over_the_domains() -> None:
    counts = [0, 0, 0]
    for number in range(3000):
        counts[domain_of(PARTITIONS.key(f"topic-{number}", 0), 3)] += 1
    assert min(counts) > 900


def test_bytes_that_are_no_key_are_not_routed() -> None:
    with pytest.raises(CorruptError, match="no entity"):
        domain_of(b"\x10abc", 3)


# the cluster --------------------------------------------------------------------------------------


async def test_a_cluster_is_created_once_and_keeps_its_number_of_domains(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    first = await open_cluster(consensus, clock, rand, 3)
    assert first.domains == 3
    assert await open_cluster(consensus, clock, rand) == first
    assert await open_cluster(consensus, clock, rand, 3) == first


async def test_without_a_number_a_new_cluster_has_one_domain(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    assert (await open_cluster(consensus, clock, rand)).domains == 1


async def test_another_number_of_domains_is_refused_naming_both(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    await open_cluster(consensus, clock, rand, 3)
    with pytest.raises(InvalidError, match=r"metastore\.domains=2 cluster=3\. Set metastore\.domains = 3"):
        await open_cluster(consensus, clock, rand, 2)


@pytest.mark.parametrize("domains", [-1, 65])
async def test_a_number_of_domains_out_of_range_is_refused(
    domains: int, consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    with pytest.raises(InvalidError, match="1 to 64"):
        await open_cluster(consensus, clock, rand, domains)
    assert await consensus.head(clusters.REGISTER) is None


async def test_of_processes_that_create_the_cluster_at_once_one_wins_and_all_agree(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    found = await asyncio.gather(*(open_cluster(consensus, clock, rand) for _ in range(8)))
    assert len({cluster.uuid for cluster in found}) == 1


@pytest.mark.parametrize("landed", [True, False])
async def test_a_lost_acknowledgement_at_creation_is_decided_by_what_stands(landed: bool) -> None:
    class Lossy(MemoryConsensus):
        lost = 0

        async def cas(self, key: str, expected_seq: int, data: bytes, nonce: str) -> Versioned:
            if not self.lost:
                self.lost = 1
                if landed:
                    await super().cas(key, expected_seq, data, nonce)
                raise UnknownOutcomeError("lost")
            return await super().cas(key, expected_seq, data, nonce)

    clock = ManualClock()
    consensus = Lossy(clock)
    created = await open_cluster(consensus, clock, Rand(1), 2)
    assert await open_cluster(consensus, clock, Rand(2)) == created


async def test_a_register_of_a_newer_format_is_refused_and_damage_is_corrupt(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    cluster = await open_cluster(consensus, clock, rand)
    newer = clusters.msgspec.structs.replace(cluster, format=2)
    await clusters.write_cluster(consensus, rand, newer, 1)
    with pytest.raises(InvalidError, match="format=2 known=1"):
        await open_cluster(consensus, clock, rand)
    await consensus.cas(clusters.REGISTER, 2, b"\xc1", "n")
    with pytest.raises(CorruptError, match="metastore/cluster"):
        await open_cluster(consensus, clock, rand)


# scans over domains -------------------------------------------------------------------------------


async def chunked(rows: list[tuple[bytes, bytes]], sizes: list[int]) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
    at = 0
    while at < len(rows):
        size = sizes.pop(0) if sizes else 2
        yield [k for k, _ in rows[at : at + size]], [v for _, v in rows[at : at + size]]
        at += size


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.binary(max_size=3), st.integers(0, 3), max_size=30),
    st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=4, max_size=4),
    st.booleans(),
)
def test_a_merged_scan_is_all_scans_in_order(places: dict[bytes, int], sizes: list[list[int]], reverse: bool) -> None:
    """Chunks of any size, empty ones and empty scans included."""

    async def main() -> None:
        scans = []
        for index in range(4):
            rows = [(key, b"%d" % index) for key in sorted(places, reverse=reverse) if places[key] == index]
            scans.append(chunked(rows, list(sizes[index])))
        found = [
            pair
            async for keys, values in merge_scans(scans, reverse=reverse)
            for pair in zip(keys, values, strict=True)
        ]
        assert found == [(key, b"%d" % places[key]) for key in sorted(places, reverse=reverse)]

    asyncio.run(main())


async def test_rows_of_all_domains_are_listed_in_order_and_an_entitys_from_its_domain_alone(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    shared = [Shared(), Shared(), Shared()]
    metastore = Metastore(consensus, opener(shared), clock, rand, domains=3)
    rows = [GroupOffsetRow(f"group-{g}", "t", p, offset=g * p) for g in range(10) for p in range(3)]
    for row in rows:
        await metastore.commit([GROUP_OFFSETS.encode(row)])
    assert all(s.rows for s in shared)
    assert await metastore.rows(GROUP_OFFSETS) == sorted(rows, key=lambda r: (r.group, r.partition))
    for s in shared:
        s.syncs = 0
    assert await metastore.rows(GROUP_OFFSETS, "group-4") == [r for r in rows if r.group == "group-4"]
    assert sum(s.syncs for s in shared) == 1, "one entity, one domain"
    assert await metastore.get(GROUP_OFFSETS, "group-4", "t", 2) == GroupOffsetRow("group-4", "t", 2, offset=8)
    reverse = [k async for keys, _ in metastore.prefix(GROUP_OFFSETS.prefix(), reverse=True) for k in keys]
    assert reverse == sorted((GROUP_OFFSETS.key_of(r) for r in rows), reverse=True)


async def test_a_read_of_keys_of_two_domains_or_of_none_is_rejected(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    metastore = Metastore(consensus, opener([Shared(), Shared(), Shared()]), clock, rand, domains=3)
    keys = [GROUP_OFFSETS.key(group, "t", 0) for group in ("a", "b")]
    with pytest.raises(InvalidError, match=r"within one domain: keys=2 domains=\[0, 2\]"):
        await metastore.get_rows(keys)
    with pytest.raises(InvalidError, match=r"within one domain: keys=0 domains=\[\]"):
        await metastore.get_rows([])
    assert await metastore.get_rows(keys[:1]) == [None]


async def test_a_batch_over_two_domains_is_refused_and_writes_nothing(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    shared = [Shared(), Shared(), Shared()]
    metastore = Metastore(consensus, opener(shared), clock, rand, domains=3)
    batch = [GROUP_OFFSETS.encode(GroupOffsetRow(group, "t", 0, 1)) for group in ("a", "b")]
    with pytest.raises(InvalidError, match=r"within one domain: rows=2 domains=\[0, 2\]"):
        await metastore.commit(batch)
    with pytest.raises(InvalidError, match="within one domain"):
        await metastore.commit(batch[:1], expects={batch[1][0]: 0})
    assert not any(s.rows for s in shared)


# staleness ----------------------------------------------------------------------------------------


async def test_a_read_that_need_not_be_fresh_asks_once_a_second_and_sees_its_own_writes(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    shared = Shared()
    metastore, other = (Metastore(consensus, opener([shared]), clock, rand) for _ in range(2))
    await metastore.start()

    async def seen(*, fresh: bool) -> list[str]:
        return [row.name for row in await metastore.rows(TOPICS, fresh=fresh)]

    assert await seen(fresh=False) == []
    await other.commit([TOPICS.encode(TopicRow("theirs", "1", 1))])
    syncs = shared.syncs
    assert await seen(fresh=False) == []
    assert shared.syncs == syncs
    assert await seen(fresh=True) == ["theirs"]

    await other.commit([TOPICS.encode(TopicRow("later", "2", 1))])
    clock.advance(999)
    assert await seen(fresh=False) == ["theirs"]
    clock.advance(1)
    assert await seen(fresh=False) == ["later", "theirs"]

    await other.commit([TOPICS.encode(TopicRow("again", "3", 1))])
    await metastore.commit([TOPICS.encode(TopicRow("mine", "4", 1))])
    assert await seen(fresh=False) == ["again", "later", "mine", "theirs"]


async def test_rows_of_the_catalogue_are_the_same_list_until_one_of_them_is_written(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    shared = Shared()
    metastore, other = (Metastore(consensus, opener([shared]), clock, rand) for _ in range(2))
    await other.commit([TOPICS.encode(TopicRow("a", "1", 1))])
    first = await metastore.rows(TOPICS)
    await other.commit([PIPELINES.encode(PipelineRow("p"))])
    await other.commit([EXTENTS.encode(ExtentRow("1", 0, 5, 9, 1, "o", 0, 1, 1))])
    assert await metastore.rows(TOPICS) is first
    await other.commit([TOPICS.encode(TopicRow("b", "2", 1))])
    second = await metastore.rows(TOPICS)
    assert [row.name for row in second] == ["a", "b"] and [row.name for row in first] == ["a"]
    await other.commit([(TOPICS.key("a"), b"")])
    assert [row.name for row in await metastore.rows(TOPICS)] == ["b"]


async def test_a_closed_metastore_says_so_and_opens_no_domain(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    metastore = Metastore(consensus, opener([Shared()]), clock, rand)
    await metastore.start()
    await metastore.aclose()
    await metastore.aclose()
    with pytest.raises(ClosedError):
        await metastore.rows(TOPICS)


async def test_a_metastore_that_could_not_be_opened_is_opened_by_the_next_use(
    consensus: MemoryConsensus, clock: ManualClock, rand: Rand
) -> None:
    metastore = Metastore(consensus, opener([Shared()]), clock, rand, domains=2)
    with pytest.raises(IndexError):
        await metastore.start()
    metastore._open_domain = opener([Shared(), Shared()])
    assert await metastore.rows(TOPICS) == []
