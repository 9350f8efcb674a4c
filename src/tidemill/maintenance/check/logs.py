"""Check of the logs in consensus, for the deep check: whether every partition and every shard can be opened.

A partition's log begins with records, or with a rollup whose object must exist. A shard's log is replayed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.base.errors import CorruptError, MissingError
from tidemill.consensus.api import Consensus
from tidemill.metastore.check.findings import Findings
from tidemill.metastore.rows.catalogue import TopicRow
from tidemill.objects.store import ObjectStore
from tidemill.shards.registry import list_created_shards
from tidemill.shards.state.state_machine import shard_replica
from tidemill.topics.partition.recovery import partition_log
from tidemill.topics.partition.state_machine.codec import decode_command, decode_state
from tidemill.topics.partition.state_machine.commands import Rollup

FIX = "Stop the nodes and restore the cluster from its bucket into empty consensus."


async def check_logs(
    consensus: Consensus, objects: ObjectStore, topics: Iterable[TopicRow], findings: Findings
) -> None:
    """Check all logs. Raises UnavailableError; everything else is a finding."""
    for topic in topics:
        for partition in range(topic.partitions):
            findings.progress("logs", findings.walked["logs"], 0)
            await _check_partition(consensus, objects, partition_log(topic.topic_id, partition), findings)
            findings.walked["logs"] += 1
    for create in await list_created_shards(consensus):
        replica = shard_replica(consensus, create.shard_id)
        try:
            await replica.catch_up()
        except CorruptError as error:
            findings.add(f"table {create.name}", f"log {replica.log}", error.message.rstrip("."), error.fix or FIX)
        findings.walked["logs"] += 1


async def _check_partition(consensus: Consensus, objects: ObjectStore, log: str, findings: Findings) -> None:
    """Check one partition's log. A rollup that is replaced during the check is checked again."""
    start = -1
    while True:
        head = await consensus.log_head(log)
        if head.start in (0, start):
            break
        start = head.start
        try:
            found = await consensus.read(log, start, limit_records=1)
            command = decode_command(found.records[0].data) if found.records else None
            if not isinstance(command, Rollup):
                findings.add(f"log {log}", "", f"it begins at {start} without a rollup", FIX)
                return
            decode_state(await objects.get(command.object_key), command.object_key)
        except MissingError as error:
            if (await consensus.log_head(log)).start == start:
                findings.add(f"log {log}", "its rollup", error.message.rstrip("."), FIX)
                return
        except CorruptError as error:
            findings.add(f"log {log}", "its rollup", error.message.rstrip("."), FIX)
            return
