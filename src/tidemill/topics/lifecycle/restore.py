"""Write topics into empty consensus, from rows (RFC 0002 §6). The same attempt may repeat every step.

topic/<id>/<partition>   [no-op, rollup], truncated to the rollup: the log begins with the state
topics/producer-ids      the first id of this incarnation: ids that were allocated before are never allocated again
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
from tidemill.topics.partition.recovery import partition_log
from tidemill.topics.partition.rollup import write_rollup
from tidemill.topics.partition.state_machine.codec import encode_command
from tidemill.topics.partition.state_machine.commands import PlaceBatches
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.produce.producer_ids import REGISTER as PRODUCER_IDS_REGISTER

TERM_GAP = 1000
"""Distance of the new leader epochs from the old ones. The epochs of the old cluster's lost tail are never reused, so
Kafka clients detect where it was truncated."""

PRODUCER_IDS_BITS = 40
"""Bits of the ids of one incarnation, which allocates [incarnation << 40, …). The ids of captures are far above."""


async def restore_partition(
    consensus: Consensus,
    objects: ObjectStore,
    rand: Rand,
    topic_id: str,
    partition: int,
    state: PartitionState,
    attempt: str,
) -> None:
    """Make the partition's log begin with `state`, and set its `applied`.

    Raises InvalidError if it already has a log.
    """
    log = partition_log(topic_id, partition)
    head = await consensus.log_head(log)
    if head.next == 0:
        state.applied = 1
        rollup = await write_rollup(objects, state, topic_id, partition, rand.nonce())
        if rollup is None:
            raise UnavailableError(
                f"the bucket does not accept objects: log={log}.", fix="Check it with: tidemill doctor"
            )
        filler = encode_command(PlaceBatches(state.last_at_ms, (), ()))
        term = max((term for term, _ in state.terms), default=0) + TERM_GAP
        while head.next == 0:
            with contextlib.suppress(
                UnknownOutcomeError, ConflictError
            ):  # The nonce of the first record shows whether it is ours.
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
    """Restore the cluster's counters, so that ids that they have produced are not produced again."""
    first_id = incarnation << PRODUCER_IDS_BITS
    await _write_once(consensus, rand, PRODUCER_IDS_REGISTER, str(first_id).encode())
    await _write_once(consensus, rand, EPOCH_BASE_REGISTER, str(await newest_epoch(objects) + 1).encode())
    await _write_once(consensus, rand, NODES_REGISTER, msgspec.msgpack.encode(node_ids))


async def newest_epoch(objects: ObjectStore) -> int:
    """Return the greatest epoch that names an L0 object, or 0. Takes few listings, however large the bucket."""

    async def epoch_from(epoch: int) -> int:
        async for found in objects.list("l0/", start_after=f"l0/{epoch:020d}"):
            epoch_text = found.key.removeprefix("l0/").partition("/")[0]
            if epoch_text.isdigit():  # An object of another owner is ignored.
                return int(epoch_text)
        return -1

    low = await epoch_from(0)
    if low < 0:
        return 0
    step = 1
    while (found := await epoch_from(low + step)) >= 0:
        low, step = found, step * 2
    high = low + step  # No epoch is at or above it.
    while low + 1 < high:
        middle = (low + high) // 2
        found = await epoch_from(middle)
        low, high = (found, high) if found >= 0 else (low, middle)
    return low


async def _write_once(consensus: Consensus, rand: Rand, key: str, data: bytes) -> None:
    """Write the register unless it exists: then an earlier run of this attempt has written it."""
    nonce = rand.nonce()
    try:
        await consensus.cas(key, 0, data, nonce)
    except ConflictError:
        return
    except UnknownOutcomeError:
        if await resolve_cas(consensus, key, 0, nonce) is None:
            await _write_once(consensus, rand, key, data)
