"""Coordinator of transactions: changes registers, enforces timeouts and completes prepared transactions.

    end ─► prepared, durable ─► a marker in every partition ─► its offsets to every group ─► complete
                                     └─ not led here: its leader is notified (`hints`), and the marker retried ─┘

The node that stores a transaction as open supervises it until it ends; a node that finds one prepared completes it. The
next coordinator finds the transactions of a dead node by a scan of the registers, at start and whenever nodes join or
leave.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import NamedTuple
from weakref import WeakValueDictionary

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, TidemillError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Backoff, Tasks, error_sentence, is_own_fault_of_await
from tidemill.consensus.api import Consensus
from tidemill.kafka import error_codes
from tidemill.kafka.transactions import transitions
from tidemill.kafka.transactions.completion import TransactionCompletion
from tidemill.kafka.transactions.state import Offsets, Places, State, Transaction, key_of
from tidemill.kafka.transactions.store import (
    Decide,
    add_to_index,
    change,
    drop_group_offsets,
    prune_index,
    read,
    read_all,
    undecided,
)
from tidemill.kafka.transactions.transitions import Decision
from tidemill.topics.api import (
    ConcurrentTransactionsError,
    InvalidProducerEpochError,
    InvalidTransactionError,
    ProduceTransaction,
)
from tidemill.topics.produce.producer_ids import ProducerIds

log = structlog.get_logger()

ANSWER_WAIT_S = 5.0
"""Time after which EndTxn is answered even if the decided transaction is not complete yet: the client's next request
then gets a retriable code.
"""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class TransactionLimits(NamedTuple):
    timeout_max_ms: int
    expires_ms: int
    """Time after which a transactional id without a transaction expires."""


class TransactionCoordinator:
    """Coordinator of transactional ids.

    `coordinates`: whether this node coordinates the transactional id in its current view.
    """

    def __init__(
        self,
        consensus: Consensus,
        completion: TransactionCompletion,
        producer_ids: ProducerIds,
        clock: Clock,
        rand: Rand,
        *,
        coordinates: Callable[[str], bool],
        limits: TransactionLimits,
    ) -> None:
        self.completion = completion
        self._consensus = consensus
        self._producer_ids = producer_ids
        self._clock = clock
        self._rand = rand
        self._coordinates = coordinates
        self._timeout_max_ms = limits.timeout_max_ms
        self._expires_ms = limits.expires_ms
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Lock of each id, under which its register is read or changed, and then supervised."""
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks = Tasks(self._task_failed)
        self._written: dict[tuple[str, int, int], Counter[tuple[str, int]]] = {}
        """Partitions that are about to be added, by producer identity."""
        self._closed = False

    async def aclose(self) -> None:
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await self._tasks.aclose()

    # requests: each gives a Kafka code ------------------------------------------------------------
    async def init(
        self, transactional_id: str, *, timeout_ms: int, producer_id: int = -1, epoch: int = -1
    ) -> tuple[int, int, int]:
        """Assign a producer identity; return (code, producer id, epoch)."""
        if not 0 < timeout_ms <= self._timeout_max_ms:
            return error_codes.INVALID_TRANSACTION_TIMEOUT, -1, -1
        fresh_id = await self._producer_ids.allocate()

        def first(found: Transaction | None) -> Decision:
            now_ms = self._clock.now_ms()
            return transitions.init(
                found, fresh_id=fresh_id, timeout_ms=timeout_ms, producer_id=producer_id, epoch=epoch, now_ms=now_ms
            )

        decision, after = await self._change(transactional_id, first)
        if decision.code == error_codes.CONCURRENT_TRANSACTIONS:
            # The transaction that this request fenced or found prepared ends first; the client retries if that takes
            # long.
            await self._await_end(transactional_id)
            found = await self.read(transactional_id)
            if found is not None and not found.state.prepared:
                decision, after = await self._change(transactional_id, first)
        if decision.code or after is None:
            return decision.code or error_codes.COORDINATOR_NOT_AVAILABLE, -1, -1
        return 0, after.producer_id, after.epoch

    async def add_group(self, transactional_id: str, producer_id: int, epoch: int, group: str) -> int:
        await add_to_index(self._consensus, self._rand, group, transactional_id)
        return await self.add(transactional_id, producer_id, epoch, groups=(group,))

    async def add(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        *,
        partitions: Places | None = None,
        groups: Sequence[str] = (),
    ) -> int:
        def more(found: Transaction | None) -> Decision:
            now_ms = self._clock.now_ms()
            return transitions.add(found, producer_id, epoch, partitions=partitions, groups=groups, now_ms=now_ms)

        return (await self._change(transactional_id, more))[0].code

    async def commit_offsets(
        self, transactional_id: str, producer_id: int, epoch: int, group: str, offsets: Offsets, *, adds: bool = False
    ) -> int:
        """Store offsets in the transaction. Raises InvalidError if the transaction becomes too large."""
        if adds:
            await add_to_index(self._consensus, self._rand, group, transactional_id)

        def add_offsets(found: Transaction | None) -> Decision:
            now_ms = self._clock.now_ms()
            return transitions.commit_offsets(found, producer_id, epoch, group, offsets, adds=adds, now_ms=now_ms)

        return (await self._change(transactional_id, add_offsets))[0].code

    async def end(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> int:
        def over(found: Transaction | None) -> Decision:
            return transitions.end(found, producer_id, epoch, commit=commit, now_ms=self._clock.now_ms())

        decision, _ = await self._change(transactional_id, over)
        if not decision.code:
            await self._await_end(transactional_id)
        return decision.code

    async def end_bumping(
        self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool
    ) -> tuple[int, int, int]:
        """End the transaction; return (code, producer id, epoch), with the producer's next identity (KIP-890)."""
        fresh_id = -1

        def over(found: Transaction | None) -> Decision:
            now_ms = self._clock.now_ms()
            return transitions.end_bumping(found, producer_id, epoch, commit=commit, fresh_id=fresh_id, now_ms=now_ms)

        decision, after = await self._change(transactional_id, over)
        if decision.code == transitions.NEEDS_ID:
            fresh_id = await self._producer_ids.allocate()
            decision, after = await self._change(transactional_id, over)
        if decision.code or after is None:
            return decision.code or error_codes.COORDINATOR_NOT_AVAILABLE, -1, -1
        await self._await_end(transactional_id)
        return 0, *after.identity

    async def confirm(
        self, within: ProduceTransaction, producer_id: int, epoch: int, topic_id: str, partition: int
    ) -> None:
        """Confirm that a batch may be written: the `topics.api.ConfirmTransaction` of this coordinator."""
        if within.adds:
            code = await self._add_written((within.transactional_id, producer_id, epoch), topic_id, partition)
        else:
            found = await self.read(within.transactional_id)
            code = transitions.verify(found, producer_id, epoch, topic_id, partition).code
        facts = f"transactional_id={within.transactional_id!r} producer_id={producer_id} epoch={epoch}"
        if code == error_codes.PRODUCER_FENCED:
            raise InvalidProducerEpochError(f"a newer producer uses this transactional id: {facts}.")
        if code == error_codes.CONCURRENT_TRANSACTIONS:
            raise ConcurrentTransactionsError(f"the previous transaction is still ending: {facts}.", fix="Retry.")
        if code:
            raise InvalidTransactionError(f"not in an open transaction: {facts} partition={topic_id}/{partition}.")

    async def _add_written(self, identity: tuple[str, int, int], topic_id: str, partition: int) -> int:
        """Add a partition to which a batch is being written.

        The call that has its turn adds the partitions of all waiting calls.
        """
        waiting = self._written.setdefault(identity, Counter())
        waiting[topic_id, partition] += 1

        def more(found: Transaction | None) -> Decision:
            places: dict[str, tuple[int, ...]] = {}
            for topic, index in waiting:
                places[topic] = (*places.get(topic, ()), index)
            return transitions.add(found, *identity[1:], partitions=places, now_ms=self._clock.now_ms())

        try:
            return (await self._change(identity[0], more))[0].code
        finally:
            waiting[topic_id, partition] -= 1
            waiting += Counter()  # remove zero counts
            if not waiting:
                self._written.pop(identity, None)

    # reading --------------------------------------------------------------------------------------
    async def read(self, transactional_id: str) -> Transaction | None:
        return await read(self._consensus, transactional_id)

    async def undecided(self, group: str) -> set[tuple[str, int]]:
        """Return (topic id, partition) of the group's offsets that a transaction may still commit (KIP-447)."""
        return await undecided(self._consensus, group)

    async def all(self) -> dict[str, Transaction]:
        """Return the transactions of all nodes. Unreadable ones are left out and logged."""
        return {transactional_id: found for transactional_id, (_, found) in (await read_all(self._consensus)).items()}

    # changing -------------------------------------------------------------------------------------
    async def _change(self, transactional_id: str, decide_on: Decide) -> tuple[Decision, Transaction | None]:
        """Change a register (`store.change`). Requests for one id do not race within this process."""
        async with self._locks.setdefault(transactional_id, asyncio.Lock()):
            decision, after = await change(self._consensus, self._rand, transactional_id, decide_on)
            self._supervise(transactional_id, after)
            return decision, after

    async def drop_group_offsets(self, group: str, places: Set[tuple[str, int]] | None = None) -> None:
        """Remove the offsets of a group, all or these (topic id, partition), from transactions, so that they are never
        committed.

        Raises UnavailableError, UnknownOutcomeError.
        """
        await drop_group_offsets(self._consensus, self._rand, group, places, self._clock.now_ms())

    async def delete_offsets(
        self, group: str, places: Set[tuple[str, int]], delete: Callable[[], Awaitable[int]]
    ) -> int:
        """Delete offsets without a concurrent commit. Raises UnavailableError, UnknownOutcomeError."""
        async with self.completion.groups.exclusive(group):
            await self.drop_group_offsets(group, places)
            return await delete()

    # looking after --------------------------------------------------------------------------------
    async def take_over(self) -> None:
        """Supervise all transactions that this node coordinates, and delete expired ids. Raises UnavailableError."""
        forgotten_ms = self._clock.now_ms() - self._expires_ms
        found = await read_all(self._consensus)
        await prune_index(self._consensus, self._rand, self._clock.now_ms())
        for transactional_id, (seq, transaction) in found.items():
            if not self._coordinates(transactional_id):
                continue
            if transaction.started_ms < 0 and transaction.updated_ms < forgotten_ms:
                # A failure means that the id is used again, or is deleted the next time.
                with contextlib.suppress(ConflictError, UnknownOutcomeError):
                    await self._consensus.drop(key_of(transactional_id), seq)
                continue
            if transactional_id in self._timers:
                # It may have been opened here after the scan, which must not stop its timer.
                await self.check(transactional_id)
            else:
                self._supervise(transactional_id, transaction)

    async def check(self, transactional_id: str) -> None:
        """Supervise a transaction that another process changed. Raises UnavailableError."""
        async with self._locks.setdefault(transactional_id, asyncio.Lock()):
            self._supervise(transactional_id, await self.read(transactional_id))

    def _supervise(self, transactional_id: str, found: Transaction | None) -> None:
        if self._closed:
            return
        timer = self._timers.pop(transactional_id, None)
        if timer is not None:
            timer.cancel()
        if found is None:
            return
        if found.state is State.ONGOING:
            self._set_timer(transactional_id, max(0, found.due_ms - self._clock.now_ms()) / 1000)
        elif found.state.prepared and transactional_id not in self._ending:
            ending = self._tasks.spawn(self._complete(transactional_id), name=transactional_id)
            self._ending[transactional_id] = ending

    def _set_timer(self, transactional_id: str, delay_s: float) -> None:
        def timeout_due() -> None:
            del self._timers[transactional_id]
            self._tasks.spawn(self._expire(transactional_id), name=transactional_id)

        self._timers[transactional_id] = asyncio.get_running_loop().call_later(delay_s, timeout_due)

    async def _expire(self, transactional_id: str) -> None:
        try:
            await self._change(transactional_id, lambda found: transitions.expire(found, self._clock.now_ms()))
        except TidemillError as error:
            log.warning("transaction.not_expired", id=transactional_id, cause=str(error))
            if transactional_id not in self._timers:
                self._set_timer(transactional_id, LONGEST_PAUSE_S)

    async def _await_end(self, transactional_id: str) -> None:
        ending = self._ending.get(transactional_id)
        if ending is not None:
            await asyncio.wait([ending], timeout=ANSWER_WAIT_S)

    async def _complete(self, transactional_id: str) -> None:
        """Retry until the transaction is complete, whichever node completes it."""
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while not self._closed:
                try:
                    if await self._try_complete(transactional_id):
                        return
                except BaseException as error:
                    if not is_own_fault_of_await(error):
                        raise
                    log.warning("transaction.waits", id=transactional_id, cause=error_sentence(error))
                await asyncio.sleep(pauses.pause_s(0.0))
        finally:
            del self._ending[transactional_id]

    async def _try_complete(self, transactional_id: str) -> bool:
        """Try once to do everything that is left. Return whether the transaction is complete."""
        seen = await self.read(transactional_id)
        if seen is None or not seen.state.prepared:
            return True
        written = await self.completion.write(transactional_id, seen)
        if written is None:
            found = await self.read(transactional_id)
            return found is None or not found.state.prepared
        _, after = await self._change(
            transactional_id,
            lambda found: transitions.record_progress(
                found, seen, written.marked, written.groups, self._clock.now_ms()
            ),
        )
        return after is None or not after.state.prepared

    def _task_failed(self, transactional_id: str, error: BaseException) -> None:
        log.error("transaction.task_broke", id=transactional_id, error=error_sentence(error), exc_info=error)
