"""`tidemill status`: every stage status with its derived state, its age and its blocker."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tidemill.base.limits import MIB
from tidemill.base.status.freshness import EXIT_BY_STATE
from tidemill.base.status.status import (
    DerivedStatus,
    StageState,
    StatusReport,
    derive_statuses,
    lag_text,
    severity_of,
    status_row,
)
from tidemill.cli.context import (
    OPEN_TIMEOUT_S,
    ConfigOption,
    JsonOption,
    OpenConsensus,
    open_consensus_only,
    print_json,
)
from tidemill.cli.status_latency import show_latency

Memory = Annotated[bool, typer.Option("--memory", help="Instead, show the memory of each process by share.")]

Latency = Annotated[
    bool,
    typer.Option("--latency", help="Instead, show how long commits take to reach each stage on the way to the tables."),
]

Facts = Annotated[
    bool, typer.Option("--facts", help="Instead, print the facts (counters and gauges) of each process as JSON.")
]


def status(
    config: ConfigOption = None,
    memory: Memory = False,
    latency: Latency = False,
    facts: Facts = False,
    as_json: JsonOption = False,
) -> None:
    """Show every stage: its state, how far it is behind, and what blocks it. Exit 0 fresh, 1 lagging, 2 stuck."""
    with open_consensus_only(config, OPEN_TIMEOUT_S) as opened:
        reports = read_reports(opened)
        marks = derive_statuses(reports, opened.clock.now_ms())
    if memory:
        show_memory(reports, as_json)
        return
    if latency:
        show_latency(reports, as_json)
        return
    if facts:
        print_json({report.process: report.facts for report in reports})
        return
    if as_json:
        print_json([status_row(d) for d in marks.values()])
    else:
        from rich.console import Console

        Console().print(status_table(marks))
    raise SystemExit(max((EXIT_BY_STATE.get(d.state, 0) for d in marks.values()), default=0))


def read_reports(opened: OpenConsensus) -> list[StatusReport]:
    from tidemill.consensus.status.board import StatusBoard

    return opened.portal.call(StatusBoard(opened.consensus, opened.rand).reports_or_raise(opened.consensus.trouble))


def read_stage_statuses(opened: OpenConsensus) -> dict[str, DerivedStatus]:
    return derive_statuses(read_reports(opened), opened.clock.now_ms())


def show_memory(reports: list[StatusReport], as_json: bool) -> None:
    """Print the memory of each process: resident size, and each share with its limit, from the fact `memory` of its
    report."""
    found = {report.process: report.facts.get("memory", {}) for report in reports}
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    view = Table(expand=False)
    for heading, justify in (("process", "left"), ("share", "left"), ("MiB", "right"), ("limit MiB", "right")):
        view.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for process, shares in sorted(found.items()):
        for share, (used, limit) in sorted(shares.items() if isinstance(shares, dict) else ()):
            view.add_row(Text(process), Text(share), f"{used / MIB:,.1f}", f"{limit / MIB:,.0f}" if limit else "")
    Console().print(view)


def status_table(marks: dict[str, DerivedStatus], title: str = "") -> Any:
    """Return a rich table of stage statuses, the troubled ones first."""
    from rich.table import Table
    from rich.text import Text  # names and reasons are no markup: a name is pipeline:x:spark, an error has brackets

    colours = {
        StageState.MOVING: "green",
        StageState.IDLE: "dim green",
        StageState.WAITING: "yellow",
        StageState.STUCK: "bold red",
        StageState.BLIND: "red",
    }
    view = Table(title=title or None, expand=False)
    for heading, justify in (("stage", "left"), ("state", "left"), ("behind", "right"), ("age", "right")):
        view.add_column(heading, justify=justify)  # type: ignore[arg-type]
    view.add_column("blocked by")
    for name, derived in sorted(marks.items(), key=lambda item: (-severity_of(item[1])[0], item[0])):
        mark = derived.mark
        view.add_row(
            Text(name),
            Text(str(derived.state), style=colours[derived.state]),
            lag_text(mark),
            f"{derived.report_age_ms / 1000:.1f} s",
            Text(" ".join(part for part in (mark.held_by, mark.reason) if part)),
        )
    return view
