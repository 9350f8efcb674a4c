"""The console's routes: marks as JSON, health for load balancers, metrics for Prometheus, static pages.

/api/status   {"marks": [...], "facts": {process: {...}}}, what `tidemill status --json` prints and more
/healthz      200 while the process answers
/readyz       200 once the node serves, else 503
/freshz       200 while no mark is stuck or blind, else 503 with the reasons; ?mark=NAME asks about one
/metrics      Prometheus text: this process's counters and one gauge for each mark's lag
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from tidemill.base.clock import Clock
from tidemill.base.marks import Report, State, as_row, derive_all

STATIC = Path(__file__).with_name("static")
Reports = Callable[[], Awaitable[Sequence[Report]]]


def console_routes(reports: Reports, ready: Callable[[], bool], clock: Clock) -> list[BaseRoute]:
    """Read-only routes; everything is derived from published marks when asked."""

    async def status(_: Request) -> Response:
        found = await reports()
        marks = derive_all(found, clock.now_ms())
        facts = {report.process: report.facts for report in found}
        return JSONResponse({"marks": [as_row(d) for d in marks.values()], "facts": facts})

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        return PlainTextResponse("ready\n") if ready() else PlainTextResponse("starting\n", 503)

    async def freshz(request: Request) -> Response:
        marks = derive_all(await reports(), clock.now_ms())
        name = request.query_params.get("mark")
        if name is not None and name not in marks:
            return PlainTextResponse(f"no such mark: {name}\n", 404)
        asked = [marks[name]] if name is not None else list(marks.values())
        late = [d for d in asked if d.state in (State.STUCK, State.BLIND)]
        lines = [f"{d.mark.name} {d.state} {d.mark.held_by} {d.mark.reason}\n" for d in late]
        return PlainTextResponse("".join(lines) or "fresh\n", 503 if late else 200)

    async def metrics(_: Request) -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        marks = derive_all(await reports(), clock.now_ms())
        lines = ["# HELP tidemill_mark_behind how far a stage is from its input, in the mark's own unit"]
        lines.append("# TYPE tidemill_mark_behind gauge")
        for derived in marks.values():
            behind = max(0, derived.mark.target - derived.mark.position)
            lines.append(f'tidemill_mark_behind{{mark="{derived.mark.name}",state="{derived.state}"}} {behind}')
        return Response(generate_latest() + ("\n".join(lines) + "\n").encode(), media_type=CONTENT_TYPE_LATEST)

    async def home(_: Request) -> Response:
        return RedirectResponse("/demo/demo.html")

    return [
        Route("/", home),
        Route("/demo", home),
        Route("/api/status", status),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/freshz", freshz),
        Route("/metrics", metrics),
        Mount("/demo", StaticFiles(directory=STATIC)),
    ]
