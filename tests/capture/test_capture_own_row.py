"""The capture's row belongs to the session that claimed it last: writes of an earlier session change nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from support.capture.world import World
from support.waiting import until
from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import UnavailableError
from tidemill.capture.capture_row import FencedCaptureRow
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.catalogue import CaptureRow, Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.objects.memory import MemoryObjects

ROW = CaptureRow("shop", "7", "slot", "publication", 1, True, taps=("file of the first",))


@asynccontextmanager
async def new_catalogue() -> AsyncIterator[Catalogue]:
    clock, rand = SystemClock(), Rand(1)
    metastore = create_metastore(MemoryConsensus(ManualClock()), MemoryObjects(clock), clock, rand)
    yield Catalogue(metastore, clock, rand)
    await metastore.aclose()


def named(*taps: str) -> Callable[[CaptureRow], CaptureRow]:
    return lambda found: replace(found, taps=taps)


async def taken_over(catalogue: Catalogue) -> None:
    """Claim the row by a session of another process, which stores its own taps."""
    heir = FencedCaptureRow(catalogue, "shop")
    await heir.read()
    await heir.claim()
    await heir.update(named("file of the heir"))


async def test_a_session_that_was_frozen_before_it_named_its_taps_does_not_replace_the_names_of_its_successor() -> None:
    async with new_catalogue() as catalogue:
        await catalogue.put(ROW)
        frozen = FencedCaptureRow(catalogue, "shop")
        await frozen.read()
        await frozen.claim()
        await taken_over(catalogue)
        with pytest.raises(UnavailableError, match="another session has taken this capture over"):
            await frozen.update(named("file of the frozen"))
        with pytest.raises(UnavailableError):
            await frozen.replace_row(ROW)
        row = await catalogue.get(CaptureRow, "shop")
        assert row is not None and row.taps == ("file of the heir",)


async def test_a_session_that_was_frozen_between_its_look_and_its_claim_has_lost() -> None:
    async with new_catalogue() as catalogue:
        await catalogue.put(ROW)
        frozen = FencedCaptureRow(catalogue, "shop")
        await frozen.read()
        await taken_over(catalogue)
        with pytest.raises(UnavailableError):
            await frozen.claim()
        row = await frozen.read()
        assert row is not None and row.taps == ("file of the heir",)
        assert (await frozen.claim()).epoch == row.epoch + 1, "who looks again claims it from then on"


async def test_of_two_first_sessions_one_begins_and_a_dropped_capture_is_not_brought_back() -> None:
    async with new_catalogue() as catalogue:
        first, second = FencedCaptureRow(catalogue, "shop"), FencedCaptureRow(catalogue, "shop")
        assert await first.read() is None and await second.read() is None
        await first.replace_row(ROW)
        with pytest.raises(UnavailableError):
            await second.replace_row(replace(ROW, generation=9))
        assert (await first.update(named("a"))).generation == 1
        await catalogue.delete(CaptureRow, "shop")
        with pytest.raises(UnavailableError):
            await first.update(named("b"))
        assert await catalogue.get(CaptureRow, "shop") is None


@pytest.mark.postgres
async def test_a_session_whose_row_was_claimed_names_nobody_and_the_next_one_claims_it_back(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE a (id int PRIMARY KEY)")
        async with world.capture() as capture:
            session = capture._session
            assert session is not None
            before = await world.row()
            await session.store_tap_names()
            heir = FencedCaptureRow(world.catalogue, world.name)
            await heir.read()
            await heir.claim()
            await heir.update(named("file of the heir"))
            with pytest.raises(UnavailableError, match="another session"):
                await session.store_tap_names()
            assert (await world.row()).taps == ("file of the heir",)
            await world.sql(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                f" WHERE slot_name = 'tidemill_{world.name}'"
            )
            await until(lambda: capture._session is not session and capture.streaming, "the next session streams")
            row = await world.row()
            assert row.taps == () and row.epoch == before.epoch + 2
