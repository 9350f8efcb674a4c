"""The PostgreSQL client: three connections with a queue each.

    groups    appends and register writes; all that wait share one commit
    singles   fences, truncations, leases, notifications: one commit each
    reads     all that wait, one statement per kind

Operations of one queue run in the order of their calls. Cancelling a caller does not disturb the operation in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

import psycopg
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ClosedError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import LogHead
from tidemill.consensus.client_base import ConsensusClientBase, run_supervised
from tidemill.consensus.operations import AnyOp, Append, Cas, Changed, Truncate, Wait
from tidemill.consensus.postgres import connections, group_commit, schema, single_ops, sql
from tidemill.consensus.postgres.change_detection import HeadComparison, read_head_sums, read_heads_after
from tidemill.consensus.postgres.connections import Connection, ConnectionLane, without_password
from tidemill.consensus.postgres.group_commit import QueuedOperation
from tidemill.consensus.postgres.notifications import LogWakeups
from tidemill.consensus.postgres.session_checks import SessionAdmission
from tidemill.consensus.rollback_detection import RollbackDetector

READ_GROUP_OPS = 256

SLOW_AFTER_S = 2.0
"""Time without any answer after which `trouble` reports the server as away.

A server error also counts from this age on: one that does not recur with the next work is no trouble.
"""
UNANSWERED_AFTER_S = 3.0
"""A request in flight for longer than this is trouble."""

log = structlog.get_logger()


class _OperationQueue:
    """Queue of one connection, and the event that it is not empty."""

    def __init__(self, lane: ConnectionLane) -> None:
        self.lane = lane
        self.queue: deque[QueuedOperation] = deque()
        self.filled = asyncio.Event()


class PostgresConsensus(ConsensusClientBase):
    """`api.Consensus` over a PostgreSQL database. One object per event loop; `start` before use."""

    def __init__(self, url: str, clock: Clock, rand: Rand) -> None:
        self._url = url
        self.seen = RollbackDetector(connections.without_password(url))
        admit = SessionAdmission(self.seen, self._adopt_life).admit
        self._groups = _OperationQueue(ConnectionLane(url, rand, writes=True, admit=admit))
        self._singles = _OperationQueue(ConnectionLane(url, rand, writes=True, admit=admit))
        self._reads = _OperationQueue(ConnectionLane(url, rand, writes=False, admit=admit))
        self._log_ids: dict[str, int] = {}
        self._tasks = Tasks(self._task_failed)
        self._wakeups = LogWakeups(url, rand, self._notify, self._heads, self._report_fault)
        self._rand = rand
        self._differences = self._new_comparison()
        self._fault = ""
        self._sweeping: set[str] = set()
        self._closed: TidemillError | None = None

    async def start(self, *, create: bool = True) -> None:
        """Connect and create the schema. Raises InvalidError (names, rights, version) or UnavailableError, and
        MissingError when the schema does not exist and `create` is false."""
        self._loop = asyncio.get_running_loop()
        try:
            connection = await connections.connect(self._url)
        except (psycopg.Error, OSError, TimeoutError) as error:
            raise connections.translate_connect_error(error, self._url) from error
        try:
            await schema.ensure_schema(connection, create=create)
        except psycopg.Error as error:
            raise connections.translate_server_error(error) from error
        finally:
            await connection.close()
        for name, line, serve in (
            ("groups", self._groups, self._serve_group),
            ("singles", self._singles, self._serve_single),
            ("reads", self._reads, self._serve_reads),
        ):
            serving = partial(self._serve, line, serve)
            self._tasks.spawn(run_supervised(f"consensus-postgres-{name}", serving, self._report_fault), name=name)
        self._wakeups.start(self._tasks)

    # requests ------------------------------------------------------------------------------------

    def _enqueue(self, line: _OperationQueue, op: object) -> asyncio.Future[Any]:
        """Enqueue `op`. A plain function, so that the order of the calls is the order of execution."""
        if self._closed is not None:
            raise self._closed
        future: asyncio.Future[Any] = self._loop.create_future()
        line.queue.append(QueuedOperation(op, future))
        line.filled.set()
        return future

    async def _submit(self, op: AnyOp) -> Any:
        if isinstance(op, (Append, Cas)):
            return await self._enqueue(self._groups, op)
        if isinstance(op, Changed):
            return await self._differences.changes_since(op)
        return await self._enqueue(self._singles if op.writes else self._reads, op)

    async def _wait(self, op: Wait, timeout_s: float) -> bool:
        if self._closed is not None:
            raise self._closed
        return await self._wakeups.wait(op.log, op.beyond, timeout_s)

    async def _notify(self, payloads: list[str]) -> None:
        async def send(connection: Connection) -> None:
            await connection.execute(sql.NOTIFY, (payloads,))

        await self._enqueue(self._singles, send)

    async def _heads(self, logs: list[str]) -> dict[str, LogHead]:
        async def read(connection: Connection) -> dict[str, LogHead]:
            return await single_ops.read_heads(connection, logs)

        found: dict[str, LogHead] = await self._enqueue(self._reads, read)
        return found

    async def _sums(self, prefix: str) -> dict[int, int]:
        found: dict[int, int] = await self._enqueue(self._reads, partial(read_head_sums, prefix=prefix))
        return found

    async def _heads_after(
        self, prefix: str, after: str, parts: Collection[int], limit: int
    ) -> list[tuple[str, LogHead]]:
        async def read(connection: Connection) -> list[tuple[str, LogHead]]:
            return await read_heads_after(connection, prefix, after, parts, limit)

        found: list[tuple[str, LogHead]] = await self._enqueue(self._reads, read)
        return found

    # serving -------------------------------------------------------------------------------------

    async def _serve(self, line: _OperationQueue, serve: Callable[[_OperationQueue], Awaitable[None]]) -> None:
        while True:
            while line.queue:
                await serve(line)
                self._fault = ""
            line.filled.clear()
            await line.filled.wait()

    async def _serve_group(self, line: _OperationQueue) -> None:
        group = group_commit.dequeue_group(line.queue)
        if not group.members:
            return
        try:
            again = await line.lane.run(lambda connection: group_commit.commit_group(connection, group, self._log_ids))
            line.queue.extendleft(reversed(again))
            for log, chain in group.chains.items():
                last = chain[-1]
                if last.future.done() and not last.future.cancelled() and last.future.exception() is None:
                    self._wakeups.announce_growth(log, last.future.result().next)
        except TidemillError as error:
            group.fail(error)
        except BaseException:
            group.fail(UnknownOutcomeError("the consensus client ended during a commit."))
            raise

    async def _serve_single(self, line: _OperationQueue) -> None:
        queued = line.queue.popleft()
        if queued.future.done():
            return
        op = queued.op
        try:
            if callable(op):
                queued.done(await line.lane.run(op))
            else:
                result = await line.lane.run(lambda connection: single_ops.execute_write(connection, op, self._log_ids))
                queued.done(result)
                if isinstance(op, Truncate) and op.log not in self._sweeping and result.start > 0:
                    self._sweeping.add(op.log)
                    self._tasks.spawn(self._sweep(op.log, result.start), name="consensus-postgres-sweep")
        except TidemillError as error:
            queued.fail(error)
        except BaseException:
            queued.fail(UnknownOutcomeError("the consensus client ended during a write."))
            raise

    async def _serve_reads(self, line: _OperationQueue) -> None:
        batch = [line.queue.popleft() for _ in range(min(len(line.queue), READ_GROUP_OPS))]
        batch = [queued for queued in batch if not queued.future.done()]
        try:
            await self._wait_for_writers()
            ops = [queued for queued in batch if not callable(queued.op)]
            for queued in batch:
                if callable(queued.op):
                    queued.done(await line.lane.run(queued.op))
            if ops:
                outcomes = await line.lane.run(lambda c: single_ops.execute_reads(c, [queued.op for queued in ops]))
                for queued, outcome in zip(ops, outcomes, strict=True):
                    if isinstance(outcome, TidemillError):
                        queued.fail(outcome)
                    else:
                        queued.done(outcome)
        except TidemillError as error:
            for queued in batch:
                queued.fail(error)
        except BaseException:
            for queued in batch:
                queued.fail(self._closed or UnavailableError("the consensus client ended during a read."))
            raise

    async def _wait_for_writers(self) -> None:
        """Wait until no backend can still be executing an earlier write: otherwise the answer of a read would not be
        final.
        """
        for line in (self._groups, self._singles):
            if line.lane.owing:
                await line.lane.run(_no_operation)

    async def _sweep(self, log_name: str, start: int) -> None:
        """Delete truncated rows piece by piece, between other work. A later sweep deletes any remainder."""
        log_id = self._log_ids.get(log_name)
        try:
            more = True
            while more:

                async def piece(connection: Connection) -> bool:
                    found = (
                        log_id
                        if log_id is not None
                        else await group_commit.log_id_of(connection, log_name, self._log_ids)
                    )
                    return await single_ops.sweep_records(connection, found, start)

                more = await self._enqueue(self._singles, piece)
        except Exception as error:
            log.info("truncated rows are left to a later sweep", log=log_name, reason=str(error))
        finally:
            self._sweeping.discard(log_name)

    def _new_comparison(self) -> HeadComparison:
        return HeadComparison(self._rand.nonce(), self._sums, self._heads_after)

    def _adopt_life(self, life: str) -> None:
        """Adopt a new life of the server: it was restarted or replaced.

        After the first life, cached log ids may be wrong and change tokens start over. A connection whose session
        belongs to the earlier life is replaced.
        """
        earlier, self.life = self.life, life
        if not earlier:
            return
        self._log_ids.clear()
        self._differences = self._new_comparison()
        for line in (self._groups, self._singles, self._reads):
            line.lane.request_new_session()

    # the end -------------------------------------------------------------------------------------

    def trouble(self) -> str:
        if self.seen.lost is not None:
            return self.seen.lost.message
        if self._closed is not None:
            return self._closed.message
        return self._lane_trouble(self._loop.time()) or self._fault

    def _lane_trouble(self, now_s: float) -> str:
        """Report a request without an answer long before its timeout, since a network that drops packets is silent."""
        lanes = [line.lane for line in (self._groups, self._singles, self._reads)]
        # An error of one connection counts only while none of them gets an answer: a connection that broke long ago is
        # noticed only when it is used.
        latest, answered_s = max(lanes, key=lambda lane: lane.away_s), max(lane.answered_s for lane in lanes)
        waited_s = max((now_s - lane.began_s for lane in lanes if lane.began_s is not None), default=0.0)
        # An error describes the moment that it came from: a server that dropped a connection a while ago, and has been
        # silent since, is silent.
        is_silent = waited_s > UNANSWERED_AFTER_S and now_s - latest.away_s > UNANSWERED_AFTER_S
        if latest.away_s > answered_s and now_s - answered_s > SLOW_AFTER_S and not is_silent:
            return latest.away
        if waited_s > UNANSWERED_AFTER_S:
            where = without_password(self._url)
            return f"PostgreSQL does not answer: consensus.url={where!r} oldest_request_s={waited_s:.0f}."
        return next((lane.refusal for lane in lanes if lane.refusal and now_s - lane.refused_s > SLOW_AFTER_S), "")

    def _report_fault(self, fault: str) -> None:
        self._fault = fault

    def _task_failed(self, name: str, error: BaseException) -> None:
        """Close the client. Only an error that ends the process gets here: `kept` restarts the loop after any other."""
        self._close_with(UnavailableError(f"the consensus client failed: task={name} reason={error!r}."))

    def _close_with(self, error: TidemillError) -> None:
        self._closed = self._closed or error
        for line in (self._groups, self._singles, self._reads):
            for queued in line.queue:
                queued.fail(error)
            line.queue.clear()
        self._wakeups.fail_all(error)

    async def aclose(self) -> None:
        if isinstance(self._closed, ClosedError):
            return
        self._closed = ClosedError("this consensus client was closed.")
        await self._tasks.aclose()
        self._close_with(self._closed)
        for line in (self._groups, self._singles, self._reads):
            await line.lane.aclose()


async def _no_operation(connection: Connection) -> None:
    return None
