"""Steps before a deletion: the users of a topic, batches that may still be placed, the log of a deleted topic."""

from __future__ import annotations

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import UnavailableError
from tidemill.consensus.api import Consensus
from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow
from tidemill.objects.store import ObjectStore
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.partition.appender import Appender, LeadershipLostError
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.state_machine.codec import encode_command
from tidemill.topics.partition.state_machine.commands import Advance
from tidemill.topics.partition.state_machine.state import PartitionState


async def find_topic_users(catalogue: Catalogue, topic: TopicRow) -> list[str]:
    """List the users by name: `capture:<name>` if the topic is one of its tables, `pipeline:<name>` if it reads the
    topic.

    Raises UnavailableError.
    """
    tables = [table for table in await catalogue.all_tables() if table.topic == topic.name]
    found = sorted({f"capture:{table.capture}" for table in tables})
    sources = {f"topic:{topic.name}", *(f"capture:{table.capture}:{table.table}" for table in tables)}
    for pipeline in await catalogue.list(PipelineRow):
        if sources & set(pipeline.tables.values()):
            found.append(f"pipeline:{pipeline.name}")
    return sorted(found)


NO_WRITER = ""
"""Name of a writer without objects."""


async def settle_partition(
    consensus: Consensus, objects: ObjectStore, clock: Clock, rand: Rand, topic_id: str, partition: int
) -> None:
    """Append an Advance in a new term: batches that another writer has made so far and not placed can never be placed.

    A leader steps down and opens the partition again; its clients retry. Raises UnavailableError, CorruptError.
    """
    log = partition_log(topic_id, partition)
    appender = Appender(consensus, log, clock, rand, TopicSettings())
    await appender.fence()
    state, _ = await catch_up(consensus, objects, log, PartitionState())
    command = Advance(max(clock.now_ms(), state.last_at_ms), state.log_start, NO_WRITER, 0)
    try:
        await appender.append(state.applied, encode_command(command))
    except LeadershipLostError as stop:
        raise UnavailableError(f"a partition was not settled: log={log} cause={stop.reason}", fix="Retry.") from stop


async def truncate_deleted_log(consensus: Consensus, topic_id: str, partition: int) -> None:
    """Truncate the log of a deleted topic's partition. Its head (some 100 bytes) remains and fences late writers.

    Raises UnavailableError, UnknownOutcomeError, FencedError: call again.
    """
    log = partition_log(topic_id, partition)
    head = await consensus.log_head(log)
    if head.start < head.next:
        head = await consensus.fence(log, head.term + 1)
        await consensus.truncate(log, head.next)
