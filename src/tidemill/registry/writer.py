"""Changes of the registry, one after the other. Each is decided on the head that its commit expects, and carries a
nonce by which its outcome can be found later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, FencedError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import REGISTRY_HEADS
from tidemill.metastore.rows.registry import RegistryHeadRow
from tidemill.registry.errors import RegistryError
from tidemill.registry.limits import WRITE_BUDGET_S
from tidemill.registry.store import HEAD, RegistryStore
from tidemill.registry.transitions import Change

PAUSE_S = 0.05
NONCE_LETTERS = 12
ATTEMPTS = 64
"""Number of nonces in the head. A process that reads the head again before this many further changes learns the
outcome of its change."""

T = TypeVar("T")


class UnknownAttempt(NamedTuple, Generic[T]):
    """Attempt with an unknown outcome: what it expected of the head, and its answer if it was written."""

    seqno: int
    changes: int
    answer: T


class _OutcomeHiddenError(UnknownOutcomeError):
    """Too many later changes: the outcome can no longer be determined."""


class RegistryWriter:
    """Writer of one process; any number of processes have one. `head` is the newest that this one read."""

    def __init__(self, metastore: Metastore, book: RegistryStore, clock: Clock, rand: Rand) -> None:
        self._metastore = metastore
        self._book = book
        self._clock = clock
        self._rand = rand
        self._line = asyncio.Lock()
        """Lock that lets the changes of one process wait for each other instead of conflicting at the commit."""
        self.head = RegistryHeadRow("head")

    async def read_head(self) -> tuple[int, RegistryHeadRow]:
        seqno, self.head = await self._book.head()
        return seqno, self.head

    async def apply_change(self, decide: Callable[[RegistryHeadRow], Awaitable[Change[T]]]) -> T:
        """Write what `decide(head)` returns, unless another process was faster; then decide again.

        Raises the refusal of `decide`, UnavailableError, UnknownOutcomeError.
        """
        until_s = self._clock.monotonic_s() + WRITE_BUDGET_S
        tried: dict[str, UnknownAttempt[T]] = {}
        async with self._line:
            while True:
                error: TidemillError
                try:
                    return (await self._attempt(decide, tried)).answer
                except _OutcomeHiddenError:
                    raise
                except (ConflictError, FencedError, UnknownOutcomeError) as lost:
                    error = lost
                except UnavailableError as failed:
                    if not tried:
                        raise
                    error = failed
                if self._clock.monotonic_s() > until_s:
                    cause = f"cause={error.message!r}"
                    if tried:
                        raise UnknownOutcomeError(
                            f"the registry may have been changed: {cause}.", fix="Read the subject again."
                        ) from error
                    raise UnavailableError(
                        f"the registry was changed concurrently on every attempt: {cause}.", fix="Retry."
                    ) from error
                await asyncio.sleep(self._rand.uniform(0, PAUSE_S))

    async def _attempt(
        self, decide: Callable[[RegistryHeadRow], Awaitable[Change[T]]], tried: dict[str, UnknownAttempt[T]]
    ) -> Change[T] | UnknownAttempt[T]:
        seqno, head = await self.read_head()
        landed = _find_landed(tried, seqno, head)
        if landed is not None:
            return landed
        # A decision that writes nothing counts only if the head is unchanged: then all its reads are of one state.
        # The commit of any other decision checks that.
        try:
            change = await decide(head)
        except RegistryError as refused:
            await self._require_unchanged(seqno, refused)
            raise
        if not change.rows:
            await self._require_unchanged(seqno)
            return change
        nonce = self._rand.nonce()[:NONCE_LETTERS]
        after = replace(change.head, changes=head.changes + 1, attempts=(*head.attempts, nonce)[-ATTEMPTS:])
        try:
            await self._metastore.commit([*change.rows, REGISTRY_HEADS.encode(after)], expects={HEAD: seqno})
        except UnknownOutcomeError:
            tried[nonce] = UnknownAttempt(seqno, head.changes, change.answer)
            raise
        self.head = after
        return change

    async def _require_unchanged(self, seqno: int, cause: Exception | None = None) -> None:
        """Raise ConflictError if the head was written since it had this number."""
        if (await self.read_head())[0] != seqno:
            raise ConflictError("the registry was changed concurrently.") from cause


def _find_landed(tried: dict[str, UnknownAttempt[T]], seqno: int, head: RegistryHeadRow) -> UnknownAttempt[T] | None:
    """Return the attempt that was written, if there is one. Attempts that were certainly not written, and never will
    be, are forgotten.

    Raises UnknownOutcomeError when too many later changes followed for the head to show the outcome.
    """
    for nonce, attempt in list(tried.items()):
        if nonce in head.attempts:
            return attempt
        if head.changes - attempt.changes > ATTEMPTS:
            raise _OutcomeHiddenError(
                "later changes hide whether the registry was changed.", fix="Read the subject again."
            )
        if attempt.seqno != seqno:
            del tried[nonce]
    return None
