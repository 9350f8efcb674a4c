"""Marks: where every stage is, who holds it, and for how long. States are derived, never self-reported.

M1  A minimum always names its argmin: `held_by` is the name of another mark, or of an outside
    holder (a pid, a lease, a file), and walking it ends at a root cause.
M2  A stage is *idle* only when a heartbeat crossed it: its position has reached its target.
M3  A process that does not report is *blind*; no report is never read as health.
M4  Where several processes each have a share of one stage (a topic's partitions), its mark is their sum, in the
    state of the worst of them: a share that stands still is not hidden behind one that moves.

Positions are plain integers (an LSN, an offset sum, a time in ms): only compared within one mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from tidemill.base.limits import MARK_BLIND_AFTER_MS


class State(StrEnum):
    MOVING = "moving"
    IDLE = "idle"
    WAITING = "waiting"
    STUCK = "stuck"
    BLIND = "blind"


class Mark(msgspec.Struct, frozen=True):
    """One stage's place.

    position    how far the stage has come
    target      where its input is; position ≥ target means nothing is left to do
    held_by     name of the mark (or outside holder) that the stage waits for; "" = itself
    reason      one short sentence, for people
    since_ms    when position last changed, or when the stage became idle
    budget_ms   freshness budget: standing still below target for longer is *stuck*
    share       the place of this process's share only (M4)
    """

    name: str
    position: int
    target: int
    held_by: str = ""
    reason: str = ""
    since_ms: int = 0
    budget_ms: int = 5_000
    unit: str = ""
    share: bool = False


class Report(msgspec.Struct, frozen=True):
    """All marks of one process as of `at_ms` (the publisher's clock), with free-form facts beside them."""

    process: str
    at_ms: int
    marks: tuple[Mark, ...]
    facts: dict[str, object] = {}


class Derived(msgspec.Struct, frozen=True):
    mark: Mark
    process: str
    state: State
    standing_ms: int
    report_age_ms: int


def derive(mark: Mark, process: str, at_ms: int, now_ms: int, moved_recently_ms: int = 2_000) -> Derived:
    """The state of one mark, from the mark and the age of the report that carried it."""
    age_ms = max(0, now_ms - at_ms)
    standing_ms = max(0, now_ms - mark.since_ms)
    if age_ms > MARK_BLIND_AFTER_MS:
        state = State.BLIND
    elif mark.position >= mark.target:
        state = State.IDLE
    elif standing_ms <= moved_recently_ms:
        state = State.MOVING
    elif standing_ms > mark.budget_ms:
        state = State.STUCK
    else:
        state = State.WAITING
    return Derived(mark, process, state, standing_ms, age_ms)


def derive_all(reports: Iterable[Report], now_ms: int) -> dict[str, Derived]:
    """Every mark by name. Where two processes report one name, the newer report wins, or the shares are summed (M4)."""
    newest: dict[str, Derived] = {}
    shares: dict[str, list[Derived]] = {}
    for report in sorted(reports, key=lambda r: (r.at_ms, r.process)):
        for mark in report.marks:
            found = newest[mark.name] = derive(mark, report.process, report.at_ms, now_ms)
            if mark.share:
                shares.setdefault(mark.name, []).append(found)
    return newest | {name: _whole(parts) for name, parts in shares.items()}


_TROUBLE = {State.IDLE: 0, State.MOVING: 1, State.WAITING: 2, State.STUCK: 3}


def _whole(parts: list[Derived]) -> Derived:
    """One mark of several shares, oldest report first. The share of a blind process is somebody else's by now; only
    when nobody reports is the whole blind."""
    live = [part for part in parts if part.state is not State.BLIND]
    if not live:
        return parts[-1]
    worst = max(live, key=lambda part: (_TROUBLE[part.state], part.standing_ms))
    position, target = sum(part.mark.position for part in live), sum(part.mark.target for part in live)
    mark = msgspec.structs.replace(worst.mark, position=position, target=target)
    return Derived(mark, worst.process, worst.state, worst.standing_ms, worst.report_age_ms)


def as_row(derived: Derived) -> dict[str, object]:
    """One mark as JSON: what `status --json`, `/api/status` and the console share."""
    mark = derived.mark
    return {
        "name": mark.name,
        "state": str(derived.state),
        "position": mark.position,
        "target": mark.target,
        "unit": mark.unit,
        "held_by": mark.held_by,
        "reason": mark.reason,
        "standing_ms": derived.standing_ms,
        "report_age_ms": derived.report_age_ms,
        "process": derived.process,
    }


def argmin(positions: Mapping[str, int]) -> tuple[str, int]:
    """The holder and value of a minimum; ties go to the first name. Raises ValueError when empty (M1)."""
    name = min(positions, key=lambda n: (positions[n], n))
    return name, positions[name]


def why(marks: Mapping[str, Derived], name: str) -> list[Derived]:
    """Walk `held_by` from `name` to the root holder. Ends at an unknown holder or before a cycle repeats."""
    chain: list[Derived] = []
    seen: set[str] = set()
    while name in marks and name not in seen:
        seen.add(name)
        chain.append(marks[name])
        name = marks[name].mark.held_by
    return chain


class Tracker:
    """Keeps one process's marks: `set` stamps `since_ms` when a position moves or a target is reached."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}

    def set(
        self,
        name: str,
        position: int,
        target: int,
        *,
        now_ms: int,
        held_by: str = "",
        reason: str = "",
        budget_ms: int = 5_000,
        unit: str = "",
        share: bool = False,
    ) -> None:
        old = self._marks.get(name)
        was_idle = old is not None and old.position >= old.target
        moved = old is None or old.position != position or (was_idle and position < target)
        since_ms = now_ms if moved or old is None else old.since_ms
        self._marks[name] = Mark(name, position, target, held_by, reason, since_ms, budget_ms, unit, share)

    def remove(self, name: str) -> None:
        self._marks.pop(name, None)

    def report(self, process: str, now_ms: int, facts: Mapping[str, object] | None = None) -> Report:
        return Report(process, now_ms, tuple(self._marks.values()), dict(facts or {}))
