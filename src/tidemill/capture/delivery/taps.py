"""Taps: who sees every committed change as it passes by, in a plain call (shapes).

    sink    awaited; sends flush notices; its error ends the session                     the topic writer
    tap     a plain call; may owe a flush notice for a commit; its error ends it alone   shapes

X1  Nothing that a tap raises, of whatever type, reaches the collector. The tap is told that it ended, gets nothing
    more of that transaction, and starts afresh with the next one: between the two it missed something.
X2  A tap joins at the beginning of a transaction; a removed one gets nothing more, not even the fragment at hand.
X3  Taps outlive sessions. After a restart the stream repeats what was not confirmed: a tap recognises it by position.
X4  Before a session says that it captures a relation, taps are told which ones it carries on with. Any other is copied
    anew, if it is captured at all: between what was told of it and what will be, changes are missing.
X5  A relation that is carried no more is told when that is known: what is built on it ends, and nothing is built on it
    anew until it is among the captured ones again. (The truncate that the converter adds may be dropped as a replay.)
    What needs only columns that hold what they held goes on: for its sake the changes of the relation still come, and
    sessions carry it on, until the relation is among the captured ones again or more of it is lost
    (unaffected_columns.py).

X6  A tap that keeps something over a restart has a name, of what it keeps. The capture's row has the names of the taps
    that saw all that was confirmed: they are written before the stream begins. A tap whose name is not there when a
    session begins may have missed changes, of this process or of another: what it keeps is over, and it takes another
    name. So does one that lets a commit be confirmed that it does not hold.
X7  What a tap owes is registered with the commit, under its consumer's name, and confirmed by a notice (K1). One that
    cannot even end owes for ever: the session ends, and the next one begins without it.

X8  Where the captured database has returned to an earlier state, positions that a tap has seen are no order of what
    comes: everything built on them ends, and the next transaction is the first one, whatever its position.

`take` runs on the capture's turn of the loop and must be cheap: whoever has work to do queues it, bounds the queue,
and ends what falls behind. What taps cost is measured and is among the capture's facts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.tasks import sentence
from tidemill.capture.changes import Fragment

log = structlog.get_logger()


class Stream(Protocol):
    """What a tap that keeps something needs of a session."""

    def flushed(self, consumer: str, position: ChangePosition) -> None:
        """`consumer` holds everything up to and including `position` durably."""
        ...

    async def name_taps(self) -> None:
        """Write the names that the taps have now into the capture's row (X6). Raises what the catalogue raises; where
        it is not known whether it is written, it may be."""
        ...


class Tap(Protocol):
    name: str
    """Of what it keeps over a restart (X6); "" when it keeps nothing."""
    consumer: str
    """Under which it owes notices."""

    def claim(self, last: Collection[str]) -> None:
        """A session begins; the stream begins where the taps of these names have seen all before (X6)."""
        ...

    def begin(self, stream: Stream, confirmed_lsn: int, wal_end: int = 0) -> None:
        """The stream begins: every later commit comes, and those that were confirmed do not come again. What commits
        below `wal_end` was written before: the stream catches up with it."""
        ...

    def take(self, fragment: Fragment) -> Collection[str]:
        """Fragments in commit order; returns consumers that owe a notice for this commit. Must be cheap: neither
        capture nor tables wait for it."""
        ...

    def ended(self, reason: str) -> None:
        """`take` raised: everything built from earlier fragments is incomplete from here on. The next call of
        `take` begins a later transaction."""
        ...

    def carried(self, oids: Collection[int]) -> None:
        """A session begins that carries these relations on (X4)."""
        ...

    def went_back(self) -> None:
        """The captured database has another history than so far (X8)."""
        ...

    def lost(self, oid: int, reason: str, columns: frozenset[str] = frozenset()) -> bool:
        """Changes of this relation are left out from now on, or were already, but for those who need only these
        columns. Whether there are any."""
        ...


class Taps:
    """The taps of one capture, over all its sessions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._joining: list[Tap] = []
        self._active: list[Tap] = []
        self.failures = 0
        self._era: int | None = None
        self.last_error = ""
        self._busy_s = 0.0
        self._longest_s = 0.0
        self._broken = ""
        """What kept a tap with a name from ending."""

    def add(self, tap: Tap) -> None:
        """It sees every transaction that begins from now on."""
        self._joining.append(tap)

    def remove(self, tap: Tap) -> None:
        self._joining = [each for each in self._joining if each is not tap]
        self._active = [each for each in self._active if each is not tap]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(tap.name for tap in [*self._active, *self._joining] if tap.name))

    def claim(self, last: Collection[str], era: int = 0) -> None:
        """A session begins (X6, X8); `era`: of the captured database's history."""
        self._broken = ""
        if self._era not in (None, era):
            for tap in [*self._active, *self._joining]:
                self._call(tap, tap.went_back)
            self._joining, self._active = [*self._active, *self._joining], []
        self._era = era
        for tap in [*self._active, *self._joining]:
            self._call(tap, lambda tap=tap: tap.claim(last))  # type: ignore[misc]

    def begin(self, stream: Stream, confirmed_lsn: int, wal_end: int = 0) -> None:
        for tap in [*self._active, *self._joining]:
            self._call(tap, lambda tap=tap: tap.begin(stream, confirmed_lsn, wal_end))  # type: ignore[misc]

    def take(self, fragment: Fragment) -> set[str]:
        """Hand the fragment to every tap; returns who owes a notice for it. Raises nothing that a tap raises (X1), and
        UnavailableError when one could not end (X7)."""
        owing: set[str] = set()
        if fragment.begins:
            self._active += self._joining
            self._joining = []
        if not self._active:
            return owing
        started_s = self._clock.monotonic_s()
        for tap in list(self._active):
            if not any(tap is each for each in self._active):
                continue  # one tap may remove another (X2)
            took = self._call(tap, lambda tap=tap: owing.update(tap.take(fragment)))  # type: ignore[misc]
            if not took and tap.name:
                owing.add(tap.consumer)  # until its end is durable
        took_s = self._clock.monotonic_s() - started_s
        self._busy_s += took_s
        self._longest_s = max(self._longest_s, took_s)
        if self._broken:
            raise UnavailableError(
                f"a tap could not end, and the session begins anew without it: error={self._broken}."
            )
        return owing

    def carried(self, oids: Collection[int]) -> None:
        """A session begins that carries these relations on (X4)."""
        for tap in [*self._active, *self._joining]:
            self._call(tap, lambda tap=tap: tap.carried(oids))  # type: ignore[misc]

    def lose(self, oid: int, reason: str, columns: frozenset[str] = frozenset()) -> bool:
        """From some transaction on changes of this relation are left out, or are for those alone who need only these
        columns (X5): whether there are any."""
        goes_on: list[bool] = []
        for tap in [*self._active, *self._joining]:
            self._call(tap, lambda tap=tap: goes_on.append(tap.lost(oid, reason, columns)))  # type: ignore[misc]
        return any(goes_on)

    def facts(self) -> dict[str, object]:
        """`tap_busy_ms`: time of the loop that taps used so far; `tap_longest_ms`: the dearest fragment."""
        facts: dict[str, object] = {
            "taps": len(self._active) + len(self._joining),
            "tap_busy_ms": round(self._busy_s * 1000, 1),
            "tap_longest_ms": round(self._longest_s * 1000, 1),
        }
        if self.failures:
            facts |= {"tap_failures": self.failures, "tap_error": self.last_error}
        return facts

    def _call(self, tap: Tap, what: Callable[[], None]) -> bool:
        """False: it raised, and was ended."""
        try:
            what()
            return True
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Also CancelledError: a plain call cannot be cancelled, so one that comes out of it leaked from a future.
            self._end(tap, error)
            return False

    def _end(self, tap: Tap, error: BaseException) -> None:
        self.failures += 1
        self.last_error = sentence(error)
        log.error("a tap failed and starts afresh", tap=type(tap).__name__, error=self.last_error, exc_info=error)
        self._active = [each for each in self._active if each is not tap]
        self._joining.append(tap)
        try:
            tap.ended(self.last_error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as again:
            # It cannot even end: it would go on with a gap. It is out for good.
            self.remove(tap)
            self.last_error = f"{self.last_error}; it could not end: {sentence(again)}"
            if tap.name:
                self._broken = self.last_error
            log.error("a tap could not end and is left out", tap=type(tap).__name__, exc_info=again)
