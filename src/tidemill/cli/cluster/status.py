"""`tidemill status`: sources, tables and live clients, with the state of each, its age and its blocker.

A stage of another kind is shown if it is in trouble, or with `--all`, which shows every stage.

`--latency` shows how long commits take to reach each stage on the way to the tables, as processes report it:

    · up to the median of the previous stage    █ this stage's median    ░ its 95th percentile

The fact `latency` of a report is {source: {stage: histogram}}. Histograms of one source are summed over all processes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tidemill.base.errors import (
    ClosedError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
    ends_process,
)
from tidemill.base.limits import MIB
from tidemill.base.status.freshness import EXIT_BY_STATE, SHARD
from tidemill.base.status.histogram import SINCE_BOUND, Histogram
from tidemill.base.status.status import (
    NODE,
    PROCESS,
    DerivedStatus,
    StageState,
    StatusReport,
    derive_statuses,
    lag_text,
    severity_of,
)
from tidemill.cli.context import EXIT_GOOD, OPEN_TIMEOUT_S, ConfigOption, OpenConsensus, open_consensus_only
from tidemill.cli.output.data_lines import Row
from tidemill.cli.output.output import JSON, TABLE, Output, print_table
from tidemill.cli.output.text_table import Column
from tidemill.console.views.stages import facts_by_process, latency_summaries, merge_latencies, stage_rows

BAR = 40
ROWS_MAX = 30
"""Rows of a group that are shown without --all."""
SOURCES = ("capture:", "table:", "topic:")
WATCH_INTERVAL_S = 2.0
FIGURES = ("count", "p50", "p95", "p99", "max")

Memory = Annotated[bool, typer.Option("--memory", help="Instead, show the memory of each process by share.")]

Latency = Annotated[
    bool,
    typer.Option("--latency", help="Instead, show how long commits take to reach each stage on the way to the tables."),
]

All = Annotated[bool, typer.Option("--all", help="Show every stage, including internal ones.")]

Watch = Annotated[bool, typer.Option("--watch", help="Show it again every two seconds, until Ctrl-C.")]

Facts = Annotated[
    bool,
    typer.Option(
        "--facts",
        help="Instead, print the facts (counters and gauges) of each process, as JSON or in the format of -o.",
    ),
]


def status(
    config: ConfigOption = None,
    every: All = False,
    watch: Watch = False,
    memory: Memory = False,
    latency: Latency = False,
    facts: Facts = False,
    out: Output = TABLE,
) -> None:
    """Show each source and table: its state, its delay, and what blocks it.

    Exit 0 fresh, 1 lagging, 3 stuck: the worst of all stages, including hidden ones. `--watch` does not end when the
    cluster goes down.
    """

    def show_view(opened: OpenConsensus) -> int:
        """Print the requested view, and return the exit code."""
        reports = read_reports(opened)
        if memory:
            show_memory(reports, out)
        elif latency:
            show_latency(reports, out)
        elif facts:
            show_facts(reports, out)
        else:
            marks = derive_statuses(reports, opened.clock.now_ms())
            if out.is_text:
                show_status(marks, reports, every)
            else:
                out.rows(stage_rows(marks))
            if not watch:
                warn_if_all_silent(marks)
            return max((EXIT_BY_STATE.get(derived.state, 0) for derived in marks.values()), default=0)
        return EXIT_GOOD

    if watch:
        watch_screen(config, lambda opened, _: partial(show_view, opened))
    with open_consensus_only(config, OPEN_TIMEOUT_S) as opened:
        raise SystemExit(show_view(opened))


def read_reports(opened: OpenConsensus) -> list[StatusReport]:
    """Return the reports of all processes. Raises UnavailableError when no process reports."""
    from tidemill.consensus.status.board import StatusBoard

    board = StatusBoard(opened.consensus, opened.rand)
    reports = opened.portal.call(board.reports_or_raise(opened.consensus.trouble))
    if not reports:
        raise UnavailableError(
            "no process of the cluster is running.", fix="Start one: tidemill up. It reports after some seconds."
        )
    return reports


def warn_if_all_silent(marks: Mapping[str, DerivedStatus]) -> None:
    """Print to stderr that no process reports any more: the states shown are the last ones of a stopped cluster."""
    processes = [derived for name, derived in marks.items() if name.startswith(PROCESS)]
    if processes and all(derived.state is StageState.BLIND for derived in processes):
        age_s = min(derived.report_age_ms for derived in processes) // 1000
        print(
            f"tidemill: no process has reported for {age_s:,} s. Unless the cluster is starting: tidemill up.",
            file=sys.stderr,
        )


def read_stage_statuses(opened: OpenConsensus) -> dict[str, DerivedStatus]:
    return derive_statuses(read_reports(opened), opened.clock.now_ms())


def show_facts(reports: list[StatusReport], out: Output) -> None:
    """Print the facts of each process: as one JSON object, or as one row for each fact."""
    found = facts_by_process(reports)
    facts = [
        {"process": process, "fact": fact, "value": value}
        for process in found
        for fact, value in found[process].items()
    ]
    (JSON if out.is_text else out).rows(facts, value=found)


def show_memory(reports: list[StatusReport], out: Output) -> None:
    """Print the memory of each process: resident size, and each share with its limit, from the fact `memory` of its
    report."""
    found = {report.process: report.facts.get("memory", {}) for report in reports}
    rows = [
        {"process": process, "share": share, "bytes": used, "limit_bytes": limit or None}
        for process, shares in sorted(found.items())
        for share, (used, limit) in sorted(shares.items() if isinstance(shares, dict) else ())
    ]
    columns = [
        Column("process"),
        Column("share"),
        Column("MiB", lambda row: f"{row['bytes'] / MIB:,.1f}", right=True),
        Column("limit MiB", lambda row: f"{row['limit_bytes'] / MIB:,.0f}" if row["limit_bytes"] else "", right=True),
    ]
    out.rows(rows, columns, value=found)


def show_status(marks: Mapping[str, DerivedStatus], reports: Sequence[StatusReport], every: bool) -> None:
    if every:
        print_table(STAGE_COLUMNS, status_lines(marks))
        return
    groups = group_stages(marks)
    for title, (shown, more) in groups.items():
        if shown:
            print(title)
            print_table(STAGE_COLUMNS, status_lines(shown))
            print(f"and {more:,} more: tidemill status --all\n" if more else "")
    counts = {report.process: report.facts.get("shapes") for report in reports}
    shapes = {process: facts["shapes"] for process, facts in counts.items() if isinstance(facts, dict)}
    listed = ", ".join(f"{count:,} shapes on {process.removeprefix(NODE)}" for process, count in sorted(shapes.items()))
    hidden = len(marks) - sum(len(shown) + more for shown, more in groups.values())
    print(f"live clients: {listed or 'none'}; {hidden:,} other stages work: tidemill status --all")


def group_stages(marks: Mapping[str, DerivedStatus]) -> dict[str, tuple[dict[str, DerivedStatus], int]]:
    """Return the stages to show by group, the troubled ones first, and how many more the group has."""
    members: dict[str, list[str]] = {"sources": [], "tables": [], "in trouble": []}
    for name, derived in marks.items():
        if name.startswith(SHARD) and "@" not in name:
            members["tables"].append(name)
        elif name.startswith(SOURCES) and "/topics" not in name:
            members["sources"].append(name)
        elif derived.state in (StageState.WAITING, StageState.STUCK, StageState.BLIND):
            members["in trouble"].append(name)
    found = {}
    for title, names in members.items():
        names.sort(key=lambda name: (-severity_of(marks[name])[0], name))
        found[title] = ({name: marks[name] for name in names[:ROWS_MAX]}, max(0, len(names) - ROWS_MAX))
    return found


Show = Callable[[], object]


def watch_screen(config: Path | None, make: Callable[[OpenConsensus, ExitStack], Show]) -> NoReturn:
    """Show something repeatedly, until Ctrl-C. Resources that `make` puts on the stack stay open between turns.

    A cluster that becomes unavailable does not end it: the error is shown instead, and a connection that closed is
    opened again. Raises what the first opening raises.
    """
    was_open = False
    while True:
        try:
            with open_consensus_only(config, OPEN_TIMEOUT_S) as opened, ExitStack() as stack:
                was_open = True
                show = make(opened, stack)
                while redraw_screen(show):
                    pass
        except (UnavailableError, UnknownOutcomeError) as error:
            if not was_open:
                raise
            _show_outage(error)


def redraw_screen(show: Show) -> bool:
    """Clear the terminal, show something, and wait for a moment. Return whether its connection is still open."""
    if sys.stdout.isatty():
        print("\x1b[H\x1b[2J", end="", flush=True)
    try:
        show()
    except (UnavailableError, UnknownOutcomeError, ClosedError) as error:
        if ends_process(error):
            raise
        _show_outage(error)
        return not isinstance(error, ClosedError)
    sys.stdout.flush()
    threading.Event().wait(WATCH_INTERVAL_S)
    return True


def _show_outage(error: TidemillError) -> None:
    print(f"{error} This command continues to watch; Ctrl-C ends it.", file=sys.stderr, flush=True)
    threading.Event().wait(WATCH_INTERVAL_S)


_STYLES = {
    StageState.MOVING: "green",
    StageState.IDLE: "dim green",
    StageState.WAITING: "yellow",
    StageState.STUCK: "bold red",
    StageState.BLIND: "red",
}

STAGE_COLUMNS = (
    Column("stage"),
    Column("state", style=lambda row: _STYLES[row["state"]]),
    Column("behind", right=True),
    Column("age", right=True),
    Column("blocked by"),
)


def status_lines(marks: Mapping[str, DerivedStatus]) -> list[Row]:
    """Return the rows of `STAGE_COLUMNS`, the troubled stages first."""
    return [
        {
            "stage": name,
            "state": derived.state,
            "behind": lag_text(derived.mark),
            "age": f"{derived.report_age_ms / 1000:.1f} s",
            "blocked by": " ".join(part for part in (derived.blocker, derived.mark.reason) if part),
        }
        for name, derived in sorted(marks.items(), key=lambda item: (-severity_of(item[1])[0], item[0]))
    ]


def show_latency(reports: Sequence[StatusReport], out: Output) -> None:
    found = merge_latencies(reports)
    summaries = latency_summaries(found)
    rows = [
        {"source": source, "stage": stage, **summary}
        for source, stages in summaries.items()
        for stage, summary in stages.items()
    ]
    drawn = {source: latency_bars(stages) for source, stages in found.items()}
    columns = [Column("source"), Column("stage")]
    columns += [Column(name, partial(_format_figure, name), right=True) for name in FIGURES]
    columns.append(Column("", lambda row: drawn[row["source"]][row["stage"]]))
    out.rows(rows, columns, value=summaries)
    if out.is_text:
        print("ms since the commit, over the last five to ten minutes with data")


def _format_figure(name: str, row: Row) -> str:
    return "" if row[name] is None else f"{row[name]:,}"


def latency_bars(stages: Mapping[str, Histogram]) -> dict[str, str]:
    """Return a line of BAR characters for each stage, all to one scale: the greatest 95th percentile."""
    p50 = {stage: each.quantile(0.5) or 0 for stage, each in stages.items()}
    p95 = {stage: each.quantile(0.95) or 0 for stage, each in stages.items()}
    whole = max([1, *p95.values()])
    drawn, before = {}, 0
    for stage in stages:
        from_ms = 0 if stage == SINCE_BOUND else min(before, p50[stage])
        at, own, late = (round(BAR * ms / whole) for ms in (from_ms, p50[stage], p95[stage]))
        drawn[stage] = "·" * at + "█" * (own - at) + "░" * (late - own)
        before = p50[stage]
    return drawn
