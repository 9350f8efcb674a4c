"""A metastore reopens a domain that failed permanently, without a restart of the process."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from support.metastore.domain_world import DomainWorld
from support.waiting import until
from tidemill.base.errors import CorruptError, TidemillError
from tidemill.metastore.api import DomainRows
from tidemill.metastore.cluster import Cluster
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.metastore import Metastore

KEY, VALUE = b"\x01topic\x00\x01", b"row"


async def metastore_of(world: DomainWorld, opened: list[Domain]) -> Metastore:
    consensus = await world.client()

    async def open_domain(cluster: Cluster, index: int) -> DomainRows:
        domain = await world.node(consensus=consensus)
        opened.append(domain)
        return domain

    return Metastore(consensus, open_domain, world.clock, world.rand)


async def until_well(metastore: Metastore) -> None:
    await until(lambda: not metastore.trouble())


async def test_f506_a_state_log_that_broke_in_memory_is_replayed_by_a_domain_opened_anew() -> None:
    async with DomainWorld() as world:
        opened: list[Domain] = []
        metastore = await metastore_of(world, opened)
        await metastore.commit([(KEY, VALUE)])
        assert metastore.trouble() == ""
        opened[0]._log._fail_corrupt("planted: what this process holds can no longer be trusted")
        async with asyncio.timeout(30):
            while len(opened) == 1:
                if metastore.trouble():
                    with pytest.raises(TidemillError):
                        await metastore.get_row(KEY)
                await asyncio.sleep(0.01)
        await until_well(metastore)
        row = await metastore.get_row(KEY)
        assert row is not None and row.value == VALUE
        await metastore.commit([(KEY, b"later")])
        await metastore.aclose()


async def test_f506_a_damaged_record_is_trouble_until_it_is_mended_and_no_longer() -> None:
    async with DomainWorld() as world:
        opened: list[Domain] = []
        metastore = await metastore_of(world, opened)
        await metastore.commit([(KEY, VALUE)])
        log = opened[0]._context.log
        records = world.memory.records[log]
        sound = list(records)
        head = await (await world.client()).log_head(log)
        await (await world.client()).append(log, head.term, head.next, [b"\x7fdamaged"], "foreign")
        with pytest.raises(TidemillError):
            await metastore.get_row(KEY)
        await until(lambda: "kind" in metastore.trouble())
        with pytest.raises(CorruptError):
            await metastore.get_row(KEY)
        # Repair the record as an operator would: replace it by a repetition of an earlier one.
        damaged = world.memory.records[log][-1]
        world.memory.records[log][-1] = msgspec.structs.replace(damaged, data=sound[-1].data)
        await until_well(metastore)
        row = await metastore.get_row(KEY)
        assert row is not None and row.value == VALUE
        await metastore.aclose()


async def test_f506_a_task_of_a_domain_that_meets_any_fault_ends_with_its_domain() -> None:
    async with DomainWorld() as world:
        opened: list[Domain] = []
        metastore = await metastore_of(world, opened)
        await metastore.commit([(KEY, VALUE)])

        async def bug() -> None:
            raise ZeroDivisionError("a bug")

        opened[0]._tasks.spawn(bug(), name="planted")
        await until(lambda: len(opened) != 1)
        await until_well(metastore)
        assert (await metastore.get_row(KEY)) is not None
        await metastore.aclose()
