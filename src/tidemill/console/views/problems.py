"""Problems of a cluster: one for each root cause, with its sentence, its blocker and the stages that wait for it.

Every stage that is not at its target is followed along `held_by` to the status that causes its delay. Stages with one
cause are one problem. The verdict of `why` is computed only for the worst problems, so the work does not grow with
the number of late stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.base.status.freshness import SHARD, verdict_of
from tidemill.base.status.status import FOUNDATIONS, PROCESS, DerivedStatus, StageState, severity_of
from tidemill.console.views.sentences import describe_name, describe_state

PROBLEMS_MAX = 20
AFFECTED_MAX = 6
"""Names of affected stages that a problem lists; it counts the others."""
TROUBLED = (StageState.STUCK, StageState.BLIND, StageState.WAITING)


def problem_rows(marks: Mapping[str, DerivedStatus]) -> tuple[list[dict[str, Any]], int]:
    """Return the worst problems, worst first, and the number of further ones."""
    groups: dict[str, list[DerivedStatus]] = {}
    for name, derived in marks.items():
        if derived.state in TROUBLED:
            groups.setdefault(_cause_of(marks, name), []).append(derived)
    worst_first = sorted(groups.items(), key=lambda item: _group_severity(marks, *item), reverse=True)
    problems: dict[str, dict[str, Any]] = {}
    for cause, late in worst_first[:PROBLEMS_MAX]:
        is_late = marks[cause].state in TROUBLED
        found = verdict_of(marks, cause if is_late else max(late, key=severity_of).mark.name)
        known = problems.setdefault(found.worst.mark.name, _problem_row(found.worst, found.root))
        names = [each.mark.name for each in late if each.mark.name != found.worst.mark.name]
        _add_affected(known, names)
    return list(problems.values()), max(0, len(groups) - PROBLEMS_MAX)


def _problem_row(worst: DerivedStatus, root: str) -> dict[str, Any]:
    mark = worst.mark
    return {
        "name": mark.name,
        "state": str(worst.state),
        "sentence": describe_state(worst),
        "holder": root,
        "blocked_by": describe_name(root) if root != mark.name else "",
        "standing_ms": worst.standing_ms,
        "process": worst.process,
        "paused": mark.parked,
        "tries": mark.tries,
        "affected": [],
        "affected_count": 0,
        "affected_tables": 0,
        "command": f"tidemill why {mark.name.removeprefix(SHARD)}",
    }


def _add_affected(row: dict[str, Any], names: list[str]) -> None:
    tables = [name for name in names if name.startswith(SHARD)]
    others = [
        name for name in names if not name.startswith((SHARD, PROCESS)) and name.partition("@")[0] not in FOUNDATIONS
    ]
    listed = [*tables, *others]
    row["affected"] = [*row["affected"], *(describe_name(name) for name in listed)][:AFFECTED_MAX]
    row["affected_count"] += len(listed)
    row["affected_tables"] += len(tables)


def _cause_of(marks: Mapping[str, DerivedStatus], name: str) -> str:
    """Return the status that causes the delay of `name`: a silent process, or the end of the walk along `held_by`.

    `verdict_of` also knows names that another status represents; here they end the walk.
    """
    seen = set[str]()
    while name not in seen:
        seen.add(name)
        here = marks[name]
        process = PROCESS + here.process
        if process != name and process in marks and marks[process].state is StageState.BLIND:
            return process
        if here.mark.held_by not in marks:
            return name
        name = here.mark.held_by
    return name


def _group_severity(
    marks: Mapping[str, DerivedStatus], cause: str, late: list[DerivedStatus]
) -> tuple[tuple[int, int], int]:
    cause_itself = [marks[cause]] if marks[cause].state in TROUBLED else []
    return max(severity_of(each) for each in [*cause_itself, *late]), len(late)
