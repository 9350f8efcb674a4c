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
from typing import Annotated, Any, NoReturn

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
    DerivedStatus,
    StageState,
    StatusReport,
    derive_statuses,
    lag_text,
    severity_of,
)
from tidemill.cli.context import (
    EXIT_GOOD,
    OPEN_TIMEOUT_S,
    ConfigOption,
    JsonOption,
    OpenConsensus,
    open_consensus_only,
    print_json,
)
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
    bool, typer.Option("--facts", help="Instead, print the facts (counters and gauges) of each process as JSON.")
]


def status(
    config: ConfigOption = None,
    every: All = False,
    watch: Watch = False,
    memory: Memory = False,
    latency: Latency = False,
    facts: Facts = False,
    as_json: JsonOption = False,
) -> None:
    """Show each source and table: its state, its delay, and what blocks it.

    Exit 0 fresh, 1 lagging, 3 stuck: the worst of all stages, including hidden ones. `--watch` does not end when the
    cluster goes down.
    """

    def show(opened: OpenConsensus) -> int:
        """Print the requested view, and return the exit code."""
        reports = read_reports(opened)
        if memory:
            show_memory(reports, as_json)
        elif latency:
            show_latency(reports, as_json)
        elif facts:
            print_json(facts_by_process(reports))
        else:
            marks = derive_statuses(reports, opened.clock.now_ms())
            if as_json:
                print_json(stage_rows(marks))
            else:
                show_status(marks, reports, every)
            return max((EXIT_BY_STATE.get(derived.state, 0) for derived in marks.values()), default=0)
        return EXIT_GOOD

    if watch:
        watch_screen(config, lambda opened, _: partial(show, opened))
    with open_consensus_only(config, OPEN_TIMEOUT_S) as opened:
        raise SystemExit(show(opened))


def read_reports(opened: OpenConsensus) -> list[StatusReport]:
    """Return the reports of all processes. Raises UnavailableError when no process reports."""
    from tidemill.consensus.status.board import StatusBoard

    board = StatusBoard(opened.consensus, opened.rand)
    reports = opened.portal.call(board.reports_or_raise(opened.consensus.trouble))
    if not reports:
        raise UnavailableError("no process of the cluster is running.", fix="Start one: tidemill up.")
    return reports


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


def show_status(marks: Mapping[str, DerivedStatus], reports: Sequence[StatusReport], every: bool) -> None:
    from rich.console import Console

    console = Console()
    if every:
        console.print(status_table(marks))
        return
    groups = group_stages(marks)
    for title, (shown, more) in groups.items():
        if shown:
            console.print(status_table(shown, title))
        if more:
            print(f"and {more:,} more: tidemill status --all")
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
    """Show something again and again, until Ctrl-C. Resources that `make` puts on the stack stay open between turns.

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


def status_table(marks: Mapping[str, DerivedStatus], title: str = "") -> Any:
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


def show_latency(reports: Sequence[StatusReport], as_json: bool) -> None:
    found = merge_latencies(reports)
    if as_json:
        print_json(latency_summaries(found))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    view = Table(expand=False, caption="ms since the commit, over the last five to ten minutes with data")
    view.add_column("source")
    view.add_column("stage")
    for heading in FIGURES:
        view.add_column(heading, justify="right", min_width=5)
    view.add_column("", no_wrap=True, overflow="crop")
    for source, stages in found.items():
        drawn = latency_bars(stages)
        for stage, histogram in stages.items():
            summary = histogram.summary()
            figures = ["" if summary[name] is None else f"{summary[name]:,}" for name in FIGURES]
            view.add_row(Text(source), stage, *figures, drawn[stage])
    Console().print(view)


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
