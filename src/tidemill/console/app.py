"""The console's routes: health for load balancers, metrics for Prometheus, the JSON API (`api`), pages (`pages`).

/api/status   {"marks": [...], "facts": {process: {...}}, "processes": {process: pid}}: what `tidemill status --json`
              prints, and more
/healthz      200 while the process responds
/readyz       200 while the node serves and its dependencies work, else 503 with the reason. After "ready": one line for
              each failure that does not make the node unusable (one write of a store, a captured database)
/freshz       200 while no stage is stuck or blind, else 503 with the reasons. ?table=NAME (or ?mark=NAME) checks one
              table, and reports the worst stage between it and its source
/metrics      Prometheus text: counters and gauges of this process, one gauge for the lag of each stage, and by driver
              the violations of each expectation and the late records of tables with a sequence
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from tidemill.base.errors import TidemillError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.base.status.freshness import resolve_status_name, verdict_of
from tidemill.base.status.status import StageState, StatusReport, derive_statuses, lag_of
from tidemill.console.api import api_routes
from tidemill.console.cluster_reader import ConsoleNode
from tidemill.console.pages import configured_pages, page_routes
from tidemill.console.views.pipelines import count_metrics
from tidemill.console.views.stages import status_answer

_COUNTED = (
    ("tidemill_violations", "violations", "expectation", "records that violate an expectation"),
    ("tidemill_late_records", "sequence", "kind", "records that sequence_by beat, or a tombstone until it expired"),
)
"""Metrics of records by table: name, field of the table's facts, label, text."""

Answer = Callable[[Request], Awaitable[Response]]


def console_routes(node: ConsoleNode) -> list[BaseRoute]:
    """Return the read-only routes; every response is derived from currently published statuses and stored rows.

    If the statuses cannot be read (consensus is unavailable), the routes that need them return 503 with the reason.
    """

    clock, reports = node.clock, node.read_reports
    pace = CoopBudget(clock)

    async def status(_: Request) -> Response:
        found = await reports()
        if pace.is_used_up:
            await pace.wait_for_turn()
        return JSONResponse(status_answer(found, clock.now_ms()))

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        sentence = node.not_ready_reason()
        if sentence:
            return PlainTextResponse(f"{sentence}\n", 503)
        return PlainTextResponse("".join(f"{line}\n" for line in ("ready", *node.current_problems())))

    async def freshz(request: Request) -> Response:
        marks = derive_statuses(await reports(), clock.now_ms())
        name = request.query_params.get("table") or request.query_params.get("mark")
        if name is None:
            late = [d for d in marks.values() if d.state in (StageState.STUCK, StageState.BLIND)]
        else:
            try:
                found = verdict_of(marks, resolve_status_name(marks, name))
            except KeyError:
                return PlainTextResponse(f"no such table or mark: {name}\n", 404)
            late = [found.worst] if found.worst.state in (StageState.STUCK, StageState.BLIND) else []
        lines = [" ".join(filter(None, (d.mark.name, d.state, d.mark.held_by, d.mark.reason))) + "\n" for d in late]
        return PlainTextResponse("".join(lines) or "fresh\n", 503 if late else 200)

    async def metrics(_: Request) -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        found: Sequence[StatusReport] = ()
        with contextlib.suppress(TidemillError):  # this process's own counters matter most without consensus
            found = await reports()
        marks = derive_statuses(found, clock.now_ms())
        if pace.is_used_up:
            await pace.wait_for_turn()
        lines = ["# HELP tidemill_mark_behind distance of a stage from its input, in the stage's own unit"]
        lines.append("# TYPE tidemill_mark_behind gauge")
        for name, derived in marks.items():
            far = lag_of(derived.mark)
            value = "NaN" if far is None else far
            lines.append(f'tidemill_mark_behind{{mark="{_escape_label(name)}",state="{derived.state}"}} {value}')
        for metric, field, label, text in _COUNTED:
            lines += [f"# HELP {metric} {text}, in the appends of a driver", f"# TYPE {metric} counter"]
            for process, table, name, count in count_metrics(field, found):
                labels = {"process": process, "table": table, label: name}
                shown = ",".join(f'{key}="{_escape_label(value)}"' for key, value in labels.items())
                lines.append(f"{metric}{{{shown}}} {count}")
        return Response(generate_latest() + ("\n".join(lines) + "\n").encode(), media_type=CONTENT_TYPE_LATEST)

    def with_error_responses(answer: Answer) -> Answer:
        async def respond(request: Request) -> Response:
            try:
                return await answer(request)
            except TidemillError as error:
                return PlainTextResponse(f"{error}\n", 503)

        return respond

    return [
        *page_routes(),
        Route("/api/status", with_error_responses(status)),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/freshz", with_error_responses(freshz)),
        Route("/metrics", metrics),
        *api_routes(node),
        *configured_pages(node.config.http.pages),
    ]


def _escape_label(text: str) -> str:
    """Escape a Prometheus label value (exposition format: backslash, quote and line feed)."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
