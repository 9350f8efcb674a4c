"""Evaluates changes for one table shape: an inbox of changes, from which it makes log items. Synchronous, in slices.

Changes are evaluated as they arrive, also before the snapshot of the initial rows is known. Until then transactions
wait as items. `set_snapshot` sets the snapshot; `publish_waiting` discards what the snapshot had seen, and stages the
rest.

- Invariant (whole transactions): items are staged in the log immediately, and become visible together at their commit.
  A delivery that begins the same transaction again discards what an interrupted one left.
- Invariant (batches): the transactions of a batch are evaluated together, and become visible and wake the readers at
  once, as long as each is translated without a failure or a question to PostgreSQL. Otherwise the rest of the batch is
  divided into its transactions, which are evaluated one by one.
- Invariant (end if not followable): a shape ends at the commit of a change that cannot be followed
  (change_translator.py), and its clients refetch. A filter that fails on a row also ends the shape, and its clients get
  400. If PostgreSQL can be queried, the filter fails only if PostgreSQL also fails (remote_evaluation.py).
- Invariant (monotonic progress): `floor` never decreases, and never passes a transaction whose effect is not in the
  log.
- Invariant (restored logs): a log from disk has whole transactions up to its end, and repeated ones are skipped. It
  does not record later transactions that changed nothing; these are evaluated again, with the same result.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError
from tidemill.base.runtime.tasks import is_fault
from tidemill.capture.changes import Change, Relation, Row
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes.live_shape import LiveShape, unexpected_failure
from tidemill.shapes.log.items import LogItem
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import Turn
from tidemill.shapes.memory_budget import OverBudgetError
from tidemill.shapes.tables.backlog import InboxEntry, Transaction, TransactionBatch
from tidemill.shapes.tables.change_translator import ChangeTranslator, row_failure_error
from tidemill.shapes.tables.initial_snapshot import SnapshotFilter
from tidemill.shapes.tables.remote_evaluation import EvaluationRequest, Verdict
from tidemill.shapes.where import Equality, EvaluationError, Where

QUANTUM_S = 0.001
"""Time that one consumer works before the next one's turn."""

BATCHED_CHANGES = 32
"""Transactions with more changes are evaluated alone, because a turn cannot end within one of a batch."""

LATE_DIVISOR = 10
"""One in this many late shapes is ended per check: the others may catch up without it."""


class _Delivery:
    """One delivery of a transaction to one shape.

    `items` wait for the snapshot; once the consumer follows the stream they go directly to the log. `failure` ends the
    shape at the commit: with `error` permanently, otherwise it starts again.
    """

    __slots__ = ("error", "failure", "items", "transaction")

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction
        self.items: deque[LogItem] | None = None
        self.failure = ""
        self.error: InvalidError | None = None


class TableConsumer:
    """Processes the changes of one relation for one shape.

    The tap calls `offer` and `evaluate`. The loader of the shape calls `set_snapshot`, then `publish_waiting` until it
    returns False.
    """

    __slots__ = (
        "_asks", "_at", "_current", "_filter", "_following", "_has_lsn", "_spent_at", "_spent_s", "_staged",
        "_translator", "_verdicts", "_waiting", "floor", "inbox", "inbox_bytes", "needed", "oid", "pending_bytes",
        "question", "shape",
    )  # fmt: skip

    def __init__(
        self,
        shape: LiveShape,
        relation: Relation,
        where: Where | None,
        writer: RowWriter,
        *,
        has_lsn: int = 0,
        asks: bool = False,
    ) -> None:
        """Create a consumer.

        `has_lsn`: the newest transaction in a log that was restored from disk. `asks`: failing rows are sent to
        PostgreSQL as a `question`.
        """
        self.shape = shape
        self.oid = relation.oid
        self._translator = ChangeTranslator(relation, shape.definition.columns, where, writer)
        self.needed = self._translator.needed
        """Columns that the shape must know; None = all."""
        self.inbox: deque[InboxEntry] = deque()
        self.inbox_bytes = 0
        self.floor = 0
        """Newest transaction before the first entry of the inbox; valid while there is one."""
        self._spent_s, self._spent_at = 0.0, 0
        self._asks = asks
        self.question: EvaluationRequest | None = None
        """Rows that PostgreSQL must evaluate before work continues; cleared by `resume_with_verdicts`."""
        self._verdicts: list[tuple[Row, Verdict]] = []
        """PostgreSQL's verdicts on rows of the current change."""
        self._at = 0
        """Number of processed changes of the first entry."""
        self._has_lsn = has_lsn
        self._filter: SnapshotFilter | None = None
        """Decides which transactions the snapshot contains; None until the snapshot is known."""
        self._following = False
        self._current: _Delivery | None = None
        self._waiting: deque[_Delivery] | None = None
        self._staged: _Delivery | None = None
        """The delivery whose items are staged in the log."""
        self.pending_bytes = 0
        """Bytes of the items that wait for the snapshot."""

    @property
    def relation(self) -> Relation:
        """The table as the last change had it."""
        return self._translator.relation

    @property
    def equality(self) -> Equality | None:
        return self._translator.equality

    def add_spent_s(self, seconds: float, tick: int) -> None:
        if tick != self._spent_at:
            self._spent_s, self._spent_at = self.recent_spent_s(tick), tick
        self._spent_s += seconds

    def recent_spent_s(self, tick: int) -> float:
        """Return the time used lately; it halves with each tick of the tap. Used to select the most expensive
        shapes."""
        return float(self._spent_s * 0.5 ** (tick - self._spent_at))

    # -- the stream, called by the tap -------------------------------------------------------------------------------

    def offer(self, entry: InboxEntry, before: int) -> None:
        """Append an entry to the inbox. `before`: the newest transaction that is older than the entry's."""
        if not self.inbox:
            self.floor = max(self.floor, before)
        self.inbox.append(entry)
        self.inbox_bytes += entry.size_bytes
        entry.work.left += 1

    def evaluate(self, turn: Turn) -> bool:
        """Process the inbox. Return False if it is empty or a question is open, True if the turn ended before that."""
        while self.inbox:
            entry = self.inbox[0]
            if entry.batch is not None:
                self._evaluate_batch(entry, entry.batch, turn)
                if self.shape.has_ended:
                    self.clear()
                    return False
                if self.inbox and turn.is_over:
                    return True
                continue
            current, changes = self._current, entry.changes
            if current is None or current.transaction is not entry.transaction:
                self._discard_delivery(current)
                current = self._current = _Delivery(entry.transaction)
            while self._at < len(changes):
                self._convert_change(current, changes[self._at])
                if self.question is not None:
                    return False
                if self.shape.has_ended:
                    self.clear()
                    return False
                self._at += 1
                if self._at < len(changes) and turn.is_over:
                    return True
            self._finish_entry()
            if entry.commits:
                self._current = None
                self._commit_delivery(current)
                self.floor = max(self.floor, entry.transaction.commit_lsn)
            if self.inbox and turn.is_over:
                return True
        return False

    def _evaluate_batch(self, entry: InboxEntry, batch: TransactionBatch, turn: Turn) -> None:
        """Evaluate the transactions of a batch until the turn ends; divide the batch if one of them must be evaluated
        alone.
        """
        self._discard_delivery(self._current)
        self._current = None
        changes, at, floor = entry.changes, self._at, self.floor
        divided = not self._following or bool(self._verdicts)
        made: list[LogItem] = []
        while at < len(changes) and not divided:
            lsn = changes[at].position.commit_lsn
            end = at + 1
            while end < len(changes) and changes[end].position.commit_lsn == lsn:
                end += 1
            transaction = batch.transaction(lsn)
            if end - at > BATCHED_CHANGES or lsn <= self._has_lsn:
                divided = True
            elif self._admits_transaction(transaction):
                divided = not self._translator.translate_whole(changes[at:end], transaction.headers, made, batch)
            if not divided:
                at, floor = end, lsn
                if turn.is_over:
                    break
        if made:
            self.shape.append(made, floor)
        self._at, self.floor = at, max(self.floor, floor)
        if divided:
            parts = entry.divide(at)
            self.inbox.popleft()
            self.inbox.extendleft(reversed(parts))
            self.inbox_bytes += sum(part.size_bytes for part in parts) - entry.size_bytes
            entry.work.left += len(parts) - 1
            self._at = 0
        elif at == len(changes):
            self._finish_entry()
            self.shape.publish(entry.transaction.commit_lsn)
            self.floor = max(self.floor, entry.transaction.commit_lsn)

    def _finish_entry(self) -> None:
        entry = self.inbox.popleft()
        self.inbox_bytes -= entry.size_bytes
        entry.work.release()
        self._at = 0

    def resume_with_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Continue with PostgreSQL's verdicts on the rows of the question."""
        if self.question is not None:
            self._verdicts += zip(self.question.rows, verdicts, strict=True)
            self.question = None

    def clear(self) -> None:
        """Release everything; the shape has ended."""
        self.question = None
        while self.inbox:
            self._finish_entry()
        self._discard_delivery(self._current)
        self._current = None
        while self._waiting:
            self._discard_delivery(self._waiting.popleft())

    # -- the snapshot, called by the loader --------------------------------------------------------------------------

    def set_snapshot(self, snapshot: PgSnapshot) -> None:
        """Set the snapshot as of which the base is complete."""
        self._filter = SnapshotFilter(snapshot)

    def follow_immediately(self) -> None:
        """Write directly to the log from now on: a restored log has its snapshot already."""
        self._following = True

    def publish_waiting(self, turn: Turn) -> bool:
        """Publish what committed since the snapshot. Return True if there is more; after False, items go directly to
        the log."""
        while self._waiting:
            if not self._stage_waiting(self._waiting[0], turn):
                return True
            self._publish_delivery(self._waiting.popleft())
        if self._current is not None and not self._stage_waiting(self._current, turn):
            return True
        self._following, self._waiting = True, None
        return False

    def _stage_waiting(self, delivery: _Delivery, turn: Turn) -> bool:
        """Move waiting items into the log; return False if the turn ended first."""
        if not self._admits(delivery) or delivery.failure:
            self._discard_delivery(delivery)
            return True
        while delivery.items:
            self._staged = delivery
            item = delivery.items.popleft()
            self._release_waiting_item(item)
            self.shape.stage(item)
            if turn.is_over and delivery.items:
                return False
        return True

    # -- transactions ------------------------------------------------------------------------------------------

    def _commit_delivery(self, delivery: _Delivery) -> None:
        if self._following:
            self._publish_delivery(delivery)
        else:
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append(delivery)

    def _publish_delivery(self, delivery: _Delivery) -> None:
        if not self._admits(delivery) or self.shape.has_ended:
            return
        if delivery.error is not None:
            self.shape.fail(delivery.error)
        elif delivery.failure:
            self.shape.drop(delivery.failure)
        else:
            self.shape.publish(delivery.transaction.commit_lsn, mark=True)
            self._staged = None

    def _admits(self, delivery: _Delivery) -> bool:
        return delivery.transaction.commit_lsn > self._has_lsn and self._admits_transaction(delivery.transaction)

    def _admits_transaction(self, transaction: Transaction) -> bool:
        assert self._filter is not None, "settle before open"
        return self._filter.admits(transaction.xid, transaction.commit_lsn)

    def _discard_delivery(self, delivery: _Delivery | None) -> None:
        """Release a delivery that will not be shown."""
        if delivery is None:
            return
        while delivery.items:
            self._release_waiting_item(delivery.items.popleft())
        if delivery is self._staged:
            self.shape.log.unstage()
            self._staged = None

    def _release_waiting_item(self, item: LogItem) -> None:
        self.pending_bytes -= item.size_bytes
        self.shape.log.budget.release(item.size_bytes)

    def _convert_change(self, current: _Delivery, change: Change) -> None:
        # Consumed even if unused: while PostgreSQL evaluated the change, a snapshot that contains it may have been
        # opened.
        verdicts, self._verdicts = self._verdicts, []
        if current.failure:
            return
        if self._following and not self._admits(current):
            return
        current.failure = self._translator.unfollowable_reason(change)
        if current.failure:
            return
        made: list[LogItem] = []
        try:
            self._translator.translate(change, current.transaction.headers, made, verdicts)
        except EvaluationError as error:
            if self._asks and not verdicts:
                self.question = self._translator.request_evaluation(change)
                return
            current.failure = f"the where clause failed on a row: {error}"
            current.error = row_failure_error(self.shape.definition.where, error)
            return
        for item in made:
            if self._following:
                self._staged = current
                self.shape.stage(item)
            else:
                self._add_waiting_item(current, item)

    def _add_waiting_item(self, current: _Delivery, item: LogItem) -> None:
        while True:
            try:
                self.shape.log.budget.reserve(item.size_bytes)
                break
            except OverBudgetError as error:
                if not self.shape.make_room(error):
                    return
        self.pending_bytes += item.size_bytes
        if current.items is None:
            current.items = deque()
        current.items.append(item)
        limit = self.shape.log.limit_bytes
        if self.pending_bytes > limit:
            self.shape.drop(f"changes during the initial snapshot outgrew the log: log_bytes={limit}")


class ConsumerTurns:
    """The consumers of one database whose inbox is not empty, evaluated in turns of QUANTUM_S.

    `asking`: consumers with an open question, which `remote_evaluation.answer_requests` sends to the database; `asked`
    is set when one is added. `remove` is called with a consumer whose shape has ended.
    """

    def __init__(self, clock: Clock, wake: asyncio.Event, remove: Callable[[TableConsumer], None]) -> None:
        self.asking: deque[TableConsumer] = deque()
        self.asked = asyncio.Event()
        self._clock = clock
        self._wake = wake
        self._remove = remove
        self._ready: deque[TableConsumer] = deque()
        self._behind: dict[TableConsumer, None] = {}
        """Consumers with a non-empty inbox."""
        self._tick = 0

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def offer(self, consumer: TableConsumer, entry: InboxEntry, before: int) -> None:
        """Offer an entry to a consumer. `before`: as in TableConsumer.offer."""
        consumer.offer(entry, before)
        if consumer not in self._behind:
            self._behind[consumer] = None
            self._ready.append(consumer)

    def discard(self, consumer: TableConsumer) -> None:
        self._behind.pop(consumer, None)

    def resume(self, consumer: TableConsumer) -> None:
        """Continue to evaluate for a consumer whose question is answered."""
        if consumer in self._behind:
            self._ready.append(consumer)
            self._wake.set()

    def run(self, turn: Turn) -> None:
        """Evaluate until the turn ends or no consumer is ready."""
        now_s, quantum = self._clock.monotonic_s(), Turn(self._clock, turn.until_s)
        while self._ready:
            consumer, started_s = self._ready.popleft(), now_s
            quantum.until_s = min(turn.until_s, now_s + QUANTUM_S)
            if self._evaluate(consumer, quantum):
                self._ready.append(consumer)
            elif consumer.question is not None:
                self.asking.append(consumer)
                self.asked.set()
            else:
                self._behind.pop(consumer, None)
            now_s = self._clock.monotonic_s()
            consumer.add_spent_s(now_s - started_s, self._tick)
            if now_s >= turn.until_s:
                break

    def _evaluate(self, consumer: TableConsumer, turn: Turn) -> bool:
        """Evaluate for one consumer. Every exception is caught here, and ends only its shape."""
        try:
            more = consumer.evaluate(turn)
        except BaseException as error:
            if not is_fault(error) and not isinstance(error, asyncio.CancelledError):
                raise
            consumer.shape.fail(unexpected_failure(error), broken=True)
            more = False
        if consumer.shape.has_ended:
            self._remove(consumer)
            more = False
        return more

    def find_largest(self) -> list[TableConsumer]:
        """Return the consumers that hold at least half as many bytes as the one that holds most; none if none holds
        any."""
        most_bytes = max((each.inbox_bytes for each in self._behind), default=0)
        return [each for each in self._behind if 2 * each.inbox_bytes >= most_bytes] if most_bytes else []

    def end_tick(self, before_s: float | None) -> list[TableConsumer]:
        """Return the most expensive of the consumers whose oldest entry was offered before that time; called once a
        second."""
        late: list[TableConsumer] = []
        if before_s is not None:
            late = [each for each in self._behind if each.inbox[0].offered_s < before_s]
        late.sort(key=lambda consumer: consumer.recent_spent_s(self._tick), reverse=True)
        self._tick += 1
        return late[: -(-len(late) // LATE_DIVISOR)]
