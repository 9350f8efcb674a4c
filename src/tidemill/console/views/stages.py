"""Stages, their verdicts, facts and latencies, as `status` and `why` print them and `/api/status` answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.base.status.freshness import Verdict
from tidemill.base.status.histogram import SINCE_BOUND, STAGES, Histogram, merge_histograms
from tidemill.base.status.status import DerivedStatus, StatusReport, derive_statuses, status_row

LatencyBySource = dict[str, dict[str, Histogram]]


def stage_rows(marks: Mapping[str, DerivedStatus]) -> list[dict[str, object]]:
    """Return `status --json`."""
    return [status_row(derived) for derived in marks.values()]


def facts_by_process(reports: Sequence[StatusReport]) -> dict[str, dict[str, object]]:
    """Return `status --facts`."""
    return {report.process: report.facts for report in reports}


def status_answer(reports: Sequence[StatusReport], now_ms: int) -> dict[str, object]:
    """Return the answer of `/api/status`: the stages, with the facts and the pid of each process."""
    return {
        "marks": stage_rows(derive_statuses(reports, now_ms)),
        "facts": facts_by_process(reports),
        "processes": {report.process: report.pid for report in reports},
    }


def verdict_row(found: Verdict, exit_code: int, note: str = "") -> dict[str, object]:
    """Return `why --json`. `exit_code` may be worse than that of the verdict alone. `note` is about the name."""
    return {
        "state": str(found.worst.state),
        "exit": exit_code,
        "worst": status_row(found.worst),
        "root": found.root,
        "chain": [status_row(derived) for derived in found.chain],
    } | ({"note": note} if note else {})


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


def latency_summaries(latencies: LatencyBySource) -> dict[str, dict[str, dict[str, int | None]]]:
    """Return `status --latency --json`: source → stage → {"count", "p50", "p95", "p99", "max"}, in ms."""
    return {source: {stage: each.summary() for stage, each in stages.items()} for source, stages in latencies.items()}
