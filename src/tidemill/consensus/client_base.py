"""The methods of the contract, common to all backends, and the background loop of a client.

Each method creates an operation, validates it, passes it to the backend's `_submit`, and compares the answer with what
this client has seen before (`rollback_detection`).

A consensus client is the only way of its process to consensus. So no single request, answer or notification may end its
loop: the loop fails the work in hand and continues with the rest. After any other failure the error is reported, and
the loop restarts after a pause.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from tidemill.base.errors import ConflictError, FencedError
from tidemill.base.runtime.tasks import Backoff, RetryState, run_with_retries
from tidemill.consensus.api import REPORT_PREFIX, LogHead, LogSlice
from tidemill.consensus.operations import (
    Acquire,
    AnyOp,
    Append,
    Cas,
    Changed,
    Drop,
    Fence,
    Head,
    HeadOfLog,
    Leases,
    Op,
    Read,
    Release,
    Scan,
    Truncate,
    Wait,
)
from tidemill.consensus.rollback_detection import RollbackDetector


class OwnershipCheck(Protocol):
    """Check that decides whether this process may still acknowledge writes."""

    @property
    def is_stale(self) -> bool:
        """Return whether `assert_owned` must be called first. Only compares a clock."""
        ...

    async def assert_owned(self) -> None:
        """Raise the error that ends this process if it may not acknowledge writes."""
        ...


P = ParamSpec("P")
R = TypeVar("R")


def _method(kind: Callable[P, Op[R]]) -> Callable[Concatenate[ConsensusClientBase, P], Coroutine[Any, Any, R]]:
    """Return the client's method for a kind of operation: it takes the fields of the operation."""

    async def method(self: ConsensusClientBase, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._submit_checked(kind(*args, **kwargs))

    return method


class ConsensusClientBase(abc.ABC):
    """Base of clients: `api.Consensus` over one method. `_submit` raises the outcome or returns the operation's result.

    Invariant: once an answer showed that the engine returned to an earlier state, every method raises
    StoreRolledBackError (`rollback_detection`).
    """

    seen: RollbackDetector
    life: str = ""
    """The server's current life, "" if the engine has none.

    Commits may be lost between two lives, but not those that this client had seen: that is checked before a new life is
    adopted.
    """
    owner: OwnershipCheck | None = None
    """The check of this process's ownership.

    While it is stale (after the process was frozen), it is consulted before a write of a log or register is
    acknowledged. Status reports are exempt, so that a process that must end can publish the reason.
    """

    @abc.abstractmethod
    async def _submit(self, op: AnyOp) -> Any: ...

    @abc.abstractmethod
    async def _wait(self, op: Wait, timeout_s: float) -> bool: ...

    @abc.abstractmethod
    def trouble(self) -> str: ...

    @abc.abstractmethod
    async def aclose(self) -> None: ...

    async def _submit_checked(self, operation: Op[R]) -> R:
        operation.validate()
        op = cast(AnyOp, operation)
        seen = self.seen
        if seen.lost is not None:
            raise seen.lost
        floor = seen.lower_bound(op)
        try:
            answer: R = await self._submit(op)
        except (ConflictError, FencedError) as refused:
            seen.check(op, floor, refused.current, done=False)
            raise
        seen.check(op, floor, answer, done=True)
        if self.owner is not None and self.owner.is_stale and isinstance(op, Append | Cas) and not _is_report(op):
            await self.owner.assert_owned()
        return answer

    head = _method(Head)
    cas = _method(Cas)
    drop = _method(Drop)
    scan = _method(Scan)
    log_head = _method(HeadOfLog)
    fence = _method(Fence)
    truncate = _method(Truncate)
    changed = _method(Changed)
    acquire = _method(Acquire)
    release = _method(Release)
    leases = _method(Leases)

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        return await self._submit_checked(Append(log, term, expected_next, tuple(records), nonce))

    async def read(self, log: str, start: int, limit_records: int = 1000, limit_bytes: int = 4 << 20) -> LogSlice:
        return await self._submit_checked(Read(log, start, max(1, limit_records), limit_bytes))

    async def wait(self, log: str, beyond: int, timeout_s: float) -> bool:
        if timeout_s <= 0:
            return (await self.log_head(log)).next > beyond
        op = Wait(log, beyond)
        op.validate()
        if self.seen.lost is not None:
            raise self.seen.lost
        return await self._wait(op, timeout_s)


def _is_report(op: AnyOp) -> bool:
    return isinstance(op, Cas) and op.key.startswith(REPORT_PREFIX)


FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0


async def run_supervised(name: str, body: Callable[[], Awaitable[None]], report: Callable[[str], None]) -> None:
    """Run `body` forever. Every error, of any type, is passed to the callback as a sentence before the pause."""
    now_s, restarts = asyncio.get_running_loop().time, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    attempts = RetryState(
        name, lambda error, paused: report(f"{name} failed: {error}"), now_s, restarts, may_pause=False
    )
    await run_with_retries(body, attempts)
