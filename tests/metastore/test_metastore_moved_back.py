"""A domain whose log was reset to an earlier state, while the bucket was not."""

from __future__ import annotations

from copy import deepcopy

import pytest

from support.metastore.domain_world import DomainWorld, rows_of
from tidemill.base.errors import StoreRolledBackError
from tidemill.metastore.domain.replicated_manifest import ANY_EPOCH
from tidemill.metastore.domain.settings import prefix_of
from tidemill.metastore.lsm.manifest_store import BucketManifests

KEY, LOST, LATER = b"\x01kept", b"\x01lost", b"\x01later"
STATE = ("registers", "heads", "records", "leases")


async def test_a_leader_after_lost_terms_leads_in_a_term_above_all_that_the_bucket_holds_of_them() -> None:
    """Otherwise a restore would pick the newest manifest of the lost history."""
    async with DomainWorld() as world:
        first = await world.node()
        await first.commit([(KEY, b"1")])
        await first.flush()
        uuid = first.domain_uuid
        await first.aclose()
        standby = deepcopy({name: getattr(world.memory, name) for name in STATE})
        second = await world.node()
        for number in range(3):
            await second.commit([(LOST, b"%d" % number)])
            await second.flush()
        lost_term = second.term
        for name in STATE:
            setattr(world.memory, name, standby[name])
        with pytest.raises(StoreRolledBackError):
            await second.sync()
        third = await world.node()
        assert third.term > lost_term
        assert await rows_of(third) == {KEY: b"1"}
        await third.commit([(LATER, b"2")])
        await third.flush()
        newest = await BucketManifests(world.objects(), prefix_of(uuid), world.rand).newest(ANY_EPOCH)
        assert newest is not None
        assert third.state.manifest is not None
        assert (newest.epoch, newest.number) == (third.state.manifest.epoch, third.state.manifest.number)
        assert await rows_of(third) == {KEY: b"1", LATER: b"2"}
