"""Threads that check batches: senders take turns, and no caller waits for a closed checker."""

from __future__ import annotations

import asyncio
import threading

import pytest

from support.topics.world import batch
from tidemill.base.errors import ClosedError, TidemillError
from tidemill.topics.batch.validation import check_header
from tidemill.topics.produce.validator_pool import THREADS, BatchValidator, ValidatedBatch


async def test_who_sends_thousands_of_dear_batches_delays_another_sender_by_one() -> None:
    checker = BatchValidator()
    gate = threading.Event()
    done: list[str] = []

    async def work(sender: str, number: int) -> None:
        await checker.run_in_thread(sender, gate.wait if number == 0 else lambda: None)
        done.append(sender)

    hostile = [asyncio.create_task(work("hostile", n if n >= THREADS else 0)) for n in range(500)]
    await asyncio.sleep(0)
    honest = asyncio.create_task(work("honest", 1))
    await asyncio.sleep(0)
    gate.set()
    await honest
    assert done.count("hostile") <= 2 * THREADS
    await asyncio.gather(*hostile)
    checker.close()


async def test_a_compressed_batch_is_answered_on_the_loop_and_a_closed_checker_takes_none() -> None:
    checker = BatchValidator()
    data = batch("a", compression="zstd")
    heard: asyncio.Future[ValidatedBatch | TidemillError] = asyncio.get_running_loop().create_future()
    checker.validate(check_header(data), data, 1, heard.set_result)
    assert not heard.done(), "never in the plain call"
    assert await heard == ValidatedBatch(1000)
    checker.close()
    with pytest.raises(ClosedError):
        checker.validate(check_header(data), data, 1, heard.set_result)
