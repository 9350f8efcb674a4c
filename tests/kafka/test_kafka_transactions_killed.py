"""SIGKILL of the node between the decision about a transaction and its completion."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from support.kafka.processes import Process
from support.kafka.transactions import DEADLINE_S, producer, shown
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.kafka.transactions.state import State
from tidemill.kafka.transactions.store import read


async def killed_when_prepared(directory: Path, ending: threading.Thread, process: Process) -> None:
    """Kill the process while the transaction is prepared but not complete."""
    consensus = await open_consensus(f"sqlite://{directory}/consensus.db", SystemClock(), Rand())
    try:
        ending.start()
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = await read(consensus, "tx")
                if found is not None and found.state.prepared:
                    process.kill()
                    return
                assert found is None or found.state is State.ONGOING
                await asyncio.sleep(0.01)
    finally:
        await consensus.aclose()


@pytest.mark.parametrize("commit", [True, False])
def test_a_node_that_is_killed_after_the_decision_carries_it_out_when_it_is_back(tmp_path: Path, commit: bool) -> None:
    # Uploads wait for more records, so a marker is in flight for seconds.
    process = Process(tmp_path, "topics.linger_s=3.0", "kafka.default_partitions=2")
    try:
        client = producer(process.address, "tx")
        client.begin_transaction()
        for partition in range(2):
            client.produce("t", b"v%d" % partition, partition=partition)
        client.flush(DEADLINE_S)
        ending = threading.Thread(
            target=client.commit_transaction if commit else client.abort_transaction, args=(DEADLINE_S,)
        )
        asyncio.run(killed_when_prepared(tmp_path, ending, process))
        process = Process(tmp_path, port=process.port)
        ending.join(DEADLINE_S)
        assert not ending.is_alive()
        assert shown(process.address, "t", 2) == ([b"v0", b"v1"] if commit else [])
        client.begin_transaction()
        client.produce("t", b"next", partition=0)
        client.commit_transaction(DEADLINE_S)
        assert b"next" in shown(process.address, "t", 2)
    finally:
        process.kill()
