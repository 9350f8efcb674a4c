"""Registers of transactional ids, changed by compare-and-set, and the index of the ids that a group was added to.

Any process that has access to consensus may read and change them; `abort` is an operator's.

register   kafka/transaction-groups/<group, percent-encoded>    msgpack array of the fields of `GroupTransactionIds`

The index finds the undecided offsets of a group without a scan of all transactions. An id is added to it before its
transaction contains the group. An id whose transaction does not contain the group is removed in two steps with a long
pause: if it is added again in between, the register changes and the second step fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Set
from typing import Final
from urllib.parse import quote, unquote

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, MissingError, TidemillError, UnknownOutcomeError
from tidemill.consensus.api import Consensus, Versioned, resolve_cas
from tidemill.kafka import error_codes
from tidemill.kafka.transactions import transitions
from tidemill.kafka.transactions.hints import send
from tidemill.kafka.transactions.state import PREFIX, State, Transaction, decode, encode, id_of, key_of
from tidemill.kafka.transactions.transitions import Decision
from tidemill.topics.membership import LEASE_PREFIX

GROUPS_PREFIX: Final = "kafka/transaction-groups/"
LEAVE_MS: Final = 600_000
POLL_S: Final = 0.1


class GroupTransactionIds(msgspec.Struct, frozen=True, array_like=True):
    """Transactional ids whose transaction may contain a group, sorted.

    `leaving` are ids whose transaction did not contain it, with the time (ms) when that was found.
    """

    ids: list[str] = []
    leaving: dict[str, int] = {}


Decide = Callable[[Transaction | None], Decision]

log = structlog.get_logger()

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GroupTransactionIds)


async def read(consensus: Consensus, transactional_id: str) -> Transaction | None:
    found = await consensus.head(key_of(transactional_id))
    return decode(found.data, transactional_id) if found is not None else None


async def change(
    consensus: Consensus, rand: Rand, transactional_id: str, decide_on: Decide
) -> tuple[Decision, Transaction | None]:
    """Decide and store a change; return the decision and the transaction after it.

    Raises UnavailableError, UnknownOutcomeError, InvalidError (too large), CorruptError.
    """
    key = key_of(transactional_id)
    while True:
        version = await consensus.head(key)
        found = decode(version.data, transactional_id) if version is not None else None
        decision = decide_on(found)
        if decision.next is None:
            return decision, found
        if await _store(consensus, rand, key, version, encode(decision.next)):
            return decision, decision.next


async def _store(consensus: Consensus, rand: Rand, key: str, version: Versioned | None, data: bytes) -> bool:
    """Return whether the value was stored. False after a conflict, or if it certainly was not stored."""
    seq, nonce = version.seq if version is not None else 0, rand.nonce()
    try:
        await consensus.cas(key, seq, data, nonce)
    except ConflictError:
        return False
    except UnknownOutcomeError:
        return await resolve_cas(consensus, key, seq, nonce) is not None
    return True


async def read_all(consensus: Consensus) -> dict[str, tuple[int, Transaction]]:
    """Return transactional id → version and content of its register. Unreadable ones are left out and logged."""
    found: dict[str, tuple[int, Transaction]] = {}
    for key, version in await consensus.scan(PREFIX):
        transactional_id = id_of(key)
        try:
            transaction = decode(version.data, transactional_id)
        except TidemillError as error:
            log.error("transaction.unreadable", id=transactional_id, error=str(error))
            continue
        if transaction is not None:
            found[transactional_id] = (version.seq, transaction)
    return found


async def abort(consensus: Consensus, clock: Clock, rand: Rand, transactional_id: str, *, wait_s: float) -> Transaction:
    """Abort an open transaction and fence its producer. Wait at most `wait_s` until the nodes have completed the abort.

    Raises MissingError for an unknown id, ConflictError if no transaction is open, UnavailableError.
    """
    decision, found = await change(
        consensus, rand, transactional_id, lambda before: transitions.abort(before, clock.now_ms())
    )
    found = _require_aborted(decision, found, transactional_id)
    for lease in await consensus.leases(LEASE_PREFIX):
        if lease.live:
            await send(consensus, rand, lease.name.removeprefix(LEASE_PREFIX), transactional_id)
    until_s = clock.monotonic_s() + wait_s
    while found.state is State.PREPARE_ABORT and clock.monotonic_s() < until_s:
        await asyncio.sleep(POLL_S)
        found = await read(consensus, transactional_id) or found
    return found


async def read_abortable(consensus: Consensus, clock: Clock, transactional_id: str) -> Transaction:
    """Return the transaction that `abort` would abort now. Raises the same errors, and changes nothing."""
    found = await read(consensus, transactional_id)
    return _require_aborted(transitions.abort(found, clock.now_ms()), found, transactional_id)


def _require_aborted(decision: transitions.Decision, found: Transaction | None, transactional_id: str) -> Transaction:
    if decision.code == error_codes.TRANSACTIONAL_ID_NOT_FOUND or found is None:
        raise MissingError(
            f"no such transactional id: id={transactional_id!r}.", fix="List them with: tidemill txn list"
        )
    if decision.code:
        raise ConflictError(
            f"no transaction is open: id={transactional_id!r} state={found.state.kafka_name}.", current=None
        )
    return found


# groups -------------------------------------------------------------------------------------------
async def add_to_index(consensus: Consensus, rand: Rand, group: str, transactional_id: str) -> None:
    """Add the id to the group's index: one read if it is there already."""
    key = GROUPS_PREFIX + quote(group, safe="")
    while True:
        version = await consensus.head(key)
        named = _decoder.decode(version.data) if version is not None else GroupTransactionIds()
        if transactional_id in named.ids:
            return
        leaving = {each: since_ms for each, since_ms in named.leaving.items() if each != transactional_id}
        more = GroupTransactionIds(sorted([*named.ids, transactional_id]), leaving)
        if await _store(consensus, rand, key, version, _encoder.encode(more)):
            return


async def drop_group_offsets(
    consensus: Consensus, rand: Rand, group: str, places: Set[tuple[str, int]] | None, now_ms: int
) -> None:
    """Apply `transitions.drop_group_offsets` to every transaction that may contain the group.

    Raises UnavailableError, UnknownOutcomeError.
    """
    for transactional_id in await _indexed_ids(consensus, group):
        await change(
            consensus,
            rand,
            transactional_id,
            lambda found: transitions.drop_group_offsets(found, group, places, now_ms),
        )


async def _indexed_ids(consensus: Consensus, group: str) -> tuple[str, ...]:
    version = await consensus.head(GROUPS_PREFIX + quote(group, safe=""))
    named = _decoder.decode(version.data) if version is not None else GroupTransactionIds()
    return (*named.ids, *named.leaving)


async def undecided(consensus: Consensus, group: str) -> set[tuple[str, int]]:
    """Return (topic id, partition) of the group's offsets that an open or prepared transaction may still commit."""
    found: set[tuple[str, int]] = set()
    for transactional_id in await _indexed_ids(consensus, group):
        transaction = await read(consensus, transactional_id)
        if transaction is not None and transaction.state in (State.ONGOING, State.PREPARE_COMMIT):
            offsets = transaction.offsets.get(group, {})
            found |= {(topic_id, partition) for topic_id, partitions in offsets.items() for partition in partitions}
    return found


async def prune_index(consensus: Consensus, rand: Rand, now_ms: int) -> None:
    """Take one step of removal for each id whose transaction does not contain the group. Raises UnavailableError."""
    groups = await consensus.scan(GROUPS_PREFIX)
    # Read after the index, so that no transaction is missed that contained its group when the index was read.
    known = await read_all(consensus) if groups else {}
    for key, version in groups:
        group, named = unquote(key.removeprefix(GROUPS_PREFIX)), _decoder.decode(version.data)
        held = {each for each in (*named.ids, *named.leaving) if each in known and group in known[each][1].offsets}
        left = {each: named.leaving.get(each, now_ms) for each in (*named.ids, *named.leaving) if each not in held}
        kept = GroupTransactionIds(
            sorted(held), {each: since_ms for each, since_ms in left.items() if now_ms - since_ms < LEAVE_MS}
        )
        if kept == named:
            continue
        with contextlib.suppress(ConflictError, UnknownOutcomeError):  # changed concurrently: retried the next time
            if kept != GroupTransactionIds():
                await consensus.cas(key, version.seq, _encoder.encode(kept), rand.nonce())
            else:
                await consensus.drop(key, version.seq)
