"""One term of leading one domain: open, write, persist, step down. Never reused: the next term opens a new one.

LD1  It opens what the log held when it was fenced in this term: the manifest, then every volatile batch above it.
LD2  It stops at the first group or manifest that was refused, fenced or has no known outcome (R3, L6). From then
     on nothing more is proposed; what was proposed learns its own outcome.
LD3  It knows nothing about other terms but this: when its replica shows that another one persisted a manifest it
     has not applied, or renamed the domain, it is over.
LD4  Its epoch is greater than that of any manifest in the bucket: where consensus lost terms, what was written in them
     is older from then on, also for a restore. A term that is not is given up for the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
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
from tidemill.metastore.domain.replicated_manifest import ANY_EPOCH, ReplicatedManifests
from tidemill.metastore.domain.settings import DomainContext
from tidemill.metastore.domain.state import DomainState, PersistedManifest, VolatileBatch
from tidemill.metastore.domain.write_path import Writing
from tidemill.metastore.lsm.database import Database

_log = structlog.get_logger()

RETRY_FIRST_S = 0.2
RETRY_MOST_S = 15.0
MARK_INTERVAL_S = 1.0
OVERDUE_S = 5.0
"""A flush that began on time has this long before the bucket counts as behind."""
TIMER_STEP_S = 0.001
"""What is due this soon is due: a timer of less may ring without the clock having moved, for ever."""

REPLAY_ROWS = 2_000
"""Replayed in one step of opening: a few milliseconds."""

AGES_KEPT = 16
"""The age of the oldest row that is in no manifest is known to one part in so many of the persist interval."""


class Leader:
    """`run` until it returns; `step_down` makes it return; then `aclose`."""

    def __init__(self, grounds: DomainContext, log: StateLog[DomainState], term: int) -> None:
        self.term = term
        self._grounds = grounds
        self._settings = grounds.settings
        self._log = log
        self._domain_uuid = log.state.domain_uuid
        self._ended: asyncio.Future[TidemillError] = asyncio.get_running_loop().create_future()
        self._persisted = asyncio.Event()
        self._flush_now = asyncio.Event()
        self._ages: deque[tuple[float, int]] = deque()
        self._trouble = ""
        self._closed = False
        self._tasks = Tasks(self.task_failed)
        self.database: Database
        self.writing: Writing
        self._fed_seqno = 0

    @classmethod
    async def open(cls, grounds: DomainContext, log: StateLog[DomainState], term: int) -> Leader:
        """LD1. Raises FencedError (a newer term exists), UnavailableError, UnknownOutcomeError, Corrupt, InvalidError
        (a newer format)."""
        state = await log.lead(term)
        if not state.domain_uuid:
            await _name(grounds, log)
        leader = cls(grounds, log, term)
        await leader._open()
        return leader

    async def _open(self) -> None:
        grounds, state, uuid = self._grounds, self._log.state, self._domain_uuid
        await self._check_epoch(state.epoch(self.term))
        manifests = ReplicatedManifests(
            self._log,
            grounds.bucket(uuid),
            domain_uuid=uuid,
            term=self.term,
            persisted=self._on_persisted,
            failed=self.step_down,
            faults=grounds.faults,
        )
        self.database = await Database.open(
            grounds.files(uuid),
            manifests,
            domain_uuid=uuid,
            epoch=state.epoch(self.term),
            options=self._settings.options,
            clock=grounds.clock,
            rand=grounds.rand,
            merger=grounds.merger,
            faults=grounds.faults,
        )
        self._fed_seqno = self.database.max_persisted_seqno
        if self._log.state.volatile and "replay-at-persisted" in grounds.faults:
            self._fed_seqno = self._log.state.volatile[0].seqno
        self.writing = Writing(
            self._log,
            self.database,
            term=self.term,
            feed=self.feed,
            stands=self.stands,
            failed=self.step_down,
            crowded=self._flush_now.set,
            volatile_bytes=self._settings.volatile_bytes,
        )
        try:
            await self._replay()
            self._check()
        except BaseException:
            await self.aclose()
            raise

    async def _check_epoch(self, epoch: int) -> None:
        """LD4. Raises FencedError, UnavailableError."""
        newest = await self._grounds.bucket(self._domain_uuid).newest(ANY_EPOCH)
        if newest is not None and newest.epoch >= epoch:
            raise FencedError(
                f"The bucket holds a manifest of this epoch or a newer one, for consensus lost terms: domain="
                f"{self._grounds.name} epoch={epoch} manifest={newest.key}.",
                current=newest.epoch,
                fix="Lead in a later term.",
            )

    # the database -------------------------------------------------------------------------------

    async def _replay(self) -> None:
        """`feed` for the many batches that a term may begin with: others have their turn in between."""
        rest = True
        while rest and self._goes_on():
            batches, rest = self._log.state.next_batches(self._fed_seqno, REPLAY_ROWS)
            self._apply(batches)
            if rest:
                await asyncio.sleep(0)

    def feed(self) -> None:
        """Bring what is applied into the database, whole batches in seqno order. Plain; idempotent."""
        if self._goes_on():
            self._apply(self._log.state.batches_after(self._fed_seqno))

    def _goes_on(self) -> bool:
        """Is the next batch of the replica the next one of the database? Else the term is over (LD3)."""
        state = self._log.state
        if self._closed or self._ended.done():
            return False
        if state.domain_uuid != self._domain_uuid or state.persisted_seqno > self._fed_seqno:
            self.step_down(FencedError(f"Another term has gone on: term={self.term} uuid={self._domain_uuid}."))
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
            # What is in the log is durable; another opening of the database will have it.
            self.step_down(error)
            return
        self._note_age(batches[0].seqno)

    async def stands(self) -> None:
        """Raise FencedError unless this term stood after the call; the database holds all that was durable at the
        call."""
        self._check()
        head = await self._grounds.consensus.log_head(self._log.log)
        if head.term != self.term:
            self.step_down(FencedError(f"A newer term was fenced: term={self.term} newer={head.term}.", current=head))
        elif head.next > self._log.position:
            await self._log.catch_up()
        self.feed()
        self._check()

    async def flush(self, timeout_s: float | None = None) -> int:
        """The highest seqno in the bucket once everything applied now is there. Fenced as soon as the term ends."""
        self._check()
        flushing = self._tasks.spawn(_quiet(self.database.flush(timeout_s)), name="metastore flush")
        await asyncio.wait([flushing, self._ended], return_when=asyncio.FIRST_COMPLETED)
        if not flushing.done():
            flushing.cancel()
            self._check()
        if flushing.cancelled():
            self._check()  # whoever closed this leader cancelled it; the caller was not cancelled
        outcome: int | TidemillError = flushing.result()
        if isinstance(outcome, TidemillError):
            if isinstance(outcome, ClosedError):
                self._check()
            raise outcome
        return outcome

    async def reset(self, domain_uuid: str, manifest: PersistedManifest | None) -> None:
        """Make the empty domain go on as `domain_uuid` from `manifest`. Ends this term. Raises ConflictError: not
        empty."""
        command = ResetManifest(domain_uuid, manifest)

        def made(state: DomainState) -> bytes:
            self._check()
            if self._log.term != self.term:
                raise FencedError(f"The term is over: term={self.term} current={self._log.term}.")
            command.check(state)
            return encode_command(command)

        await self._log.propose_late_nowait(made)
        self.step_down(FencedError(f"The domain was reset: uuid={domain_uuid} before={self._domain_uuid}."))

    # the term ------------------------------------------------------------------------------------

    async def run(self) -> TidemillError:
        """Lead until it is over; returns why."""
        self._tasks.spawn(self._persist(), name=f"persist {self._grounds.log}")
        self._tasks.spawn(self._tidy(), name=f"tidy {self._grounds.log}")
        self._tasks.spawn(self._mark(), name=f"mark {self._grounds.log}")
        return await self.over()

    async def over(self) -> TidemillError:
        """Until the term is; why."""
        return await asyncio.shield(self._ended)

    @property
    def ended(self) -> bool:
        return self._ended.done()

    def serve(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` while this term lasts; an error of it ends the term."""
        self._tasks.spawn(work, name=name)

    def step_down(self, error: TidemillError) -> None:
        """Plain and idempotent (LD2)."""
        if self._ended.done():
            return
        tell = _log.info if isinstance(error, ClosedError) else _log.warning
        tell("stepping down", domain=self._grounds.name, term=self.term, cause=error.message)
        self._ended.set_result(error)
        self.writing.stop(self._over())

    async def aclose(self) -> None:
        """Stop everything; flushes nothing. Groups under way still learn their outcome."""
        self.step_down(ClosedError(f"The leader was closed: domain={self._grounds.name} term={self.term}."))
        self._closed = True
        self._grounds.tracker.remove(self._mark_name)
        await self._tasks.aclose()
        await self.database.aclose()

    def _check(self) -> None:
        if self._ended.done():
            raise self._over()

    def _over(self) -> FencedError:
        cause = self._ended.result()
        return FencedError(
            f"This process does not lead the domain any more: domain={self._grounds.name} term={self.term} "
            f"cause={cause.message!r}.",
            fix="Ask again; another leader is elected within the lease time.",
        )

    def task_failed(self, name: str, error: BaseException) -> None:
        """Whatever this term runs and fails ends the term; the next one begins anew."""
        broken = (
            error if isinstance(error, TidemillError) else ClosedError(f"A task broke: task={name!r} reason={error!r}.")
        )
        self.step_down(broken)

    # persisting ----------------------------------------------------------------------------------

    async def _persist(self) -> None:
        """Flush when the oldest row in no manifest is a persist interval old, or when there is no room."""
        pause_s = RETRY_FIRST_S
        while True:
            await self._due()
            self._flush_now.clear()
            try:
                await self.database.flush(self._settings.flush_timeout_s)
            except UnavailableError as error:
                self._trouble = error.message
                _log.warning("not persisted", domain=self._grounds.name, cause=error.message)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)
                self._flush_now.set()
                continue
            except TidemillError as error:
                self.step_down(error)
                return
            pause_s, self._trouble = RETRY_FIRST_S, ""

    async def _due(self) -> None:
        while True:
            self._forget_ages()
            left_s = self._settings.persist_interval_s
            if self._ages:
                left_s += self._ages[0][0] - self._grounds.clock.monotonic_s()
                if left_s < TIMER_STEP_S:
                    return
            try:
                async with asyncio.timeout(left_s):
                    await self._flush_now.wait()
                    return
            except TimeoutError:
                continue

    def _note_age(self, first_seqno: int) -> None:
        """Rows from `first_seqno` on came no earlier than now: enough to know how old the bucket is."""
        now_s = self._grounds.clock.monotonic_s()
        if not self._ages or now_s - self._ages[-1][0] > self._settings.persist_interval_s / AGES_KEPT:
            self._ages.append((now_s, first_seqno))

    def _forget_ages(self) -> None:
        persisted = self.database.max_persisted_seqno
        ages = self._ages
        while ages and (ages[1][1] if len(ages) > 1 else self._fed_seqno + 1) <= persisted + 1:
            ages.popleft()

    def _overdue(self) -> bool:
        """Should the oldest row that is in no manifest have been persisted by now?"""
        self._forget_ages()
        if not self._ages:
            return False
        return self._grounds.clock.monotonic_s() - self._ages[0][0] > self._settings.persist_interval_s + OVERDUE_S

    def _on_persisted(self) -> None:
        self._persisted.set()
        self.writing.trimmed()

    async def _tidy(self) -> None:
        """After a manifest trimmed the buffer the state is small: roll the log up, so that it is truncated."""
        while True:
            await self._persisted.wait()
            self._persisted.clear()
            if self._log.records_since_rollup < self._settings.rollup_after_records:
                continue
            try:
                await self._log.rollup()
            except (UnavailableError, UnknownOutcomeError, InvalidError) as error:
                # Invalid: the state is larger than one append. The next manifest makes it smaller.
                _log.warning("not rolled up", domain=self._grounds.name, cause=error.message)
            except TidemillError as error:
                self.step_down(error)
                return

    # marks ---------------------------------------------------------------------------------------

    @property
    def _mark_name(self) -> str:
        return f"metastore:{self._grounds.name}"

    async def _mark(self) -> None:
        while True:
            self.mark()
            if self.database.failure is not None:
                # Only an opening anew starts that work again; nobody else may hear of it before writers have stopped.
                self.task_failed("metastore database", self.database.failure)
            if self._log.broken is not None:
                self.step_down(self._log.broken)
            await asyncio.sleep(MARK_INTERVAL_S)

    def mark(self) -> None:
        """position = seqno in the bucket, target = the seqno that should be there by now.

        Rows that wait for their persist interval are on time: the stage is idle, and says how far the log is.
        """
        persisted, applied = self.database.max_persisted_seqno, self.database.max_applied_seqno
        late = bool(self._trouble) or self._overdue()
        reason = ""
        if self._trouble:
            reason = f"the bucket takes no files: {self._trouble}"
        elif persisted < applied:
            reason = f"rows to seqno {applied} are persisted within {self._settings.persist_interval_s:g} s"
        self._grounds.tracker.set(
            self._mark_name,
            persisted,
            applied if late else persisted,
            now_ms=self._grounds.clock.now_ms(),
            held_by="objects" if self._trouble else "",
            reason=reason,
            budget_ms=int((self._settings.persist_interval_s + self._settings.flush_timeout_s) * 1000),
            unit="seqno",
        )


async def _name(grounds: DomainContext, log: StateLog[DomainState]) -> None:
    """Give the domain its uuid, or find that somebody has."""
    command = SetDomainUuid(grounds.rand.uuid())
    try:
        await log.propose(encode_command(command), check=command.check)
    except ConflictError:
        if not log.state.domain_uuid:
            raise


async def _quiet(flushing: Coroutine[Any, Any, int]) -> int | TidemillError:
    """The outcome as a value: nobody may be left to take an exception."""
    try:
        return await flushing
    except TidemillError as error:
        return error
