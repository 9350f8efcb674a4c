"""Captures that this node holds or held and cannot run: when it gives one up, and how long it then does not offer to.

    fails     it has neither streamed nor copied for NEVER_S, or for LOST_S where it had in this holding: the node does
              not offer the capture any more, also not while it holds it, and gives it up where another one offers it
    given up  for FIRST_S, and twice as long each time, LONGEST_S at most. It still takes what is free and taken by
              nobody (balancer.py, S2)
    works     all of that is forgotten

Y1  The others see by what is offered whom they may give a capture: one that this node cannot run, and another can, is
    tried here for half a minute, more and more rarely.
Y2  Where a node that took over what was given up fails as well, and then works, the trouble was not this node's: it
    offers at once what it gave up. The next pause is as long as it would have been.
Y3  Losing what worked is mostly the database's, and moving helps nothing then: that has longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.node.captures.placement import Willing

NEVER_S = 30.0
LOST_S = 120.0
FIRST_S = 60.0
LONGEST_S = 6 * 3600.0
"""Another node runs it meanwhile: who waits so long is only not yet given its share."""


@dataclass
class _Holding:
    worked: bool = False
    fails_since_s: float | None = None
    error: str = ""


@dataclass
class _Pause:
    length_s: float
    until_s: float
    error: str
    others_failed: bool = False


class CaptureBackoff:
    """Of one node. `now_s` is monotonic."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._holdings: dict[str, _Holding] = {}
        self._pauses: dict[str, _Pause] = {}
        """Kept until the capture works here: the next one is twice as long."""

    def feels(self, capture: str, health: str | None, now_s: float) -> None:
        """Of a capture that is held, once a look: None while it streams or copies, else what it fails with, or ""."""
        holding = self._holdings.setdefault(capture, _Holding())
        if health:
            holding.fails_since_s = now_s if holding.fails_since_s is None else holding.fails_since_s
            holding.error = health
            return
        holding.fails_since_s = None
        if health is None:
            holding.worked = True
            self._pauses.pop(capture, None)

    def ended(self, capture: str) -> None:
        """It is not held any more."""
        self._holdings.pop(capture, None)

    def fails(self, capture: str, now_s: float) -> bool:
        holding = self._holdings.get(capture)
        if holding is None or holding.fails_since_s is None:
            return False
        return now_s - holding.fails_since_s >= (LOST_S if holding.worked else NEVER_S)

    def give_up(self, capture: str, now_s: float) -> str:
        """The error with which it failed."""
        last = self._pauses.get(capture)
        length_s = min(LONGEST_S, last.length_s * 2) if last is not None else FIRST_S
        error = self._holdings[capture].error
        self._pauses[capture] = _Pause(length_s, now_s + length_s, error)
        return error

    def sees(self, holders: Mapping[str, str], willing: Willing, now_s: float) -> None:
        """Once a look: capture → the node that holds it, and what the nodes offer."""
        for capture, pause in self._pauses.items():
            holder = holders.get(capture, "")
            if holder == self._node or holder not in willing:
                continue
            if capture not in willing[holder]:
                pause.others_failed = True
            elif pause.others_failed:
                pause.others_failed, pause.until_s = False, now_s

    def withheld(self, now_s: float) -> frozenset[str]:
        """The captures that this node may run and does not offer."""
        paused = {capture for capture, pause in self._pauses.items() if now_s < pause.until_s}
        return frozenset(paused | {capture for capture in self._holdings if self.fails(capture, now_s)})

    def facts(self, now_s: float) -> dict[str, object]:
        """For reports: what was given up, for how many seconds more it is not offered, and the error."""
        paused = {capture: pause for capture, pause in self._pauses.items() if now_s < pause.until_s}
        return {name: {"for_s": round(each.until_s - now_s), "error": each.error} for name, each in paused.items()}
