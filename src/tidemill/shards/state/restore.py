"""Write shards and bindings back into empty consensus (RFC 0002 §6). The same attempt may repeat every step.

    shard/<new id>        [creation, rollup…], truncated to the rollup
    stream-write/<id>/…   the mark that registers of streaming queries are lost
    shard/<name>          the register: the creation with the new id
    remap/<source>        the bindings, one record each, from position 0

A restored shard has a new id: a reader that mirrored the old one may have seen lost rows, and starts again. Its parts
stay under their keys, which the batches contain in full. Tokens that name the input of a shard get the input's new id:
a restore is no reason to take the input for another table of its name.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from uuid import UUID

from msgspec.structs import replace

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, InvalidError, UnknownOutcomeError
from tidemill.consensus.api import Consensus
from tidemill.consensus.state_log import replica
from tidemill.shards.bindings.remap import remap_log_name
from tidemill.shards.state.codec import encode_command, encode_state
from tidemill.shards.state.commands import REGISTER_PREFIX, Create
from tidemill.shards.state.state import ShardState, input_of_token
from tidemill.shards.state.state_machine import shard_log_name
from tidemill.shards.state.stream_registers import mark_restored

BINDINGS_PER_APPEND = 1000


def restored_shard_id(shard_id: str, attempt: str) -> str:
    """Return the shard's id after the restore `attempt`, the same in every run of it."""
    return str(UUID(bytes=hashlib.blake2b(f"{shard_id}/{attempt}".encode(), digest_size=16).digest(), version=4))


async def restore_shard(consensus: Consensus, rand: Rand, state: ShardState, attempt: str) -> str:
    """Restore a shard; return the new id. Raises InvalidError if the name has a shard of another attempt."""
    shard_id = restored_shard_id(state.shard_id, attempt)
    # A hold's epoch is the term of a lease in the old consensus; in an empty one it would fence every future owner.
    holds = tuple(replace(hold, epoch=0) for hold in state.holds)
    writers = tuple(replace(writer, token=_restored_token(writer.token, attempt)) for writer in state.writers)
    state = replace(state, shard_id=shard_id, holds=holds, writers=writers)
    create = encode_command(Create(state.name, shard_id, state.schema))
    log = shard_log_name(shard_id)
    head = await consensus.log_head(log)
    if head.next == 0:
        records = [replica.encode_command(create), *replica.encode_rollup(encode_state(state))]
        while head.next == 0:
            with contextlib.suppress(UnknownOutcomeError, ConflictError):  # the nonce in the log decides
                await consensus.append(log, 0, 0, records, attempt)
            head = await consensus.log_head(log)
    await _check_attempt(consensus, log, head.start, attempt)
    if head.start == 0:
        await consensus.truncate(log, 1)
    await mark_restored(consensus, shard_id, rand.nonce())
    # The register last: before it exists, no process can find the log.
    key = REGISTER_PREFIX + state.name
    found = await consensus.head(key)
    while found is None:
        with contextlib.suppress(ConflictError, UnknownOutcomeError):
            await consensus.cas(key, 0, create, rand.nonce())
        found = await consensus.head(key)
    if found.data != create:
        raise InvalidError(f"a table of this name exists: table={state.name}.", fix="Restore into empty consensus.")
    return shard_id


def _restored_token(token: str, attempt: str) -> str:
    found = input_of_token(token)
    return token.replace(found, restored_shard_id(found, attempt), 1) if found else token


async def restore_bindings(consensus: Consensus, source: str, bindings: Sequence[bytes], attempt: str) -> None:
    """Restore `bindings` as they were in the log, oldest first.

    Continues where an earlier run of the attempt stopped.
    """
    log = remap_log_name(source)
    at = (await consensus.log_head(log)).next
    if at:
        await _check_attempt(consensus, log, at - 1, attempt)
    while at < len(bindings):
        records = list(bindings[at : at + BINDINGS_PER_APPEND])
        with contextlib.suppress(UnknownOutcomeError, ConflictError):  # the end of the log decides
            await consensus.append(log, 0, at, records, attempt)
        reached = (await consensus.log_head(log)).next
        if reached not in (at, at + len(records)):
            raise InvalidError(
                f"another process writes these bindings: log={log} next={reached}.", fix="Stop every node."
            )
        at = reached


async def _check_attempt(consensus: Consensus, log: str, position: int, attempt: str) -> None:
    found = await consensus.read(log, position, limit_records=1)
    if not found.records or found.records[0].nonce != attempt:
        raise InvalidError(f"the log exists already: log={log}.", fix="Restore into empty consensus.")
