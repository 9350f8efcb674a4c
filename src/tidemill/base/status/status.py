"""Stage statuses: the position of every stage, its blocker, and for how long. States are derived, never self-reported.

Invariants:

- Named blocker: a minimum always names its argmin. `held_by` is the name of another stage status, or of an outside
  blocker (a pid, a lease, a file), and walking it ends at a root cause (base/status/freshness.py).
- Proven idle: a stage is *idle* only if its position has reached its target.
- Blind processes: a process that does not report is *blind*; a missing report is never read as health. Each process has
  a separate status, `process:NAME`, so that a frozen one is not hidden by a working peer. A node becomes blind sooner
  than the statuses that it published.
- Shares: if several processes each have a share of one stage (a topic's partitions), its status is their sum, in the
  state of the worst share: a stalled share is not hidden by a moving one.
- Peers: if several processes report the same stage, the furthest live one represents it, and each other one in trouble
  is listed as `name@process`. A failure caused by the data (`of_data`) belongs to the stage, not to a process.
- Age of a failure: a failed unit is reported until its position moves beyond the place of the failure, or it recovers.
  Retries do not make its failure younger. A paused unit (only an operator can repair it) is stuck immediately.
- Progress: long work is *moving* while its progress counter moves, even if its position does not: a first snapshot or a
  catch-up is not stuck. Work that is restarted repeatedly at one position is stuck: from the LIVES-th restart
  there, progress does not count any more, and the age is retained.

Positions are plain integers (an LSN, an offset sum, a time in ms), compared only within one stage.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache

import msgspec

from tidemill.base.limits import FRESHNESS_BUDGET_MS, NODE_BLIND_AFTER_MS, STATUS_BLIND_AFTER_MS

RESTARTS_MAX = 3
"""Restarts at one position from which progress no longer counts.

A restart in the middle of a long step is no failure, but a driver that dies in every such step is one.
"""

CLOCK_AHEAD_MS = 60_000
"""Distance by which the clock of another machine may be ahead. A report from further in the future is blind."""

TIMES_AHEAD_MS = 10_000
"""Distance by which the newest time of a table or a source may be ahead of the clock before it is reported."""


class StageState(StrEnum):
    MOVING = "moving"
    IDLE = "idle"
    WAITING = "waiting"
    STUCK = "stuck"
    BLIND = "blind"


class StageStatus(msgspec.Struct, frozen=True):
    """Status of one stage.

    position    how far the stage has come
    target      where its input is; position ≥ target means that nothing is left to do
    held_by     name of the status (or outside blocker) for which the stage waits; "" = itself
    upstream    name of the status that feeds the stage, whether or not it waits for it
    reason      one short sentence, for people
    since_ms    when position or progress last changed, or when the stage became idle
    progress    a counter of work done (records read, rows copied) that moves while the position cannot
    budget_ms   freshness budget: a stage stalled below its target for longer is *stuck*
    share       position and target are those of this process's share only
    error       the error of the unit's last try; "" = it does not fail
    failing_since_ms, tries, parked   since when, how often, and whether only an operator can help
    of_data     the failure is caused by the stage's input data
    restarts    number of process restarts while the position stalled
    """

    name: str
    position: int
    target: int
    held_by: str = ""
    reason: str = ""
    since_ms: int = 0
    budget_ms: int = FRESHNESS_BUDGET_MS
    unit: str = ""
    share: bool = False
    error: str = ""
    failing_since_ms: int = 0
    tries: int = 0
    parked: bool = False
    upstream: str = ""
    progress: int = 0
    restarts: int = 0
    of_data: bool = False


class UnitFailure(msgspec.Struct, frozen=True):
    """Failure of one unit, at one place. `position` is where the unit was when it first failed."""

    error: str
    since_ms: int
    tries: int
    parked: bool
    held_by: str
    position: int
    of_data: bool = False


class StatusReport(msgspec.Struct, frozen=True):
    """All stage statuses of one process as of `at_ms` (the publisher's clock), with free-form facts.

    `pid` on `host` identify the process for an operator when it is silent. `left` marks the last report of a process
    that was stopped in order: its statuses do not age, neither before the process is blind nor in its next life.
    """

    process: str
    at_ms: int
    marks: tuple[StageStatus, ...]
    facts: dict[str, object] = {}
    pid: int = 0
    host: str = ""
    left: bool = False


class DerivedStatus(msgspec.Struct, frozen=True):
    mark: StageStatus
    process: str
    state: StageState
    standing_ms: int
    report_age_ms: int

    @property
    def blocker(self) -> str:
        """Blocker to show. An idle stage has none: its `held_by` only names where its next input will come from."""
        return "" if self.state is StageState.IDLE else self.mark.held_by


def age_of_report(at_ms: int, now_ms: int) -> int:
    """Return the age of a report. A report from far in the future comes from a wrong clock, and its age is unknown: the
    difference counts as its age, so that it is never read as health."""
    age_ms = now_ms - at_ms
    return -age_ms if age_ms < -CLOCK_AHEAD_MS else max(0, age_ms)


def times_ahead_reason(upper: int, now_ms: int) -> str:
    """Return that the times of a table, which are below `upper`, are ahead of the clock; "" if they are not."""
    ahead_ms = upper - 1 - now_ms
    if ahead_ms <= TIMES_AHEAD_MS:
        return ""
    return (
        f"its newest time is {ahead_ms // 1000:,} s ahead of the clock: the clock of a node is or was wrong. Until the"
        " clock reaches that time, changes are one millisecond apart, and as_of of now omits them or is refused"
    )


def may_be_alive(report: StatusReport, now_ms: int) -> bool:
    """Return whether the process of a report may still run, for commands that require that it does not. A process with
    a fast clock may."""
    return now_ms - report.at_ms <= _blind_after_ms(report)


def _blind_after_ms(report: StatusReport) -> int:
    """Return the age of its report from which a process is blind. The limit is shorter for a node that runs."""
    is_node = report.process.startswith(NODE) and not report.left
    return NODE_BLIND_AFTER_MS if is_node else STATUS_BLIND_AFTER_MS


def derive_status(
    mark: StageStatus, process: str, at_ms: int, now_ms: int, moved_recently_ms: int = 2_000, left: bool = False
) -> DerivedStatus:
    """Derive the state of one stage, from its status and the age of its report; `left` as in the report."""
    age_ms = age_of_report(at_ms, now_ms)
    standing_ms = max(0, (at_ms if left else now_ms) - (mark.failing_since_ms or mark.since_ms))
    if age_ms > STATUS_BLIND_AFTER_MS:
        state = StageState.BLIND
    elif mark.error:
        state = StageState.STUCK if mark.parked or standing_ms > mark.budget_ms else StageState.WAITING
    elif mark.position >= mark.target:
        state = StageState.IDLE
    elif standing_ms <= moved_recently_ms:
        state = StageState.MOVING
    elif standing_ms > mark.budget_ms:
        state = StageState.STUCK
    else:
        state = StageState.WAITING
    return DerivedStatus(mark, process, state, standing_ms, age_ms)


def lag_of(mark: StageStatus) -> int | None:
    """Return the distance of a stage from its target, in its unit.

    None for a stage in ms whose time is unknown: it has none, or its table is not open. The years since 1970 are no
    delay.
    """
    if mark.unit == "ms" and mark.position <= 0 < mark.target:
        return None
    return max(0, mark.target - mark.position)


def lag_text(mark: StageStatus) -> str:
    """Return the distance as text, with its unit."""
    found = lag_of(mark)
    return "unknown" if found is None else f"{found:,} {mark.unit}".rstrip()


NOTICE_BUDGET_MS = 1 << 52
"""Freshness budget of a stage that may wait for any time without being stuck."""
PROCESS = "process:"
NODE = "node:"
RESTARTS = "restarts"
"""Fact of a supervisor: process → {"at_ms", "count", "reason"}."""
FOUNDATIONS = ("objects", "consensus", "metastore", "descriptors")
"""Foundations of each process, in its own experience. Their statuses are never merged, but listed as `name@process`."""
_TROUBLE = {StageState.IDLE: 0, StageState.MOVING: 1, StageState.WAITING: 2, StageState.STUCK: 3, StageState.BLIND: 4}


def severity_of(derived: DerivedStatus) -> tuple[int, int]:
    """Return a sort key: greater is worse, by state, then by duration."""
    return _TROUBLE[derived.state], derived.standing_ms


def derive_statuses(reports: Iterable[StatusReport], now_ms: int) -> dict[str, DerivedStatus]:
    """Derive every stage by name, every process by `process:NAME`, and other instances in trouble by `name@process`."""
    instances: dict[str, list[DerivedStatus]] = {}
    found: dict[str, DerivedStatus] = {}
    for report in sorted(reports, key=lambda r: (r.at_ms, r.process)):
        for mark in report.marks:
            one = derive_status(mark, report.process, report.at_ms, now_ms, left=report.left)
            instances.setdefault(mark.name, []).append(one)
        found[PROCESS + report.process] = derive_process(report, now_ms)
    for name, each in instances.items():
        if name in FOUNDATIONS:
            found.update(_by_instance_name(each))
            continue
        live = [one for one in each if one.state is not StageState.BLIND]
        if not live:
            found[name] = each[-1]
        elif live[-1].mark.share:
            found[name] = _sum_shares(live)
        else:
            found[name] = first = max(live, key=_representative_key)
            found.update(_by_instance_name(one for one in live if one is not first and one.state is StageState.STUCK))
    return found


def _representative_key(one: DerivedStatus) -> tuple[int, bool, bool, int]:
    mark = one.mark
    return mark.position, mark.of_data, not mark.error, mark.target


def _by_instance_name(each: Iterable[DerivedStatus]) -> dict[str, DerivedStatus]:
    """Return instances of one stage by `name@process`."""
    found = {}
    for one in each:
        name = f"{one.mark.name}@{one.process}"
        found[name] = msgspec.structs.replace(one, mark=msgspec.structs.replace(one.mark, name=name))
    return found


def derive_process(report: StatusReport, now_ms: int) -> DerivedStatus:
    """Derive the state of a process from the age of its report alone.

    A node becomes blind sooner than its stage statuses, unless it was stopped in order.
    """
    age_ms = age_of_report(report.at_ms, now_ms)
    blind = age_ms > _blind_after_ms(report)
    holder = f"pid {report.pid} on {report.host}" if report.pid else ""
    reason = f"has not reported for {age_ms // 1000} s: it is stopped, disconnected or dead" if blind else ""
    if blind and report.at_ms > now_ms:
        reason = f"reported {age_ms // 1000} s in the future: its clock, or that of this process, is or was wrong"
    mark = StageStatus(PROCESS + report.process, 0, 1 if blind else 0, holder if blind else "", reason, report.at_ms)
    return DerivedStatus(mark, report.process, StageState.BLIND if blind else StageState.IDLE, age_ms, age_ms)


def _sum_shares(live: list[DerivedStatus]) -> DerivedStatus:
    """Sum several shares. Only live processes count, since other processes have taken over the share of a blind one."""
    worst = max(live, key=severity_of)
    position, target = sum(part.mark.position for part in live), sum(part.mark.target for part in live)
    mark = msgspec.structs.replace(worst.mark, position=position, target=target)
    return DerivedStatus(mark, worst.process, worst.state, worst.standing_ms, worst.report_age_ms)


def status_row(derived: DerivedStatus) -> dict[str, object]:
    """Return one stage as JSON, as used by `status --json`, `/api/status` and the console."""
    mark = derived.mark
    return {
        "name": mark.name,
        "state": str(derived.state),
        "position": mark.position,
        "target": mark.target,
        "unit": mark.unit,
        "held_by": derived.blocker,
        "reason": mark.reason,
        "upstream": mark.upstream,
        "standing_ms": derived.standing_ms,
        "report_age_ms": derived.report_age_ms,
        "process": derived.process,
        "error": mark.error,
        "tries": mark.tries,
        "parked": mark.parked,
    }


def argmin(positions: Mapping[str, int]) -> tuple[str, int]:
    """Return the name and value of a minimum; ties go to the first name. Raises ValueError if empty."""
    name = min(positions, key=lambda n: (positions[n], n))
    return name, positions[name]


class StatusTracker:
    """Statuses of one process: `set` updates `since_ms` when position or progress moves or the target is reached.

    `budget_ms` is the default freshness budget. Every method may be called from any thread.
    """

    def __init__(self, budget_ms: int = FRESHNESS_BUDGET_MS) -> None:
        self.budget_ms = budget_ms
        self._marks: dict[str, StageStatus] = {}
        self._failures: dict[str, UnitFailure] = {}
        self._earlier: dict[str, StageStatus] = {}
        self._lock = threading.Lock()

    def adopt_last_report(self, report: StatusReport, now_ms: int = 0) -> None:
        """Adopt the last report of this process's previous life.

        A stage that is still at the same position, and a unit that fails again at the same place, retain their age. A
        stage that did not fail starts at `now_ms` if the process was stopped in order: it could not move in the
        meantime, and this restart does not count.
        """
        self._earlier = {mark.name: mark for mark in report.marks if mark.error or mark.position < mark.target}
        if report.left:
            for name, mark in self._earlier.items():
                if not mark.error:
                    since_ms = max(mark.since_ms, now_ms)
                    self._earlier[name] = msgspec.structs.replace(mark, since_ms=since_ms, restarts=mark.restarts - 1)

    def set(
        self,
        name: str,
        position: int,
        target: int,
        *,
        now_ms: int,
        held_by: str = "",
        reason: str = "",
        budget_ms: int | None = None,
        unit: str = "",
        share: bool = False,
        upstream: str = "",
        progress: int = 0,
    ) -> None:
        with self._lock:
            old = self._marks.get(name)
            restarts = old.restarts if old is not None else 0
            if old is None and (old := self._earlier.get(name)) is not None:
                restarts = old.restarts + 1
            was_idle = old is not None and old.position >= old.target
            elsewhere = old is None or old.position != position or (was_idle and position < target)
            restarts = 0 if elsewhere else restarts
            moved = elsewhere or old is None or (progress and progress != old.progress and restarts < RESTARTS_MAX)
            since_ms = now_ms if moved or old is None else min(old.since_ms, now_ms)  # the clock may have been set back
            if restarts >= RESTARTS_MAX:
                reason = f"{reason + '; ' if reason else ''}restarted {restarts} times at this position"
            budget_ms = self.budget_ms if budget_ms is None else budget_ms
            self._marks[name] = StageStatus(
                name, position, target, held_by, reason, since_ms, budget_ms, unit, share,
                upstream=upstream, progress=progress, restarts=restarts,
            )  # fmt: skip
            if moved:
                self._earlier.pop(name, None)
            failure = self._failures.get(name)
            if failure is not None and position > failure.position:
                del self._failures[name]

    def fail(
        self, name: str, error: str, *, now_ms: int, parked: bool = False, held_by: str = "", of_data: bool = False
    ) -> None:
        """Record a failure of unit `name`, in one sentence. Its age is that of the first failure at its place."""
        with self._lock:
            mark, old, earlier = self._marks.get(name), self._failures.get(name), self._earlier.get(name)
            position = mark.position if mark is not None else 0
            if old is None and earlier is not None and earlier.error and earlier.position >= position:
                old = UnitFailure("", earlier.failing_since_ms, earlier.tries, False, "", earlier.position)
            if (
                earlier is not None
            ):  # its failure is reported by this life from now on; the position at which it stalled still counts
                self._earlier[name] = msgspec.structs.replace(earlier, error="")
            self._failures[name] = UnitFailure(
                error,
                min(old.since_ms, now_ms) if old is not None else now_ms,
                old.tries + 1 if old is not None else 1,
                parked,
                held_by or ("operator" if parked else ""),
                old.position if old is not None else position,
                of_data,
            )

    def clear_failure(self, name: str) -> None:
        """Record that the unit works again, or is no longer wanted."""
        with self._lock:
            self._failures.pop(name, None)

    def set_foundation(self, name: str, trouble: str, *, now_ms: int, held_by: str = "", notice: str = "") -> None:
        """Record whether a foundation of this process (OWN) works, or with `severity_of`, one sentence, that it does
        not.

        With `notice` it works, but something is wrong with it: it is waiting for any time, and never stuck.
        """
        budget_ms = NOTICE_BUDGET_MS if notice and not trouble else None
        if trouble or notice:
            mark = self._marks.get(name)
            if mark is None or (mark.budget_ms == NOTICE_BUDGET_MS) != (budget_ms is not None):
                self.clear_failure(name)  # trouble is younger than the notice before it
                self.set(name, 1, 1, now_ms=now_ms, budget_ms=budget_ms)
            self.fail(name, trouble or notice, now_ms=now_ms, held_by=held_by)
        else:
            self.clear_failure(name)
            self.set(name, 1, 1, now_ms=now_ms)

    def mark(self, name: str) -> StageStatus | None:
        """Return the status as last set by this process or its predecessor, without a failure."""
        return self._marks.get(name) or self._earlier.get(name)

    def failure(self, name: str) -> UnitFailure | None:
        return self._failures.get(name)

    def failures(self, prefix: str) -> list[tuple[str, str]]:
        """Return (stage, error) of every unit of this process that currently fails, by name."""
        with self._lock:
            return sorted((name, found.error) for name, found in self._failures.items() if name.startswith(prefix))

    def remove(self, name: str) -> None:
        """Remove a stage that no longer exists; a failure stays until the unit recovers."""
        with self._lock:
            self._marks.pop(name, None)
            self._earlier.pop(name, None)

    def clear(self, prefix: str) -> None:
        """Remove stages and failures with this prefix: another process reports them from now on."""
        with self._lock:
            self._marks = {name: mark for name, mark in self._marks.items() if not name.startswith(prefix)}
            self._earlier = {name: mark for name, mark in self._earlier.items() if not name.startswith(prefix)}
            self._failures = {name: found for name, found in self._failures.items() if not name.startswith(prefix)}

    def report(self, process: str, now_ms: int, facts: Mapping[str, object] | None = None) -> StatusReport:
        with self._lock:
            marks = {**self._marks, **{n: _failing(n, self._marks.get(n), f) for n, f in self._failures.items()}}
        pid, host = this_process()
        return StatusReport(process, now_ms, tuple(marks.values()), dict(facts or {}), pid, host)


def _failing(name: str, mark: StageStatus | None, failure: UnitFailure) -> StageStatus:
    """Return a failing unit's status: never at its target, with the error of its last try as the reason."""
    mark = mark or StageStatus(name, failure.position, failure.position + 1, since_ms=failure.since_ms)
    return msgspec.structs.replace(
        mark,
        target=max(mark.target, mark.position + 1),
        held_by=failure.held_by or mark.held_by,
        reason=_join_reasons(mark.reason, failure.error),
        error=failure.error,
        failing_since_ms=failure.since_ms,
        tries=failure.tries,
        parked=failure.parked,
        of_data=failure.of_data,
    )


def _join_reasons(reason: str, error: str) -> str:
    """Combine the reason for waiting and the error of the last try, each once."""
    return error if reason in error else f"{reason.rstrip('.')}; its last try: {error}"


def process_exists(pid: int) -> bool:
    """Return whether this machine has a process with the pid. A pid may have been reused."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


@cache
def this_process() -> tuple[int, str]:
    """Return (pid, host)."""
    return os.getpid(), socket.gethostname()
