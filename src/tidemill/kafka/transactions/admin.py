"""Operator actions on a transaction, for any process that has access to consensus."""

from __future__ import annotations

import asyncio

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, MissingError
from tidemill.consensus.api import Consensus
from tidemill.kafka import error_codes
from tidemill.kafka.transactions import transitions
from tidemill.kafka.transactions.hints import send
from tidemill.kafka.transactions.state import State, Transaction
from tidemill.kafka.transactions.store import change, read
from tidemill.topics.membership import LEASE_PREFIX

POLL_S = 0.1


async def abort(consensus: Consensus, clock: Clock, rand: Rand, transactional_id: str, *, wait_s: float) -> Transaction:
    """Abort an open transaction and fence its producer. Wait at most `wait_s` until the nodes have completed the abort.

    Raises MissingError for an unknown id, ConflictError if no transaction is open, UnavailableError.
    """
    decision, found = await change(
        consensus, rand, transactional_id, lambda before: transitions.abort(before, clock.now_ms())
    )
    if decision.code == error_codes.TRANSACTIONAL_ID_NOT_FOUND or found is None:
        raise MissingError(
            f"no such transactional id: id={transactional_id!r}.", fix="List them with: tidemill txn list"
        )
    if decision.code:
        raise ConflictError(
            f"no transaction is open: id={transactional_id!r} state={found.state.kafka_name}.", current=None
        )
    for lease in await consensus.leases(LEASE_PREFIX):
        if lease.live:
            await send(consensus, rand, lease.name.removeprefix(LEASE_PREFIX), transactional_id)
    until_s = clock.monotonic_s() + wait_s
    while found.state is State.PREPARE_ABORT and clock.monotonic_s() < until_s:
        await asyncio.sleep(POLL_S)
        found = await read(consensus, transactional_id) or found
    return found
