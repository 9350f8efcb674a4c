"""Queue of commits that expect rows to have certain seqnos, and of commits that must not overtake one of them.

A *claim* reserves keys: those whose rows its commit expects, and those that it will write. It is in the queue from
before it reads the database until its rows are in a group (or it is rejected). So between its read and its proposal no
other commit writes the rows it read, although the read may wait for the bucket.

- Invariant (stable reads): a claim reads only when no pending group writes a key it expects (such a row is about to
  change), and no earlier claim will write one.
- Invariant (no overtaking): a commit that writes a key which a queued claim expects does not join a group; it enters
  the queue.
- Invariant (progress): a claim waits only for groups and for earlier claims. So there is no deadlock and no starvation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Set

from tidemill.base.errors import TidemillError

IsBeingWritten = Callable[[Set[bytes]], bool]
"""Return whether a pending group writes any of these keys."""


class KeyClaim:
    """Keys that a queued commit expects and writes."""

    __slots__ = ("expects", "turn", "writes")

    def __init__(self, expects: Set[bytes], writes: Set[bytes]) -> None:
        self.expects = expects
        self.writes = writes
        self.turn: asyncio.Future[None] | None = None
        """Set while the claim waits."""


class ClaimQueue:
    """Queue of claims. All calls are synchronous; callers wait for `KeyClaim.turn`."""

    def __init__(self) -> None:
        self._claims: dict[KeyClaim, None] = {}

    def __bool__(self) -> bool:
        return bool(self._claims)

    def must_queue(self, keys: Collection[bytes]) -> bool:
        """Return whether a commit that writes `keys` and expects nothing must enter the queue."""
        return any(not claim.expects.isdisjoint(keys) for claim in self._claims)

    def enqueue(self, claim: KeyClaim, writing: IsBeingWritten) -> bool:
        """Append a claim. Return True if it may read immediately; otherwise wait for `claim.turn`."""
        free = self._is_free(claim, self._claims, writing)
        self._claims[claim] = None
        if not free:
            claim.turn = asyncio.get_running_loop().create_future()
        return free

    def remove(self, claim: KeyClaim, writing: IsBeingWritten) -> None:
        self._claims.pop(claim, None)
        self.wake_ready(writing)

    def wake_ready(self, writing: IsBeingWritten) -> None:
        """Wake the claims that may read now, in queue order, after a group ended or a claim left."""
        if not self._claims:
            return
        writes: set[bytes] = set()
        expects: set[bytes] = set()
        for claim in self._claims:
            turn = claim.turn
            if (
                turn is not None
                and not turn.done()
                and claim.expects.isdisjoint(writes)
                and claim.writes.isdisjoint(expects)
                and not (claim.expects and writing(claim.expects))
            ):
                turn.set_result(None)
            writes |= claim.writes
            expects |= claim.expects

    def fail(self, error: TidemillError) -> None:
        for claim in self._claims:
            if claim.turn is not None and not claim.turn.done():
                claim.turn.set_exception(error)

    @staticmethod
    def _is_free(claim: KeyClaim, before: Iterable[KeyClaim], writing: IsBeingWritten) -> bool:
        for other in before:
            if not other.writes.isdisjoint(claim.expects) or not other.expects.isdisjoint(claim.writes):
                return False
        return not (claim.expects and writing(claim.expects))
