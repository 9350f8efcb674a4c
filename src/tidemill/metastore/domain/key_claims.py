"""The line of commits that depend on what rows hold, and of those that must not overtake one of them.

A *claim* reserves keys: those its commit expects something of, and those it will write. It stands in line from
before it looks at the database until its rows are in a group (or refused). So between its look and its proposal
nobody writes what it looked at, although the look may wait for a read from the bucket.

Q1  A claim looks only when no group on its way writes a key it expects (such a row is about to change), and no
    claim before it will write one.
Q2  Nobody joins a group with a key that a claim in line expects; they stand in line behind it.
Q3  A claim waits only for groups and for claims before it: there is no cycle, and nobody is passed for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Set

from tidemill.base.errors import TidemillError

Writing = Callable[[Set[bytes]], bool]
"""Does a group on its way write any of these keys?"""


class Claim:
    __slots__ = ("expects", "turn", "writes")

    def __init__(self, expects: Set[bytes], writes: Set[bytes]) -> None:
        self.expects = expects
        self.writes = writes
        self.turn: asyncio.Future[None] | None = None
        """Set while it waits."""


class ClaimQueue:
    """Plain calls only; `Claim.turn` is what their callers wait for."""

    def __init__(self) -> None:
        self._claims: dict[Claim, None] = {}

    def __bool__(self) -> bool:
        return bool(self._claims)

    def holds(self, keys: Collection[bytes]) -> bool:
        """Must a commit that writes `keys` and expects nothing stand in line? (Q2)"""
        return any(not claim.expects.isdisjoint(keys) for claim in self._claims)

    def enter(self, claim: Claim, writing: Writing) -> bool:
        """Take the last place. True when it may look at once; else wait for `claim.turn`."""
        free = self._free(claim, self._claims, writing)
        self._claims[claim] = None
        if not free:
            claim.turn = asyncio.get_running_loop().create_future()
        return free

    def leave(self, claim: Claim, writing: Writing) -> None:
        self._claims.pop(claim, None)
        self.advance(writing)

    def advance(self, writing: Writing) -> None:
        """A group is through or a claim is gone: whoever may look now is told, in the order of the line."""
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
    def _free(claim: Claim, before: Iterable[Claim], writing: Writing) -> bool:
        for other in before:
            if not other.writes.isdisjoint(claim.expects) or not other.expects.isdisjoint(claim.writes):
                return False
        return not (claim.expects and writing(claim.expects))
