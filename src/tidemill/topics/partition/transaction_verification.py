"""Decide which transactions may begin in a partition (KIP-890), in one term of its leader.

    first batch ─► permit issued ─► coordinator asked ─► batch placed, unless its permit is void
                        a marker of its producer decided ─┘ └─ void: the batch is too late, and is refused

Invariant (no hanging transaction): an open leader issues the permit before it asks the coordinator, and a marker
revokes it. So no batch follows the marker of its transaction, and no transaction hangs.

Invariant (marker ends what was seen): in version 1, transactions of one epoch follow each other, and a deposed
coordinator may send a marker late, when the next coordinator has ended its transaction and the producer has begun
another. So a coordinator first reads the open transaction here, then the register, and then ends exactly that
transaction. A transaction that was not open before the register still read "prepared" may be the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.base.runtime.tasks import Tasks, error_sentence, is_own_fault_of_await
from tidemill.topics.api import ConfirmTransaction, InvalidTransactionError, ProduceTransaction, TransactionSnapshot
from tidemill.topics.batch.header import BatchHeader
from tidemill.topics.partition.recovery import partition_log
from tidemill.topics.partition.state_machine.transactions import OpenTransaction

_log = structlog.get_logger()


async def reject_without_coordinator(within: ProduceTransaction, *_: object) -> None:
    name = within.transactional_id
    raise InvalidTransactionError(f"this process has no transaction coordinator: transactional_id={name!r}.")


class Permit:
    """Permission of one producer and epoch to begin a transaction.

    `answer` completes when the coordinator has confirmed, or fails with its refusal.
    """

    __slots__ = ("answer", "epoch", "void")

    def __init__(self, epoch: int, answer: asyncio.Future[None]) -> None:
        self.epoch = epoch
        self.answer = answer
        self.void = False


def transaction_snapshot(opened: OpenTransaction | None, granted: Permit | None) -> TransactionSnapshot:
    return (opened.first_offset if opened is not None else -1, granted)


class TransactionVerification:
    """Permits of one partition by producer id."""

    def __init__(self) -> None:
        self._permits: dict[int, Permit] = {}

    def __len__(self) -> int:
        return len(self._permits)

    def find(self, producer_id: int, epoch: int) -> Permit | None:
        found = self._permits.get(producer_id)
        return found if found is not None and found.epoch == epoch else None

    def find_granted(self, producer_id: int) -> Permit | None:
        found = self._permits.get(producer_id)
        return found if found is not None and found.answer.done() else None

    def issue(self, producer_id: int, epoch: int, answer: asyncio.Future[None]) -> Permit:
        permit = Permit(epoch, answer)
        self._permits[producer_id] = permit
        return permit

    def drop_refused(self, producer_id: int, permit: Permit) -> None:
        """Drop the permit, so that the next batch asks again."""
        if self._permits.get(producer_id) is permit:
            del self._permits[producer_id]

    def revoke(self, producer_id: int, below: int) -> None:
        """Revoke the producer's permit if its epoch is below `below`, as a marker requires."""
        found = self._permits.get(producer_id)
        if found is not None and found.epoch < below:
            del self._permits[producer_id]
            found.void = True


class PermitRequests:
    """Asks the coordinator for the permits of one partition, during the upload of the batches."""

    def __init__(
        self, permits: TransactionVerification, tasks: Tasks, confirm: ConfirmTransaction, topic_id: str, partition: int
    ) -> None:
        self._permits = permits
        self._tasks = tasks
        self._confirm_there = confirm
        self._topic_id = topic_id
        self._partition = partition
        self._log_name = partition_log(topic_id, partition)

    def request(
        self, header: BatchHeader, within: ProduceTransaction, transactions: Mapping[int, OpenTransaction]
    ) -> Permit | None:
        """Return the permit of a batch, or None if its transaction is open. Asks once for all in-flight batches of the
        producer."""
        producer_id, epoch = header.producer_id, header.producer_epoch
        opened = transactions.get(producer_id)
        if opened is not None and opened.epoch == epoch:
            return None
        permit = self._permits.find(producer_id, epoch)
        if permit is None:
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            permit = self._permits.issue(producer_id, epoch, answer)
            asking = self._confirm(permit, within, producer_id)
            self._tasks.spawn(asking, name=f"confirm {self._log_name}")
        return permit

    async def _confirm(self, permit: Permit, within: ProduceTransaction, producer_id: int) -> None:
        error: TidemillError
        try:
            await self._confirm_there(within, producer_id, permit.epoch, self._topic_id, self._partition)
            permit.answer.set_result(None)
            return
        except TidemillError as refusal:
            error = refusal
        except BaseException as fault:
            error = UnavailableError(f"the coordinator was not asked: producer_id={producer_id} cause={fault!r}.")
            if not is_own_fault_of_await(fault):
                self._deny_permit(permit, producer_id, error)
                raise
            _log.error(
                "a transaction was not confirmed", log=self._log_name, error=error_sentence(fault), exc_info=fault
            )
        self._deny_permit(permit, producer_id, error)

    def _deny_permit(self, permit: Permit, producer_id: int, error: TidemillError) -> None:
        self._permits.drop_refused(producer_id, permit)
        permit.answer.set_exception(error)
        permit.answer.exception()  # Mark the exception as retrieved: the waiters may be gone.
