"""Back-off for captures that this node cannot run: when to hand one over, and how long not to offer to run it again.

- Failing: a capture has neither streamed nor copied for NEVER_WORKED_LIMIT_S, or for LOST_LIMIT_S if it worked
  since this node acquired it. The node stops offering it, even while it holds it, and hands it over once another node
  offers it.
- Handed over: the node does not offer the capture for FIRST_PAUSE_S, and twice as long each time, at most
  LONGEST_PAUSE_S. It still takes a free capture that no other node takes (balancer.py).
- Working: all of that is forgotten.

Nodes learn from each other's offers who can run a capture. A capture that this node cannot run and another node can is
tried here for half a minute, more and more rarely.

If the node that took over a capture fails as well and then works, this node was not the cause: it offers the capture
again immediately. The next pause is as long as it would have been.

Losing a capture that worked is mostly caused by the database, and moving it would not help. Such a loss is tolerated
longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.node.captures.placement import Willing

NEVER_WORKED_LIMIT_S = 30.0
LOST_LIMIT_S = 120.0
FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 6 * 3600.0
"""Longest pause. Another node runs the capture in the meantime; a long pause only leaves this node below its share."""


@dataclass
class _CaptureHealth:
    """State of a capture that this node holds."""

    worked: bool = False
    fails_since_s: float | None = None
    error: str = ""


@dataclass
class _Pause:
    """Time during which a capture is not offered."""

    length_s: float
    until_s: float
    error: str
    others_failed: bool = False


class CaptureBackoff:
    """Back-off state of one node. `now_s` is monotonic."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._holdings: dict[str, _CaptureHealth] = {}
        self._pauses: dict[str, _Pause] = {}
        """Pauses, retained until the capture works here, because the next pause is twice as long."""

    def record_health(self, capture: str, health: str | None, now_s: float) -> None:
        """Record the health of a held capture at each poll. None means that it streams or copies; otherwise its
        error, or ""."""
        holding = self._holdings.setdefault(capture, _CaptureHealth())
        if health:
            holding.fails_since_s = now_s if holding.fails_since_s is None else holding.fails_since_s
            holding.error = health
            return
        holding.fails_since_s = None
        if health is None:
            holding.worked = True
            self._pauses.pop(capture, None)

    def forget_holding(self, capture: str) -> None:
        """Forget the holding of a capture that this node no longer holds."""
        self._holdings.pop(capture, None)

    def is_failing(self, capture: str, now_s: float) -> bool:
        """Return whether a held capture has failed for longer than is tolerated."""
        holding = self._holdings.get(capture)
        if holding is None or holding.fails_since_s is None:
            return False
        return now_s - holding.fails_since_s >= (LOST_LIMIT_S if holding.worked else NEVER_WORKED_LIMIT_S)

    def start_pause(self, capture: str, now_s: float) -> str:
        """Start the next pause of a capture and return the error with which it failed."""
        last = self._pauses.get(capture)
        length_s = min(LONGEST_PAUSE_S, last.length_s * 2) if last is not None else FIRST_PAUSE_S
        error = self._holdings[capture].error
        self._pauses[capture] = _Pause(length_s, now_s + length_s, error)
        return error

    def observe_offers(self, holders: Mapping[str, str], willing: Willing, now_s: float) -> None:
        """Record, at each poll, which node holds each capture and what the nodes offer."""
        for capture, pause in self._pauses.items():
            holder = holders.get(capture, "")
            if holder == self._node or holder not in willing:
                continue
            if capture not in willing[holder]:
                pause.others_failed = True
            elif pause.others_failed:
                pause.others_failed, pause.until_s = False, now_s

    def withheld_captures(self, now_s: float) -> frozenset[str]:
        """Return the captures that this node may run and does not offer."""
        paused = {capture for capture, pause in self._pauses.items() if now_s < pause.until_s}
        return frozenset(paused | {capture for capture in self._holdings if self.is_failing(capture, now_s)})

    def facts(self, now_s: float) -> dict[str, object]:
        """Return the pauses for reports: capture → seconds until it is offered again, and its error."""
        paused = {capture: pause for capture, pause in self._pauses.items() if now_s < pause.until_s}
        return {name: {"for_s": round(each.until_s - now_s), "error": each.error} for name, each in paused.items()}
