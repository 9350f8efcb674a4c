"""Writing topics back into empty consensus, from rows (RFC 0002 §6). Every step may be repeated by the same attempt.

topic/<id>/<partition>   [nothing happened, rollup], truncated to the rollup: a log that begins where a state is
topics/producer-ids      the first id of this incarnation: none that was ever handed out comes again
cluster/nodes            node ids by name
cluster/epoch-base       above every epoch that names an object of the bucket
"""

from __future__ import annotations

import contextlib

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import Consensus, resolve_cas
from tidemill.objects.store import ObjectStore
from tidemill.topics.membership import EPOCH_BASE_REGISTER, NODES_REGISTER
from tidemill.topics.partition.codec import encode_command
from tidemill.topics.partition.commands import PlaceBatches
from tidemill.topics.partition.recovery import partition_log
from tidemill.topics.partition.rollup import write_rollup
from tidemill.topics.partition.state import PartitionState
from tidemill.topics.produce.producer_ids import REGISTER as PRODUCER_IDS_REGISTER

TERMS_APART = 1000
"""Leader epochs of the old cluster's lost tail are never met again, so Kafka clients see where it was cut."""

PRODUCER_IDS_BITS = 40
"""Each incarnation hands out ids of its own: [incarnation << 40, …). Those of captures lie far above."""


async def restore_partition(
    consensus: Consensus,
    objects: ObjectStore,
    rand: Rand,
    topic_id: str,
    partition: int,
    state: PartitionState,
    attempt: str,
) -> None:
    """Make the partition's log begin with `state`, whose `applied` is set. Raises InvalidError when it has a log
    already."""
    log = partition_log(topic_id, partition)
    head = await consensus.log_head(log)
    if head.next == 0:
        state.applied = 1
        rollup = await write_rollup(objects, state, topic_id, partition, rand.nonce())
        if rollup is None:
            raise UnavailableError(f"the bucket takes no objects: log={log}.", fix="Check it with: tidemill doctor")
        filler = encode_command(PlaceBatches(state.last_at_ms, (), ()))
        term = max((term for term, _ in state.terms), default=0) + TERMS_APART
        while head.next == 0:
            with contextlib.suppress(
                UnknownOutcomeError, ConflictError
            ):  # the nonce of what stands there tells, if anything does
                await consensus.append(log, term, 0, [filler, encode_command(rollup)], attempt)
            head = await consensus.log_head(log)
    found = await consensus.read(log, head.start, limit_records=1)
    if not found.records or found.records[0].nonce != attempt:
        raise InvalidError(
            f"a partition has a log already: log={log} next={head.next}.", fix="Restore into empty consensus."
        )
    if head.start == 0:
        await consensus.truncate(log, 1)


async def restore_registers(
    consensus: Consensus, objects: ObjectStore, rand: Rand, *, incarnation: int, node_ids: dict[str, int]
) -> None:
    """The cluster's counters: nothing that was ever named by them is named again."""
    first_id = incarnation << PRODUCER_IDS_BITS
    await _write_once(consensus, rand, PRODUCER_IDS_REGISTER, str(first_id).encode())
    await _write_once(consensus, rand, EPOCH_BASE_REGISTER, str(await newest_epoch(objects) + 1).encode())
    await _write_once(consensus, rand, NODES_REGISTER, msgspec.msgpack.encode(node_ids))


async def newest_epoch(objects: ObjectStore) -> int:
    """The greatest epoch that names an L0 object; 0 when there is none. A few listings, whatever the bucket holds."""

    async def epoch_from(epoch: int) -> int:
        async for found in objects.list("l0/", start_after=f"l0/{epoch:020d}"):
            epoch_text = found.key.removeprefix("l0/").partition("/")[0]
            if epoch_text.isdigit():  # what somebody else put there is none of ours
                return int(epoch_text)
        return -1

    low = await epoch_from(0)
    if low < 0:
        return 0
    step = 1
    while (found := await epoch_from(low + step)) >= 0:
        low, step = found, step * 2
    high = low + step  # nothing at or above it
    while low + 1 < high:
        middle = (low + high) // 2
        found = await epoch_from(middle)
        low, high = (found, high) if found >= 0 else (low, middle)
    return low


async def _write_once(consensus: Consensus, rand: Rand, key: str, data: bytes) -> None:
    """An earlier run of the attempt, or nobody, has written it."""
    nonce = rand.nonce()
    try:
        await consensus.cas(key, 0, data, nonce)
    except ConflictError:
        return
    except UnknownOutcomeError:
        if await resolve_cas(consensus, key, 0, nonce) is None:
            await _write_once(consensus, rand, key, data)
