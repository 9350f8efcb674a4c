"""One domain between two nodes: the table *Replicated database* of the acceptance list, on real stores.

Names in brackets are rows of that table.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from support.metastore.domain_world import FOLLOWS, LEADS, DomainWorld, rows_of
from support.metastore.domain_world import world as world
from support.metastore.lsm_world import Gate, Watched
from support.waiting import DEADLINE_S, until
from tidemill.base.errors import ConflictError, FencedError, InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.metastore.domain import replicated_manifest
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext, prefix_of
from tidemill.metastore.domain.state import DomainState
from tidemill.metastore.lsm.manifest import Manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests


@pytest.fixture
def emptied(request: pytest.FixtureRequest, tmp_path: Path, world: DomainWorld) -> DomainWorld:
    """Return the remains of `world` after its consensus is lost: its bucket, with an empty engine of the same kind."""
    sqlite = world._url.startswith("sqlite")
    left = DomainWorld(f"sqlite://{tmp_path}/emptied.db" if sqlite else request.getfixturevalue("new_database")())
    left.objects = world.objects  # type: ignore[method-assign]
    return left


def volatile_rows(domain: Domain) -> dict[bytes, bytes]:
    """Return the rows that the replicated state holds in addition to its manifest, as of this node's replica."""
    return {
        key: value
        for batch in domain.state.volatile
        for key, value in zip(batch.keys, batch.values, strict=True)
        if key >= b"\x01"
    }


async def test_every_node_sees_the_same_uuid(world: DomainWorld) -> None:
    """[same uuid everywhere]"""
    async with world:
        leader, follower = await world.node(), await world.node(FOLLOWS)
        await follower.sync()
        assert leader.domain_uuid and leader.domain_uuid == follower.domain_uuid
        uuid = leader.domain_uuid
        await leader.aclose()
        again = await world.node()
        assert again.domain_uuid == uuid and again.term > 1


async def test_a_new_leader_sees_what_the_old_one_wrote(world: DomainWorld) -> None:
    """[new leader sees old writes]"""
    async with world:
        old, follower = await world.node(), await world.node(FOLLOWS)
        seqnos = [await old.commit([(b"k%d" % i, b"v%d" % i)]) for i in range(5)]
        assert seqnos == sorted(set(seqnos))
        await world.depose(old)
        new = await world.node()
        assert new.term > old.term
        assert await rows_of(new) == {b"k%d" % i: b"v%d" % i for i in range(5)}
        row = await new.get_row(b"k4")
        assert row is not None and row.seqno == seqnos[4]
        assert await new.commit([(b"k5", b"v5")]) > seqnos[-1]
        await follower.sync()
        for node in (new, follower):  # nothing was flushed: every replica has the rows of both terms
            assert volatile_rows(node) == {b"k%d" % i: b"v%d" % i for i in range(6)}


async def test_a_flush_empties_the_buffers_and_its_rows_survive_a_failover(world: DomainWorld) -> None:
    """[flush empties buffers and survives failover]"""
    async with world:
        old, follower = await world.node(), await world.node(FOLLOWS)
        last = 0
        for i in range(5):
            last = await old.commit([(b"k%d" % i, b"v%d" % i)])
        assert len(old.state.volatile) > 0
        assert await old.flush(20) == last
        assert not old.state.volatile and old.state.volatile_bytes == 0
        await follower.sync()
        assert not follower.state.volatile and follower.state.persisted_seqno == last
        assert await rows_of(follower) == {b"k%d" % i: b"v%d" % i for i in range(5)}
        await old.commit([(b"k5", b"v5")])
        await follower.sync()
        assert volatile_rows(old) == volatile_rows(follower) == {b"k5": b"v5"}
        await old.aclose()
        new = await world.node()
        assert await rows_of(new) == {b"k%d" % i: b"v%d" % i for i in range(6)}
        assert volatile_rows(new) == {b"k5": b"v5"}


async def test_a_flush_of_nothing_writes_nothing(world: DomainWorld) -> None:
    """[empty flush no-op]"""
    async with world:
        leader = await world.node()
        before = leader.state.manifest
        assert await leader.flush(20) == 0
        assert leader.state.manifest is before is None
        last = await leader.commit([(b"a", b"1")])
        assert await leader.flush(20) == last
        manifest = leader.state.manifest
        assert await leader.flush(20) == last and leader.state.manifest is manifest


async def test_a_reset_domain_reopens_with_the_rows_of_the_manifest(world: DomainWorld, emptied: DomainWorld) -> None:
    """[reset then reopen reads restored rows]"""
    async with world, emptied:
        for _ in range(3):
            await (await world.node()).aclose()  # so that its terms are beyond those of the emptied engine
        first = await world.node()
        last = 0
        for i in range(10):
            last = await first.commit([(b"k%d" % i, b"v%d" % i)])
        await first.flush(20)
        uuid, epoch = first.domain_uuid, first.state.epoch(first.term)
        await first.aclose()

        restored = await emptied.node()
        assert restored.domain_uuid != uuid
        bucket = BucketManifests(world.objects(), prefix_of(uuid), world.rand)
        manifest = await bucket.read(10**19)
        assert manifest is not None and manifest.last_seqno == last
        await restored.reset(uuid, manifest)
        assert restored.domain_uuid == uuid and not restored.state.volatile and restored.state.seqno_delta > 0
        assert restored._leader is not None
        database = restored._leader.database
        assert (database.max_persisted_seqno, database.max_applied_seqno) == (last, last)
        assert await rows_of(restored) == {b"k%d" % i: b"v%d" % i for i in range(10)}
        assert restored.state.epoch(restored.term) > epoch
        assert await restored.commit([(b"new", b"row")]) > last
        assert volatile_rows(restored) == {b"new": b"row"}
        await restored.flush(20)
        await restored.aclose()
        again = await emptied.node()
        assert (await rows_of(again))[b"new"] == b"row" and len(await rows_of(again)) == 11


async def test_after_a_reset_with_nothing_the_old_opening_writes_no_more_and_the_reopened_one_does(
    world: DomainWorld,
) -> None:
    """[reset with nothing: old handle's writes fail, reopened works]"""
    async with world:
        domain = await world.node()
        old = domain._leader
        assert old is not None
        await domain.reset("00000000-0000-4000-8000-000000000000", None)
        with pytest.raises(FencedError):
            await old.writing.commit([(b"a", b"1")])
        assert old.has_ended and not domain.state.volatile
        assert domain.domain_uuid == "00000000-0000-4000-8000-000000000000"
        assert await domain.commit([(b"a", b"2")]) > 0
        assert await rows_of(domain) == {b"a": b"2"}


async def test_a_reset_is_done_though_another_node_leads_after_it(world: DomainWorld) -> None:
    """UnavailableError would claim that the reset did not happen."""
    async with world:
        domain = await world.node()
        eager = await Domain.open(
            DomainContext(
                await world.client(),
                world.objects(),
                "main",
                holder="eager",
                clock=world.clock,
                rand=world.rand,
                settings=replace(LEADS, lease_ttl_ms=90),
            )
        )
        try:
            await domain.reset("00000000-0000-4000-8000-000000000000", None, timeout_s=1.0)
            assert domain.domain_uuid == "00000000-0000-4000-8000-000000000000"
            assert await domain.commit([(b"a", b"1")]) > 0 and await rows_of(domain) == {b"a": b"1"}
        finally:
            await eager.aclose()


async def test_a_reset_whose_manifest_cannot_be_opened_is_told_as_unknown(
    world: DomainWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world:
        domain = await world.node()
        uuid = "00000000-0000-4000-8000-000000000000"

        def newer(state: DomainState, domain_uuid: str, max_epoch: int) -> Manifest | None:
            raise InvalidError("the manifest was written by a newer version of tidemill: format=9 supported=1.")

        monkeypatch.setattr(replicated_manifest, "read_manifest", newer)
        with pytest.raises(
            UnknownOutcomeError, match=r"was reset but could not be opened: .* cause='the manifest was written"
        ):
            await domain.reset(uuid, None, timeout_s=0.5)
        monkeypatch.undo()
        await domain.wait_until_leading(20)
        assert domain.domain_uuid == uuid and await domain.commit([(b"a", b"1")]) > 0


async def test_a_domain_with_rows_is_not_reset_before_or_after_a_flush(world: DomainWorld) -> None:
    """[reset on non-empty fails before and after flush]"""
    async with world:
        domain = await world.node()
        uuid, term = domain.domain_uuid, domain.term
        await domain.commit([(b"a", b"1")])
        offered = Manifest("another", 999, 1, 100, 1, 0, ((),))
        for manifest in (None, offered):
            with pytest.raises(ConflictError, match="not empty"):
                await domain.reset("another", manifest)
        await domain.flush(20)
        for manifest in (None, offered):
            with pytest.raises(ConflictError, match="not empty"):
                await domain.reset("another", manifest)
        assert (domain.domain_uuid, domain.term) == (uuid, term) and await rows_of(domain) == {b"a": b"1"}


async def test_a_flush_after_the_term_is_over_fails_and_does_not_hang(world: DomainWorld) -> None:
    """[flush after step-down fails without hanging]"""
    async with world:
        old = await world.node()
        await old.commit([(b"a", b"1")])
        leader = old._leader
        assert leader is not None
        await world.depose(old)
        new = await world.node()
        with pytest.raises(FencedError):  # it does not know yet: it learns from the log when it replicates the manifest
            await leader.flush(20)
        with pytest.raises(FencedError):
            await leader.flush(20)
        assert new.leading and await rows_of(new) == {b"a": b"1"}


async def test_a_flush_under_way_ends_with_the_term_though_the_bucket_never_answers(world: DomainWorld) -> None:
    """[flush after step-down fails without hanging], with a flush that began before the step-down."""
    async with world:
        bucket = Watched(world.objects())
        old = await world.node(objects=bucket)
        await old.commit([(b"a", b"1")])
        gate = bucket.before_put = Gate("/sst/")
        flushing = asyncio.ensure_future(old.flush())
        await until(lambda: gate.waiting > 0)
        await world.depose(old)
        new = await world.node()
        await old.sync()  # it learns of the new term from the log
        with pytest.raises(FencedError):
            async with asyncio.timeout(60):
                await flushing
        assert not gate.open.is_set() and new.leading and await rows_of(new) == {b"a": b"1"}
        assert await new.flush(20) > 0 and await rows_of(new) == {b"a": b"1"}


async def test_five_concurrent_commits_all_land(world: DomainWorld) -> None:
    """[5 concurrent writes]"""
    async with world:
        leader, follower = await world.node(), await world.node(FOLLOWS)
        seqnos = await asyncio.gather(*[leader.commit([(b"k%d" % i, b"v"), (b"same", b"%d" % i)]) for i in range(5)])
        assert sorted(set(seqnos)) == sorted(seqnos)  # they share a key, so none shares a seqno
        rows = await rows_of(leader)
        assert rows == {**{b"k%d" % i: b"v" for i in range(5)}, b"same": b"4"}
        assert await rows_of(follower) == rows


async def test_tombstones_are_replayed_as_deletions(world: DomainWorld) -> None:
    """[tombstones replay as deletes]"""
    async with world:
        old = await world.node()
        await old.commit([(b"flushed", b"1"), (b"kept", b"1")])
        await old.flush(20)
        await old.commit([(b"volatile", b"1")])
        await old.commit([(b"flushed", b""), (b"volatile", b"")])
        await old.aclose()
        new = await world.node()
        assert await rows_of(new) == {b"kept": b"1"}
        assert await new.get(b"flushed") is None and await new.get_row(b"volatile") is None


async def test_flushes_and_commits_interleave(world: DomainWorld) -> None:
    """[flush and write interleave]"""
    async with world:
        old = await world.node()
        expected = {}
        for round_ in range(4):
            flushing = asyncio.ensure_future(old.flush(20))
            for i in range(20):
                expected[b"k%d" % (i + round_)] = b"%d" % round_
                await old.commit([(b"k%d" % (i + round_), b"%d" % round_)])
            await flushing
        assert await rows_of(old) == expected
        await old.aclose()
        new = await world.node()
        assert await rows_of(new) == expected


async def test_a_deposed_leader_serves_nothing_old_after_a_sync_and_commits_nothing(world: DomainWorld) -> None:
    async with world:
        old = await world.node()
        await old.commit([(b"a", b"old")])
        await world.depose(old)
        new = await world.node()
        await new.commit([(b"a", b"new")])
        assert old.leading  # it has not heard yet
        await old.sync()
        assert not old.leading and await old.get(b"a") == b"new"


async def test_a_commit_of_a_deposed_leader_is_fenced_and_nothing_of_it_is_ever_seen(world: DomainWorld) -> None:
    async with world:
        old = await world.node()
        await world.depose(old)
        new = await world.node()
        with pytest.raises(FencedError):
            await old.commit([(b"a", b"old")])
        await until(lambda: not old.leading)
        await new.commit([(b"b", b"new")])
        assert await rows_of(new) == await rows_of(old) == {b"b": b"new"}


async def test_followers_read_over_flush_compaction_and_trimmed_batches(world: DomainWorld) -> None:
    async with world:
        leader = await world.node()
        follower = await world.node(FOLLOWS)
        expected = {}
        for i in range(6):
            expected[b"k%d" % i] = b"v%d" % i
            await leader.commit([(b"k%d" % i, b"v%d" % i)])
            await leader.flush(20)  # trimmed before the follower looked
        assert await rows_of(follower) == expected
        late = await world.node(FOLLOWS)
        assert await rows_of(late) == expected
        assert leader._leader is not None
        await leader._leader.database.background.compact()
        await follower.sync()
        manifest = follower.state.manifest
        assert manifest is not None and await rows_of(follower) == expected


async def test_a_domain_that_nobody_ever_led_is_empty_and_says_so(world: DomainWorld) -> None:
    async with world:
        follower = await world.node(FOLLOWS)
        await follower.sync()
        assert follower.domain_uuid == "" and not follower.leading
        assert await rows_of(follower) == {} and await follower.get(b"a") is None
        assert await follower.get_many([b"a", b"b"]) == [None, None]
        with pytest.raises(UnavailableError, match="does not lead"):
            await follower.wait_until_leading(0.01)


async def test_the_log_is_rolled_up_after_a_manifest_and_new_nodes_start_from_there(world: DomainWorld) -> None:
    async with world:
        leader = await world.node(replace(LEADS, rollup_after_records=5))
        client = await world.client()
        for i in range(20):
            await leader.commit([(b"k%d" % i, b"v")])
        await leader.flush(20)
        await leader.commit([(b"after", b"v")])
        async with asyncio.timeout(DEADLINE_S):
            while (await client.log_head("metastore/main")).start == 0:
                await asyncio.sleep(0.01)
        assert len(await rows_of(await world.node(FOLLOWS))) == 21
        seqno = await leader.commit([(b"later", b"v")])
        await leader.aclose()
        new = await world.node()
        assert len(await rows_of(new)) == 22 and await new.commit([(b"more", b"v")]) > seqno
