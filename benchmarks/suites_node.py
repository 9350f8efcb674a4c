"""The node for the clients' own suites: `tidemill up` on a separate directory, configured like the brokers that the
suites start: broker id 0, short sessions of groups, ACLs enabled; and topics in L1, early.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

import paths  # noqa: F401
from support.ports import free_port
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.topics.membership import NODES_REGISTER

AS_KAFKA: Final = "4.1.0"
"""The release of Kafka that the suites take the node for."""
START_S: Final = 90.0


class Outcome(NamedTuple):
    test: str
    verdict: str
    """passed, failed or skipped"""
    why: str = ""


class NotHere(Exception):
    """A dependency of the suite that is neither on this machine nor in the registry; the sentence names it."""


@contextmanager
def node(scratch: Path, rules: Sequence[str] = (), *, port: int = 0, partitions: int = 4) -> Iterator[str]:
    """A running node; host:port of its Kafka endpoint. Its log is `node.log` in `scratch`, which it makes.

    `rules`: resources with which everybody may do everything; without them every client is a super user.
    `port`: of its Kafka endpoint, free if 0. `partitions`: of a topic that is created by its first use.
    """
    kafka = f"127.0.0.1:{port or free_port()}"
    url = f"sqlite://{scratch}/data/consensus.db"
    config = scratch / "tidemill.toml"
    (scratch / "data").mkdir(parents=True)
    config.write_text(
        f'[node]\nname = "suite"\nkafka = "{kafka}"\nhttp = "127.0.0.1:{free_port()}"\ndata = "{scratch}/data"\n'
        f'[consensus]\nurl = "{url}"\n'
        "[storage]\nl1 = true\nl1_min_s = 1\nl1_max_s = 5\n"
        f"[kafka]\ndefault_partitions = {partitions}\n"
        "group_initial_rebalance_delay_ms = 0\ngroup_min_session_timeout_ms = 1000\n"
        f"[security]\nauthorize = true\nsuper_users = {[] if rules else ['User:ANONYMOUS']}\n"
    )
    asyncio.run(_be_broker_0(url))
    for resource in rules:
        add = ["acl", "add", "User:*", "all", resource, "--config", str(config)]
        subprocess.run([sys.executable, "-m", "tidemill", *add], cwd=scratch, check=True, capture_output=True)
    with (scratch / "node.log").open("wb") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "tidemill", "up", "--config", str(config)], cwd=scratch, stdout=log, stderr=log
        )
        try:
            _await(kafka, running, scratch / "node.log")
            yield kafka
        finally:
            running.terminate()
            running.wait(60)


async def _be_broker_0(url: str) -> None:
    consensus = await open_consensus(url, SystemClock(), Rand())
    await consensus.cas(NODES_REGISTER, 0, msgspec.msgpack.encode({"suite": 0}), Rand().nonce())
    await consensus.aclose()


def _await(address: str, running: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_S
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    while True:
        if running.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"the node did not start: {log.read_text(errors='replace')[-2000:]}")
        try:
            admin.list_topics(timeout=2)
        except KafkaException:
            time.sleep(0.2)
        else:
            return
