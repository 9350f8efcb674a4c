"""Changes of the registry, one after the other, each decided from what it is written over (RG4, RG5)."""

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
from tidemill.registry.settings import WRITE_BUDGET_S
from tidemill.registry.store import HEAD, RegistryStore
from tidemill.registry.transitions import Change

PAUSE_S = 0.05
NONCE_LETTERS = 12
ATTEMPTS = 64
"""Nonces that the head holds: whoever looks again before so many more changes learns what became of its own."""

T = TypeVar("T")


class Tried(NamedTuple, Generic[T]):
    """An attempt whose outcome nobody told us: what it expected of the head, and what it would have answered."""

    seqno: int
    changes: int
    answer: T


class _Hidden(UnknownOutcomeError):
    """Too much was changed since."""


class Changes:
    """One process's; any number of processes have one. `head` is the newest that this one saw."""

    def __init__(self, metastore: Metastore, book: RegistryStore, clock: Clock, rand: Rand) -> None:
        self._metastore = metastore
        self._book = book
        self._clock = clock
        self._rand = rand
        self._line = asyncio.Lock()
        """Changes of one process wait for each other here instead of losing to each other there."""
        self.head = RegistryHeadRow("head")

    async def looked(self) -> tuple[int, RegistryHeadRow]:
        seqno, self.head = await self._book.head()
        return seqno, self.head

    async def make(self, decide: Callable[[RegistryHeadRow], Awaitable[Change[T]]]) -> T:
        """Write what `decide(head)` says, if nobody was faster; else ask it again.

        Raises what it refuses with, UnavailableError, UnknownOutcomeError.
        """
        until_s = self._clock.monotonic_s() + WRITE_BUDGET_S
        tried: dict[str, Tried[T]] = {}
        async with self._line:
            while True:
                error: TidemillError
                try:
                    return (await self._attempt(decide, tried)).answer
                except _Hidden:
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
                            f"The registry may have been changed: {cause}.", fix="Look again."
                        ) from error
                    raise UnavailableError(f"Others changed the registry each time: {cause}.", fix="Retry.") from error
                await asyncio.sleep(self._rand.uniform(0, PAUSE_S))

    async def _attempt(
        self, decide: Callable[[RegistryHeadRow], Awaitable[Change[T]]], tried: dict[str, Tried[T]]
    ) -> Change[T] | Tried[T]:
        seqno, head = await self.looked()
        landed = _landed(tried, seqno, head)
        if landed is not None:
            return landed
        try:
            change = await decide(head)
        except RegistryError as refused:
            # It counts when the head is still as it was: all that was read after it is of one moment then.
            if (await self.looked())[0] == seqno:
                raise
            raise ConflictError("The registry was changed while it was looked at.") from refused
        if not change.rows:
            return change
        nonce = self._rand.nonce()[:NONCE_LETTERS]
        after = replace(change.head, changes=head.changes + 1, attempts=(*head.attempts, nonce)[-ATTEMPTS:])
        try:
            await self._metastore.commit([*change.rows, REGISTRY_HEADS.encode(after)], expects={HEAD: seqno})
        except UnknownOutcomeError:
            tried[nonce] = Tried(seqno, head.changes, change.answer)
            raise
        self.head = after
        return change


def _landed(tried: dict[str, Tried[T]], seqno: int, head: RegistryHeadRow) -> Tried[T] | None:
    """The attempt that landed, if one did. Those that certainly did not, and never will, are forgotten.

    Raises UnknownOutcomeError when so much was changed since that the head does not tell.
    """
    for nonce, attempt in list(tried.items()):
        if nonce in head.attempts:
            return attempt
        if head.changes - attempt.changes > ATTEMPTS:
            raise _Hidden("Later changes hide whether the registry was changed.", fix="Look again.")
        if attempt.seqno != seqno:
            del tried[nonce]
    return None
