"""Handle of one process on one domain: it follows the domain's log, and leads while it holds the domain's lease.

    log and lease   metastore/<domain>       forwarding/request_log.py has two more logs

- Invariant (linearizable sync): reads after `sync` contain everything whose commit had returned, in any process, before
  `sync` was called. A superseded leader detects this by the log's term, not by its lease, and serves as a follower
  from then on.
- Invariant (read your writes): a commit returns once it is durable and this process's database contains it. A follower
  that cannot reach consensus at that moment returns without the latter.
- Invariant (bounded wait): no call waits for a leader indefinitely; `request_timeout_s` ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import (
    ClosedError,
    FencedError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Consensus, Lease
from tidemill.consensus.state_log.state_log import StateLog, StateMachine
from tidemill.metastore.domain.apply import apply
from tidemill.metastore.domain.candidacy import RETRY_FIRST_S, RETRY_MAX_S, Candidacy
from tidemill.metastore.domain.codec import decode_state_yielding, encode_state_yielding
from tidemill.metastore.domain.commit.write_path import NO_EXPECTATIONS, checked_size
from tidemill.metastore.domain.follower import Follower
from tidemill.metastore.domain.forwarding.client import ForwardingClient
from tidemill.metastore.domain.forwarding.server import ForwardingServer
from tidemill.metastore.domain.leader import Leader
from tidemill.metastore.domain.read_path import Barrier, DomainReads
from tidemill.metastore.domain.settings import DomainContext, log_name
from tidemill.metastore.domain.state import DomainState, PersistedManifest
from tidemill.metastore.lsm.manifest import Manifest, encode_manifest

_log = structlog.get_logger()

FOLLOW_WAIT_S = 1.0
RELEASE_TIMEOUT_S = 2.0


def state_log(consensus: Consensus, log: str, rand: Rand) -> StateLog[DomainState]:
    """Return the view of a domain's log. It has read nothing yet."""
    machine = StateMachine(DomainState, apply, encode_state_yielding, decode_state_yielding)
    return StateLog(consensus, log, machine, rand)


async def has_been_led(consensus: Consensus, name: str, rand: Rand) -> bool:
    """Return whether any process has led the domain, so that rows or objects of it may exist. Raises UnavailableError,
    CorruptError."""
    log = state_log(consensus, log_name(name), rand)
    try:
        await log.catch_up()
        return log.state.domain_uuid != ""
    finally:
        await log.aclose()


class Domain(DomainReads):
    """One domain. Created by `factory`. Every method may raise UnavailableError, ClosedError, CorruptError."""

    def __init__(self, context: DomainContext, own_earlier_life: Callable[[str], bool]) -> None:
        self.marks = context.tracker
        self._context = context
        self._settings = context.settings
        self._log = state_log(context.consensus, context.log, context.rand)
        super().__init__(context.name, Follower(context, self._log))
        self._requester = ForwardingClient(
            context.consensus, context.clock, context.rand, context.name, context.settings.request_timeout_s
        )
        self._barrier = Barrier(self._run_barrier_round, f"sync {context.log}", self._task_failed)
        self._serving: ForwardingServer | None = None
        self._busy = False
        self._closing = False
        self._turned = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks = Tasks(self._task_failed)
        self._candidacy = Candidacy(
            context,
            self._lead_term,
            wanted=self._wants_lease,
            own_earlier_life=own_earlier_life,
            tasks=self._tasks,
        )
        self._failures = self._candidacy.failures

    @classmethod
    async def open(cls, context: DomainContext, *, own_earlier_life: Callable[[str], bool] = lambda _: False) -> Domain:
        """Open a handle that has followed the log up to now. Leadership comes later (`settings.lead`);
        `wait_until_leading` waits for it.

        A nonce is added to `context.holder`, which makes it unique. `own_earlier_life(holder)`: see
        `consensus.leader_election`. The caller keeps ownership of consensus, objects and merger.
        """
        context = replace(context, holder=f"{context.holder}-{context.rand.nonce()}")
        domain = cls(context, own_earlier_life)
        await domain._log.catch_up()
        domain._tasks.spawn(domain._follow_log(), name=f"follow {context.log}")
        if context.settings.lead:
            domain._candidacy.start()
        return domain

    # state --------------------------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        return self._leader is not None and not self._leader.has_ended

    @property
    def term(self) -> int:
        """Term in which this process leads; 0 if it does not."""
        return self._leader.term if self._leader is not None and not self._leader.has_ended else 0

    @property
    def domain_uuid(self) -> str:
        """Uuid as of the newest record seen; "" while no process has led the domain yet."""
        return self._log.state.domain_uuid

    @property
    def state(self) -> DomainState:
        """Replicated state as of the newest record seen. Read-only."""
        return self._log.state

    async def wait_until_leading(self, timeout_s: float) -> None:
        """Wait until this process leads. Raises UnavailableError after the timeout, with the reason as far as known."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.leading:
                    self._check_open()
                    self._turned.clear()
                    await self._turned.wait()
        except TimeoutError as error:
            failure = self._failures.last
            cause = failure.message if failure is not None else "another process holds the lease"
            raise UnavailableError(
                f"this process does not lead the domain: domain={self.name} timeout_s={timeout_s} cause={cause!r}."
            ) from error

    async def wait_until_following(self) -> None:
        """Wait until this process does not lead; return immediately if it does not now."""
        while self._leader is not None and not self._leader.has_ended:
            await self._leader.wait_until_ended()

    async def sync(self) -> None:
        """Wait for a linearizable barrier. Concurrent callers share one read of consensus, begun after all of them
        called."""
        self._check_open()
        await self._barrier.wait()

    # writes -------------------------------------------------------------------------------------

    async def commit(
        self, rows: Sequence[tuple[bytes, bytes]], *, expects: Mapping[bytes, int] = NO_EXPECTATIONS
    ) -> int:
        """Write all rows (an empty value deletes) if every expected key has the given seqno (0 = no live row).

        Returns the batch's seqno. Concurrent commits of different keys may share one seqno; of a key that occurs twice
        the last row counts. Raises ConflictError(current={expected key: Row | None}, or None if that is too large to be
        sent to this process); if leadership ended during the commit, FencedError (it did not happen: retry) or
        UnknownOutcomeError (it may have happened); UnavailableError; InvalidError.
        """
        leader = self._leader
        if leader is not None and not leader.has_ended:
            self._busy = True
            if not expects:
                on_its_way = leader.writing.try_join_open_group(rows)
                if on_its_way is not None:
                    return await on_its_way
            return await leader.writing.commit(rows, expects)
        checked_size(rows)  # also rejects a commit without rows: the request log would take it for a flush request
        return await self._forward_and_sync(lambda: self._requester.commit(rows, expects))

    async def flush(self, timeout_s: float | None = None) -> int:
        """Flush everything committed so far to the bucket, wherever the leader is; return the highest seqno stored
        there.

        Raises the same errors as `commit`."""
        await self.sync()  # an unknowingly superseded leader does not have what the new leader committed
        leader = self._leader
        if leader is not None and not leader.has_ended:
            return await leader.flush(timeout_s)
        return await self._forward_and_sync(lambda: self._requester.flush(timeout_s))

    async def reset(self, domain_uuid: str, manifest: Manifest | None, *, timeout_s: float = 30.0) -> None:
        """Let this empty domain continue from a manifest of its bucket, or start without rows; return when it is
        reopened.

        Raises ConflictError if the domain holds rows; UnavailableError if this process does not become the leader;
        UnknownOutcomeError if the domain was reset but this process could not reopen it.
        """
        if manifest is not None and manifest.domain_uuid != domain_uuid:
            raise InvalidError(
                f"the manifest is of another domain: uuid={domain_uuid} manifest_uuid={manifest.domain_uuid}.",
                fix="Restore each domain from its own manifest.",
            )
        persisted = None
        if manifest is not None:
            persisted = PersistedManifest(
                encode_manifest(manifest), manifest.last_seqno, manifest.epoch, manifest.number
            )
        await self.wait_until_leading(timeout_s)
        leader = self._leader
        assert leader is not None
        await leader.reset(domain_uuid, persisted)
        try:
            await self.wait_until_leading(timeout_s)
        except UnavailableError as error:
            # The reset is done, so UnavailableError would be wrong. If another process opened the domain, all is well.
            failure = self._failures.last
            if failure is not None:
                raise UnknownOutcomeError(
                    f"the domain was reset but could not be opened: domain={self.name} uuid={domain_uuid} "
                    f"cause={failure.message!r}.",
                    fix="Fix the cause; the domain then opens automatically.",
                ) from error

    async def _forward_and_sync(self, ask: Callable[[], Awaitable[int]]) -> int:
        self._check_open()
        if self._settings.may_lead:
            # The task starts only when this call waits. The request is waiting at that time (see `_wants_lease`).
            self._candidacy.start()
        seqno = await ask()
        try:
            await self.sync()
        except TidemillError as error:
            # The commit is done, so no error may be raised for it, even while this process is closing.
            _log.warning("committed, but not readable here yet", domain=self.name, cause=error.message)
        return seqno

    # following ----------------------------------------------------------------------------------

    async def _run_barrier_round(self) -> None:
        """Run one round of the barrier."""
        leader = self._leader
        if leader is not None and not leader.has_ended:
            with contextlib.suppress(FencedError):
                await leader.check_still_leading()
                return
        await self._log.catch_up()
        if self.leading:
            assert self._leader is not None
            self._leader.apply_log()
        else:
            await self._follower.advance()

    async def _follow_log(self) -> None:
        """Keep the follower near the end of the log while another process leads."""
        pause_s = RETRY_FIRST_S
        while True:
            if self.leading:
                await asyncio.sleep(FOLLOW_WAIT_S)
                continue
            if self._log.failure is not None:
                # The state that this handle replayed can no longer be trusted. It ends; a new handle replays the log.
                raise self._log.failure
            try:
                await self._log.wait(FOLLOW_WAIT_S)
                if not self.leading:
                    await self._follower.advance()
            except (UnavailableError, UnknownOutcomeError, MissingError, FencedError) as error:
                self._failures.record(error, following=True)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)
                continue
            self._failures.record_following()
            pause_s = RETRY_FIRST_S
            await asyncio.sleep(self._settings.follow_pause_s)

    # leading ------------------------------------------------------------------------------------

    def _wants_lease(self) -> bool:
        return self._settings.lead or self._requester.has_waiting_callers

    async def _lead_term(self, lease: Lease) -> None:
        """Run one term, from opening the database to stepping down, while the lease is held."""
        context = self._context
        leader = await Leader.open(context, self._log, lease.term)
        try:
            serving = ForwardingServer(context.consensus, context.clock, context.rand, self.name, self._log, leader)
            leader.run_task(serving.run(), name=f"serve {context.log}")
            if not self._settings.lead:
                leader.run_task(self._step_down_when_idle(leader, serving), name=f"linger {context.log}")
            self._leader, self._serving, self._failures.last = leader, serving, None
            self._turned.set()
            await self._follower.release()
            cause = await leader.run()
            if not isinstance(cause, ClosedError | FencedError):
                self._failures.record(cause)
        finally:
            self._leader = self._serving = None
            self._turned.set()
            await leader.aclose()

    async def _step_down_when_idle(self, leader: Leader, serving: ForwardingServer) -> None:
        """Step down a temporary leader once no work is left: neither its own requests nor those of others.

        A request that it executed but did not answer would otherwise wait for the next leader."""
        while True:
            self._busy = False
            await asyncio.sleep(self._settings.linger_s)
            if not self._requester.has_waiting_callers and not self._busy and not serving.is_busy:
                leader.step_down(ClosedError(f"no work is left for a temporary leader: domain={self.name}."))
                return

    # closing ------------------------------------------------------------------------------------

    def trouble(self) -> str:
        """Return a failure that persists, see `FailureRecord.persistent`, or why forwarded requests wait; "" without
        one."""
        if self._closed is not None:
            return self._closed.message
        if self._serving is not None and self._serving.trouble:
            return f"Requests of other processes wait: domain={self.name} cause={self._serving.trouble!r}."
        failure = self._failures.persistent()
        if failure is None:
            return ""
        return f"The domain cannot be led or followed: domain={self.name} cause={failure.message!r}."

    async def wait_until_ended(self) -> None:
        await self._ended.wait()

    async def aclose(self) -> None:
        """Stop, and release the lease so that another process can lead immediately. No flush: the log has
        everything."""
        if self._closing:
            return
        self._closing = True
        self._closed = self._closed or ClosedError(f"the domain is closed: domain={self.name}.")
        self._turned.set()
        await self._tasks.aclose()
        await self._requester.aclose()
        await self._barrier.aclose()
        await self._follower.release()
        await self._log.aclose()
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._candidacy.release_lease()
        except (TidemillError, TimeoutError) as error:
            _log.info("lease not released; it will expire", domain=self.name, cause=str(error))

    def _task_failed(self, name: str, error: BaseException) -> None:
        _log.error("a task of the domain failed", domain=self.name, task=name, cause=str(error))
        broken = (
            error
            if isinstance(error, TidemillError)
            else ClosedError(f"a task failed: task={name!r} reason={error!r}.")
        )
        self._failures.record(broken)
        self._closed = self._closed or broken
        self._turned.set()
        self._ended.set()
