"""`tidemill status`: every mark with its derived state, its age and its holder."""

from __future__ import annotations

from typing import Any

from tidemill.base.marks import Derived, State, as_row, derive_all
from tidemill.cli.context import ConfigOption, JsonOption, Stores, print_json, stores

EXIT_BY_STATE = {State.STUCK: 2, State.BLIND: 2, State.WAITING: 1}


def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show every stage: where it is, who holds it, for how long. Exit 0 fresh, 1 lagging, 2 stuck."""
    with stores(config) as opened:
        marks = read_marks(opened)
    if as_json:
        print_json([as_row(d) for d in marks.values()])
    else:
        from rich.console import Console

        Console().print(table(marks))
    raise SystemExit(max((EXIT_BY_STATE.get(d.state, 0) for d in marks.values()), default=0))


def read_marks(opened: Stores) -> dict[str, Derived]:
    from tidemill.consensus.board import Board

    reports = opened.portal.call(Board(opened.consensus, opened.rand).reports())
    return derive_all(reports, opened.clock.now_ms())


def table(marks: dict[str, Derived], title: str = "") -> Any:
    """A rich table of marks, the troubled ones first."""
    from rich.table import Table

    colours = {
        State.MOVING: "green",
        State.IDLE: "dim green",
        State.WAITING: "yellow",
        State.STUCK: "bold red",
        State.BLIND: "red",
    }
    view = Table(title=title or None, expand=False)
    for heading, justify in (("mark", "left"), ("state", "left"), ("behind", "right"), ("age", "right")):
        view.add_column(heading, justify=justify)  # type: ignore[arg-type]
    view.add_column("held by")
    order = {state: number for number, state in enumerate((State.STUCK, State.BLIND, State.WAITING))}
    for derived in sorted(marks.values(), key=lambda d: (order.get(d.state, 9), d.mark.name)):
        mark = derived.mark
        view.add_row(
            mark.name,
            f"[{colours[derived.state]}]{derived.state}[/]",
            f"{max(0, mark.target - mark.position):,} {mark.unit}".rstrip(),
            f"{derived.report_age_ms / 1000:.1f} s",
            " ".join(part for part in (mark.held_by, mark.reason) if part),
        )
    return view
