"""One term of leading one domain: open, write, persist, step down. An instance is never reused for another term.

- Invariant (complete replay): it opens the state that the log held when this term fenced it: the manifest, then every
  volatile batch above it.
- Invariant (stop at the first failure): it steps down at the first group or manifest that was rejected, fenced or has
  an unknown outcome. From then on it proposes nothing; earlier proposals still get their own outcome.
- Invariant (no mixed terms): the term has ended when the replica shows that another term persisted a manifest this one
  has not applied, or that the domain's uuid changed.
- Invariant (newest epoch): its epoch is greater than that of any manifest in the bucket. If consensus lost terms, the
  files written in them are older from then on, for a restore too. A term whose epoch is too low is abandoned for the
  next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog

from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    InvalidError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.state_log.state_log import StateLog
from tidemill.metastore.domain.codec import encode_command
from tidemill.metastore.domain.commands import ResetManifest, SetDomainUuid
from tidemill.metastore.domain.commit.write_path import WritePath
from tidemill.metastore.domain.persist_loop import PersistLoop
from tidemill.metastore.domain.replicated_manifest import ANY_EPOCH, ReplicatedManifests
from tidemill.metastore.domain.settings import DomainContext
from tidemill.metastore.domain.state import DomainState, PersistedManifest, VolatileBatch
from tidemill.metastore.lsm.database import Database, DatabaseContext

_log = structlog.get_logger()

STATUS_INTERVAL_S = 1.0
REPLAY_ROWS = 2_000
"""Rows replayed in one step of opening: a few milliseconds."""


class Leader:
    """Leader in one term: await `run`, which `step_down` ends, then `aclose`."""

    def __init__(self, context: DomainContext, log: StateLog[DomainState], term: int) -> None:
        self.term = term
        self._context = context
        self._settings = context.settings
        self._log = log
        self._domain_uuid = log.state.domain_uuid
        self._ended: asyncio.Future[TidemillError] = asyncio.get_running_loop().create_future()
        self._persisted = asyncio.Event()
        self._closed = False
        self._tasks = Tasks(self.task_failed)
        self.database: Database
        self.writing: WritePath
        self._persistence: PersistLoop
        self._fed_seqno = 0

    @classmethod
    async def open(cls, context: DomainContext, log: StateLog[DomainState], term: int) -> Leader:
        """Open the database as the log describes it when this term fences it. Raises FencedError (a newer term exists),
        UnavailableError, UnknownOutcomeError, CorruptError, InvalidError (a newer format)."""
        state = await log.lead(term)
        if not state.domain_uuid:
            await _assign_uuid(context, log)
        leader = cls(context, log, term)
        await leader._open()
        return leader

    async def _open(self) -> None:
        context, state, uuid = self._context, self._log.state, self._domain_uuid
        await self._check_epoch(state.epoch(self.term))
        manifests = ReplicatedManifests(
            self._log,
            context.bucket(uuid),
            domain_uuid=uuid,
            term=self.term,
            persisted=self._on_persisted,
            failed=self.step_down,
        )
        self.database = await Database.open(
            context.files(uuid),
            manifests,
            DatabaseContext(
                domain_uuid=uuid,
                epoch=state.epoch(self.term),
                options=self._settings.options,
                clock=context.clock,
                rand=context.rand,
                merger=context.merger,
            ),
        )
        self._fed_seqno = self.database.max_persisted_seqno
        self._persistence = PersistLoop(context, self.database, self.step_down)
        self.writing = WritePath(
            self._log,
            self.database,
            self,
            stall=self.database.background.stall.wait,
            crowded=self._persistence.request_flush,
            volatile_bytes=self._settings.volatile_bytes,
        )
        try:
            await self._replay()
            self._check_leading()
        except BaseException:
            await self.aclose()
            raise

    async def _check_epoch(self, epoch: int) -> None:
        """Check that the bucket has no manifest of this epoch or a later one. Raises FencedError, UnavailableError."""
        newest = await self._context.bucket(self._domain_uuid).newest(ANY_EPOCH)
        if newest is not None and newest.epoch >= epoch:
            raise FencedError(
                "the bucket has a manifest of this epoch or a newer one, because consensus lost terms:"
                f" domain={self._context.name} epoch={epoch} manifest={newest.key}.",
                current=newest.epoch,
                fix="Lead in a later term.",
            )

    # the database -------------------------------------------------------------------------------

    async def _replay(self) -> None:
        """Apply the batches that a term begins with, as `apply_log` does, but yield to the event loop in between."""
        rest = True
        while rest and self._check_contiguous():
            batches, rest = self._log.state.next_batches(self._fed_seqno, REPLAY_ROWS)
            self._apply(batches)
            if rest:
                await asyncio.sleep(0)

    def apply_log(self) -> None:
        """Apply the batches that the log has applied to the database, in seqno order. Synchronous and idempotent."""
        if self._check_contiguous():
            self._apply(self._log.state.batches_after(self._fed_seqno))

    def _check_contiguous(self) -> bool:
        """Return whether the replica's next batch follows the database's last one. If not, the term has ended; step
        down."""
        state = self._log.state
        if self._closed or self._ended.done():
            return False
        if state.domain_uuid != self._domain_uuid or state.persisted_seqno > self._fed_seqno:
            self.step_down(FencedError(f"another term has made progress: term={self.term} uuid={self._domain_uuid}."))
            return False
        return True

    def _apply(self, batches: Sequence[VolatileBatch]) -> None:
        if not batches:
            return
        try:
            for batch in batches:
                self.database.apply(batch.seqno, batch.keys, batch.values)
                self._fed_seqno = batch.seqno
        except TidemillError as error:
            # Batches in the log are durable. Another opening of the database will apply them.
            self.step_down(error)
            return
        self._persistence.record_age(batches[0].seqno)

    async def check_still_leading(self) -> None:
        """Check with consensus that this term is still the newest. Raises FencedError unless it was so after the call.
        Then the database holds everything that was durable at the call."""
        self._check_leading()
        head = await self._context.consensus.log_head(self._log.log)
        if head.term != self.term:
            self.step_down(FencedError(f"a newer term exists: term={self.term} newer={head.term}.", current=head))
        elif head.next > self._log.position:
            await self._log.catch_up()
        self.apply_log()
        self._check_leading()

    async def flush(self, timeout_s: float | None = None) -> int:
        """Flush everything applied so far; return the highest seqno in the bucket. Raises FencedError when the term
        ends."""
        self._check_leading()
        flushing = self._tasks.spawn(_error_as_value(self.database.flush(timeout_s)), name="metastore flush")
        await asyncio.wait([flushing, self._ended], return_when=asyncio.FIRST_COMPLETED)
        if not flushing.done():
            flushing.cancel()
            self._check_leading()
        if flushing.cancelled():
            self._check_leading()  # closing this leader cancelled the flush; the caller was not cancelled
        outcome: int | TidemillError = flushing.result()
        if isinstance(outcome, TidemillError):
            if isinstance(outcome, ClosedError):
                self._check_leading()
            raise outcome
        return outcome

    async def reset(self, domain_uuid: str, manifest: PersistedManifest | None) -> None:
        """Let the empty domain continue as `domain_uuid` from `manifest`. Ends this term. Raises ConflictError if it is
        not empty."""
        command = ResetManifest(domain_uuid, manifest)

        def encode_reset(state: DomainState) -> bytes:
            self._check_leading()
            if self._log.term != self.term:
                raise FencedError(f"the term has ended: term={self.term} current={self._log.term}.")
            command.check(state)
            return encode_command(command)

        await self._log.propose_deferred(encode_reset)
        self.step_down(FencedError(f"the domain was reset: uuid={domain_uuid} before={self._domain_uuid}."))

    # the term ------------------------------------------------------------------------------------

    async def run(self) -> TidemillError:
        """Lead until the term has ended; return the reason."""
        self._tasks.spawn(self._persistence.run(), name=f"persist {self._context.log}")
        self._tasks.spawn(self._rollup_loop(), name=f"tidy {self._context.log}")
        self._tasks.spawn(self._status_loop(), name=f"mark {self._context.log}")
        return await self.wait_until_ended()

    async def wait_until_ended(self) -> TidemillError:
        """Wait until the term has ended; return the reason."""
        return await asyncio.shield(self._ended)

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def run_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` while this term lasts; an error of it ends the term."""
        self._tasks.spawn(work, name=name)

    def step_down(self, error: TidemillError) -> None:
        """End the term: propose nothing from now on. Synchronous and idempotent."""
        if self._ended.done():
            return
        tell = _log.info if isinstance(error, ClosedError) else _log.warning
        tell("stepping down", domain=self._context.name, term=self.term, cause=error.message)
        self._ended.set_result(error)
        self.writing.stop(self._ended_error())

    async def aclose(self) -> None:
        """Stop everything without a flush. Pending groups still get their outcome."""
        self.step_down(ClosedError(f"the leader is closed: domain={self._context.name} term={self.term}."))
        self._closed = True
        self._context.tracker.remove(self._stage_name)
        await self._tasks.aclose()
        await self.database.aclose()

    def _check_leading(self) -> None:
        if self._ended.done():
            raise self._ended_error()

    def _ended_error(self) -> FencedError:
        cause = self._ended.result()
        return FencedError(
            f"this process no longer leads the domain: domain={self._context.name} term={self.term} "
            f"cause={cause.message!r}.",
            fix="Retry; another leader is elected within the lease time.",
        )

    def task_failed(self, name: str, error: BaseException) -> None:
        """End the term because one of its tasks failed. The next term starts all of them again."""
        broken = (
            error
            if isinstance(error, TidemillError)
            else ClosedError(f"a task failed: task={name!r} reason={error!r}.")
        )
        self.step_down(broken)

    # persisting ----------------------------------------------------------------------------------

    def _on_persisted(self) -> None:
        self._persisted.set()
        self.writing.wake_waiting_for_room()

    async def _rollup_loop(self) -> None:
        """Roll the log up after a manifest trimmed the buffer: the state is small then, and the log can be
        truncated."""
        while True:
            await self._persisted.wait()
            self._persisted.clear()
            if self._log.records_since_rollup < self._settings.rollup_after_records:
                continue
            try:
                await self._log.rollup()
            except (UnavailableError, UnknownOutcomeError, InvalidError) as error:
                # Invalid: the state is larger than one append. It shrinks with the next manifest.
                _log.warning("rollup failed", domain=self._context.name, cause=error.message)
            except TidemillError as error:
                self.step_down(error)
                return

    # stage status --------------------------------------------------------------------------------

    @property
    def _stage_name(self) -> str:
        return f"metastore:{self._context.name}"

    async def _status_loop(self) -> None:
        while True:
            self.mark()
            if self.database.background.failure is not None:
                # Only reopening restarts that work. Writers must have stopped before the failure is reported elsewhere.
                self.task_failed("metastore database", self.database.background.failure)
            if self._log.failure is not None:
                self.step_down(self._log.failure)
            await asyncio.sleep(STATUS_INTERVAL_S)

    def mark(self) -> None:
        """Publish the stage status. position = seqno in the bucket, target = the seqno that should be there by now.

        Rows that wait for their persist interval are on time: the stage is idle, and its reason says how far the log
        is.
        """
        persisted, applied = self.database.max_persisted_seqno, self.database.max_applied_seqno
        trouble = self._persistence.trouble
        late = bool(trouble) or self._persistence.is_overdue()
        reason = ""
        if trouble:
            reason = f"the bucket accepts no files: {trouble}"
        elif persisted < applied:
            reason = f"rows to seqno {applied} are persisted within {self._settings.persist_interval_s:g} s"
        self._context.tracker.set(
            self._stage_name,
            persisted,
            applied if late else persisted,
            now_ms=self._context.clock.now_ms(),
            held_by="objects" if trouble else "",
            reason=reason,
            budget_ms=int((self._settings.persist_interval_s + self._settings.flush_timeout_s) * 1000),
            unit="seqno",
        )


async def _assign_uuid(context: DomainContext, log: StateLog[DomainState]) -> None:
    """Give the domain a uuid, unless another process did."""
    command = SetDomainUuid(context.rand.uuid())
    try:
        await log.propose(encode_command(command), check=command.check)
    except ConflictError:
        if not log.state.domain_uuid:
            raise


async def _error_as_value(flushing: Coroutine[Any, Any, int]) -> int | TidemillError:
    """Return the error instead of raising it: there may be no task left that awaits the exception."""
    try:
        return await flushing
    except TidemillError as error:
        return error
