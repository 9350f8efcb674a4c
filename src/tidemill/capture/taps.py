"""Taps: who sees every committed change as it passes by, and holds nothing back (shapes).

    sink    awaited, durable, sends flush notices, its error ends the session       the topic writer
    tap     a plain call, keeps nothing durable, its error ends the tap alone       shapes

X1  Nothing that a tap raises, of whatever type, reaches the collector. The tap is told that it ended, gets nothing
    more of that transaction, and starts afresh with the next one: between the two it missed something.
X2  A tap joins at the beginning of a transaction; a removed one gets nothing more, not even the fragment at hand.
X3  Taps outlive sessions. After a restart the stream repeats what was not confirmed: a tap recognises it by position.

`take` runs on the capture's turn of the loop and must be cheap: whoever has work to do queues it, bounds the queue,
and ends what falls behind. What taps cost is measured and is among the capture's facts.
"""

from __future__ import annotations

from typing import Protocol

import structlog

from tidemill.base.clock import Clock
from tidemill.base.tasks import sentence
from tidemill.capture.changes import Fragment

log = structlog.get_logger()


class Tap(Protocol):
    def take(self, fragment: Fragment) -> None:
        """Fragments in commit order. Must be cheap: neither capture nor tables wait for it."""
        ...

    def ended(self, reason: str) -> None:
        """`take` raised: everything built from earlier fragments is incomplete from here on. The next call of
        `take` begins a later transaction."""
        ...


class Taps:
    """The taps of one capture, over all its sessions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._joining: list[Tap] = []
        self._active: list[Tap] = []
        self.failures = 0
        self.last_error = ""
        self._busy_s = 0.0
        self._longest_s = 0.0

    def add(self, tap: Tap) -> None:
        """It sees every transaction that begins from now on."""
        self._joining.append(tap)

    def remove(self, tap: Tap) -> None:
        self._joining = [each for each in self._joining if each is not tap]
        self._active = [each for each in self._active if each is not tap]

    def take(self, fragment: Fragment) -> None:
        """Hand the fragment to every tap. Raises nothing that a tap raises (X1)."""
        if fragment.begins:
            self._active += self._joining
            self._joining = []
        if not self._active:
            return
        started_s = self._clock.monotonic_s()
        for tap in list(self._active):
            # One tap may remove another (X2).
            if any(tap is each for each in self._active):
                self._hand(tap, fragment)
        took_s = self._clock.monotonic_s() - started_s
        self._busy_s += took_s
        self._longest_s = max(self._longest_s, took_s)

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

    def _hand(self, tap: Tap, fragment: Fragment) -> None:
        try:
            tap.take(fragment)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Also CancelledError: a plain call cannot be cancelled, so one that comes out of it leaked from a future.
            self._end(tap, error)

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
            log.error("a tap could not end and is left out", tap=type(tap).__name__, exc_info=again)
