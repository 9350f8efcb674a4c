"""Append to a partition's log in one term, until the outcome is certain or leadership is lost."""

from __future__ import annotations

import asyncio

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.consensus.api import Consensus, LogHead, resolve_append
from tidemill.topics.config.settings import TopicSettings

FENCE_TRIES = 8


class LeadershipLostError(Exception):
    """Signal that this leader must stop.

    `certain`: the append that ended leadership did not happen and never will.
    `fault`: its cause, or None if another leader took over.
    """

    def __init__(self, reason: str, *, certain: bool, fault: BaseException | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.certain = certain
        self.fault = fault


class Appender:
    """Appends to one partition's log in one term.

    The caller has at most one append in flight and passes the next position.
    """

    def __init__(self, consensus: Consensus, log: str, clock: Clock, rand: Rand, settings: TopicSettings) -> None:
        self._consensus = consensus
        self._log = log
        self._clock = clock
        self._rand = rand
        self._settings = settings
        self.term = 0
        self._seen_term = self._seen_next = 0
        """Newest term and next position seen in any head of this log."""

    async def fence(self) -> LogHead:
        """Claim a term above every earlier one, so that older leaders can no longer append. Raises UnavailableError."""
        last: TidemillError = UnavailableError(f"no attempt was made: log={self._log}.")
        term = 0
        for _ in range(FENCE_TRIES):
            try:
                if term == 0:
                    term = (await self._consensus.log_head(self._log)).term + 1
                head = await self._consensus.fence(self._log, term)
                self.term = term
                return head
            except FencedError as fenced:
                # Another node was faster. The assignment decides which node should lead, not this loop.
                last, term = fenced, 0
            except (UnavailableError, UnknownOutcomeError) as error:
                last = error
            await self._pause()
        raise UnavailableError(f"a partition could not be taken over: log={self._log} cause={last}", fix="Retry.")

    def observe_head(self, head: LogHead) -> Appender:
        self._seen_term, self._seen_next = max(self._seen_term, head.term), max(self._seen_next, head.next)
        return self

    def is_overtaken(self, position: int) -> bool:
        """Return whether another leader is known, or the log has entries at or after `position`.

        Two leaders that fenced concurrently can share a term. The first of them to append is the leader; the other one
        detects it by the position.
        """
        return self._seen_term > self.term or self._seen_next > position

    async def append(self, position: int, record: bytes) -> None:
        """Append `record` at `position`; return when it is durable. Raises LeadershipLostError.

        After a lost answer the same attempt (nonce, position) is repeated until it is found in the log or finally
        refused, so it is appended at most once. If consensus reports after the deadline that the record did not land,
        one more attempt is made, because consensus answers again.
        """
        nonce = self._rand.nonce()
        give_up_s = self._clock.monotonic_s() + self._settings.append_budget_s
        doubtful = last = False
        while True:
            landed: bool | None = None
            try:
                await self._consensus.append(self._log, self.term, position, [record], nonce)
                return
            except (ConflictError, FencedError) as refused:
                if not doubtful or await self._is_finally_refused(position, nonce):
                    raise LeadershipLostError(refused.message, certain=True) from refused
                return
            except UnavailableError:
                pass
            except ClosedError as closed:
                raise LeadershipLostError(closed.message, certain=False) from closed
            except UnknownOutcomeError:
                doubtful = True
            if doubtful and (landed := await self._has_landed(position, nonce)):
                return
            late = self._clock.monotonic_s() >= give_up_s
            if late and (last or landed is None):
                silent = UnavailableError(f"the log does not answer: log={self._log}.")
                raise LeadershipLostError(silent.message, certain=not doubtful, fault=silent)
            last = late
            await self._pause()

    async def confirm_leadership(self, position: int) -> None:
        """Check linearizably that this node still leads and has applied the whole log. Raises LeadershipLostError."""
        try:
            head = await self._consensus.log_head(self._log)
        except TidemillError as error:
            raise LeadershipLostError(error.message, certain=True, fault=error) from error
        if self.observe_head(head).is_overtaken(position):
            raise LeadershipLostError(
                f"another leader took over: log={self._log} term={self.term} newer={head.term}.", certain=True
            )

    async def _has_landed(self, position: int, nonce: str) -> bool | None:
        """Return whether the attempt is in the log, or None if consensus does not answer."""
        try:
            return await resolve_append(self._consensus, self._log, position, nonce)
        except MissingError as gone:
            raise LeadershipLostError(gone.message, certain=False) from gone
        except (UnavailableError, UnknownOutcomeError):
            return None

    async def _is_finally_refused(self, position: int, nonce: str) -> bool:
        """Return True if no earlier attempt with an unknown outcome landed, False if one did.

        Raises LeadershipLostError if that cannot be determined.
        """
        try:
            return not await resolve_append(self._consensus, self._log, position, nonce)
        except TidemillError as error:
            raise LeadershipLostError(error.message, certain=False) from error

    async def _pause(self) -> None:
        pause_s = self._settings.retry_pause_s
        await asyncio.sleep(self._rand.uniform(pause_s / 2, pause_s * 1.5))
