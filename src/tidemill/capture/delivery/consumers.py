"""Consumers of the fragments of the collector: sinks, which make changes durable and may block the capture (the topic
writer), and taps, which see every committed change as it passes by, in a synchronous call (shapes).

    sink    awaited; sends flush notices; its error ends the session                     the topic writer
    tap     synchronous; may owe a flush notice for a commit; its error ends only itself shapes

Invariant (no early confirm): the LSN confirmed to PostgreSQL never passes what every sink has flushed.

The sinks of a session are fixed when it starts. Flush notices go through the collector's own queue, never inline. So a
notice sent while a commit is being handled is processed after that commit's registration.

Invariant (isolation): no error that a tap raises, of any type, reaches the collector. The tap is informed that it
ended, gets nothing more of that transaction, and restarts with the next one; it missed the changes in between.

Invariant (transaction boundaries): a tap joins at the beginning of a transaction. A removed tap gets nothing more, not
even the rest of the current fragment.

Invariant (replays): taps outlive sessions. After a restart the stream repeats what was not confirmed, and a tap
recognises it by position.

Invariant (carried relations): before a session shows a relation as captured, it informs the taps which relations it
carries on. Any other one is re-snapshotted, if it is captured at all: changes are missing between the old stream and
the new one.

Invariant (lost relations): taps are informed as soon as a relation is known to be no longer carried. Everything built
on it ends, and nothing is built on it until it is captured again. (The truncate that the converter adds may be dropped
as a replay.) A shape that needs only unaffected columns continues. For its sake the changes of the relation still
arrive, and sessions carry it on, until the relation is captured again or more of it is lost (unaffected_columns.py).

Invariant (durable taps): a tap that keeps something over a restart has a name for it. The capture's row has the names
of the taps that saw everything that was confirmed; they are written before the stream begins. If the name of a tap is
not there when a session begins, the tap may have missed changes, of this process or of another one: it drops what it
kept, and takes another name. It does the same if it lets a commit be confirmed that it has not stored.

Invariant (owed notices): a notice that a tap owes is registered with the commit, under its consumer's name, and
confirmed by a flush notice. A tap that cannot even end would owe it forever: so the session ends, and the next one
begins without it.

Invariant (one history): if the captured database has returned to an earlier state, the positions that a tap has seen do
not order what follows. Everything built on them ends, and the next transaction counts as the first one, at any
position.

`take` runs in the capture's turn of the event loop and must be cheap. A tap with more work queues it, bounds the queue,
and ends what falls behind. The cost of taps is measured and reported in the capture's facts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.tasks import error_sentence
from tidemill.capture.changes import Fragment

log = structlog.get_logger()


class FlushNotices(Protocol):
    def report_flushed(self, consumer: str, position: ChangePosition) -> None:
        """Report that `consumer` has stored everything up to and including `position` durably. May be called from any
        task of the loop.
        """
        ...


class Sink(Protocol):
    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        """Process the fragment; return the names of consumers that will send `report_flushed` for it (touched ones).

        Called in commit order, one call at a time; must not wait for durability. A commit fragment goes to every sink
        even if it changes nothing for it. Replayed fragments (after a restart) are recognised by position and still
        reported as flushed. An error ends the session.
        """
        ...

    async def aclose(self) -> None: ...


class TapSession(Protocol):
    """Methods of a session that a durable tap needs."""

    def report_flushed(self, consumer: str, position: ChangePosition) -> None:
        """Report that `consumer` has stored everything up to and including `position` durably."""
        ...

    async def store_tap_names(self) -> None:
        """Write the current names of the taps into the capture's row. Raises the catalogue's errors; after an unknown
        outcome the names may have been written.
        """
        ...


class Tap(Protocol):
    name: str
    """Name of what it keeps over a restart; "" if it keeps nothing."""
    consumer: str
    """Name under which it owes notices."""

    def begin_session(self, last: Collection[str]) -> None:
        """Begin a session whose stream starts where the taps of these names have seen everything before."""
        ...

    def begin_stream(self, stream: TapSession, confirmed_lsn: int, wal_end: int = 0) -> None:
        """Begin the stream: every later commit arrives, and confirmed ones do not arrive again. Commits below `wal_end`
        were written before the stream began, which catches up with them.
        """
        ...

    def process_fragment(self, fragment: Fragment) -> Collection[str]:
        """Process fragments in commit order; return the consumers that owe a notice for this commit. Must be cheap,
        because neither capture nor tables wait for it.
        """
        ...

    def mark_incomplete(self, reason: str) -> None:
        """Note that `take` raised: everything built from earlier fragments is incomplete from here on. The next call of
        `take` begins a later transaction.
        """
        ...

    def set_carried_relations(self, oids: Collection[int]) -> None:
        """Note that a session begins that carries these relations on."""
        ...

    def reset_history(self) -> None:
        """Note that the captured database now has another history."""
        ...

    def lost(self, oid: int, reason: str, columns: frozenset[str] = frozenset()) -> bool:
        """Note that changes of this relation are left out from now on, or were already, except for shapes that need
        only these columns. Returns whether there are any.
        """
        ...


class TapRegistry:
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
        """Error that prevented a tap with a name from ending."""

    def add(self, tap: Tap) -> None:
        """Add a tap, which sees every transaction that begins from now on."""
        self._joining.append(tap)

    def remove(self, tap: Tap) -> None:
        self._joining = [each for each in self._joining if each is not tap]
        self._active = [each for each in self._active if each is not tap]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(tap.name for tap in [*self._active, *self._joining] if tap.name))

    def begin_session(self, last: Collection[str], era: int = 0) -> None:
        """Begin a session. `era`: number of the captured database's history."""
        self._broken = ""
        if self._era not in (None, era):
            for tap in [*self._active, *self._joining]:
                self._call_isolated(tap, tap.reset_history)
            self._joining, self._active = [*self._active, *self._joining], []
        self._era = era
        for tap in [*self._active, *self._joining]:
            self._call_isolated(tap, lambda tap=tap: tap.begin_session(last))  # type: ignore[misc]

    def begin_stream(self, stream: TapSession, confirmed_lsn: int, wal_end: int = 0) -> None:
        for tap in [*self._active, *self._joining]:
            self._call_isolated(tap, lambda tap=tap: tap.begin_stream(stream, confirmed_lsn, wal_end))  # type: ignore[misc]

    def dispatch_fragment(self, fragment: Fragment) -> set[str]:
        """Pass the fragment to every tap; return the consumers that owe a notice for it. Raises no error of a tap, but
        UnavailableError if a named tap could not end.
        """
        owing: set[str] = set()
        if fragment.begins:
            self._active += self._joining
            self._joining = []
        if not self._active:
            return owing
        started_s = self._clock.monotonic_s()
        for tap in list(self._active):
            if not any(tap is each for each in self._active):
                continue  # one tap may remove another
            took = self._call_isolated(tap, lambda tap=tap: owing.update(tap.process_fragment(fragment)))  # type: ignore[misc]
            if not took and tap.name:
                owing.add(tap.consumer)  # until its end is durable
        took_s = self._clock.monotonic_s() - started_s
        self._busy_s += took_s
        self._longest_s = max(self._longest_s, took_s)
        if self._broken:
            raise UnavailableError(f"a tap could not end, so the session restarts without it: error={self._broken}.")
        return owing

    def set_carried_relations(self, oids: Collection[int]) -> None:
        """Inform the taps that a session begins that carries these relations on."""
        for tap in [*self._active, *self._joining]:
            self._call_isolated(tap, lambda tap=tap: tap.set_carried_relations(oids))  # type: ignore[misc]

    def lose_relation(self, oid: int, reason: str, columns: frozenset[str] = frozenset()) -> bool:
        """Inform the taps that changes of this relation are left out from some transaction on, or are only for shapes
        that need only these columns. Returns whether there are any.
        """
        goes_on: list[bool] = []
        for tap in [*self._active, *self._joining]:
            self._call_isolated(tap, lambda tap=tap: goes_on.append(tap.lost(oid, reason, columns)))  # type: ignore[misc]
        return any(goes_on)

    def facts(self) -> dict[str, object]:
        """Return facts for reports. `tap_busy_ms`: event loop time that taps used so far. `tap_longest_ms`: the most
        expensive fragment.
        """
        facts: dict[str, object] = {
            "taps": len(self._active) + len(self._joining),
            "tap_busy_ms": round(self._busy_s * 1000, 1),
            "tap_longest_ms": round(self._longest_s * 1000, 1),
        }
        if self.failures:
            facts |= {"tap_failures": self.failures, "tap_error": self.last_error}
        return facts

    def _call_isolated(self, tap: Tap, what: Callable[[], None]) -> bool:
        """Call a tap; return False if it raised, in which case it was ended."""
        try:
            what()
            return True
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Also CancelledError: a synchronous call cannot be cancelled, so this one leaked from a future.
            self._end_tap(tap, error)
            return False

    def _end_tap(self, tap: Tap, error: BaseException) -> None:
        self.failures += 1
        self.last_error = error_sentence(error)
        log.error("a tap failed and restarts", tap=type(tap).__name__, error=self.last_error, exc_info=error)
        self._active = [each for each in self._active if each is not tap]
        self._joining.append(tap)
        try:
            tap.mark_incomplete(self.last_error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as again:
            # It cannot even end, so it would continue with a gap. It is removed permanently.
            self.remove(tap)
            self.last_error = f"{self.last_error}; it could not end: {error_sentence(again)}"
            if tap.name:
                self._broken = self.last_error
            log.error("a tap could not end and is left out", tap=type(tap).__name__, exc_info=again)
