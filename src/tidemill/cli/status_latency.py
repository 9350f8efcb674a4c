"""`tidemill status --latency`: how long commits take to reach each stage on the way to the tables, as processes report
it.

    · up to the median of the previous stage    █ this stage's median    ░ its 95th percentile

The fact `latency` of a report is {source: {stage: histogram}}. Histograms of one source are summed over all processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.base.status.histogram import SINCE_BOUND, STAGES, Histogram, merge_histograms
from tidemill.base.status.status import StatusReport
from tidemill.cli.context import print_json

BAR = 40
FIGURES = ("count", "p50", "p95", "p99", "max")

LatencyBySource = dict[str, dict[str, Histogram]]


def merge_latencies(reports: Sequence[StatusReport]) -> LatencyBySource:
    """Return {source: {stage: histogram}} with stages in their order. Unreadable entries are left out."""
    said: dict[str, list[dict[str, Histogram]]] = {}
    for report in reports:
        sources = report.facts.get("latency")
        for source, stages in sources.items() if isinstance(sources, dict) else ():
            if isinstance(stages, dict):
                said.setdefault(source, []).append(
                    {stage: Histogram.from_plain(plain) for stage, plain in stages.items()}
                )
    found: LatencyBySource = {}
    for source, several in sorted(said.items()):
        stages = merge_histograms(several)
        if stages:
            found[source] = {stage: stages[stage] for stage in (*STAGES, SINCE_BOUND) if stage in stages}
    return found


def show_latency(reports: Sequence[StatusReport], as_json: bool) -> None:
    found = merge_latencies(reports)
    if as_json:
        print_json(
            {source: {stage: each.summary() for stage, each in stages.items()} for source, stages in found.items()}
        )
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
