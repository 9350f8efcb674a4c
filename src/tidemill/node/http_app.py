"""The application of one set of routes: what no route serves is refused in words, as JSON, like all else."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute


def application(routes: Sequence[BaseRoute]) -> Starlette:
    return Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _failed})


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "There is nothing at this path.", 405: f"This path does not take {request.method}."}
    headers = {**(error.headers or {}), "cache-control": "no-store"}
    return JSONResponse({"message": said.get(error.status_code, error.detail)}, error.status_code, headers)


def _failed(request: Request, error: Exception) -> Response:
    """Of a handler that raised; the error is raised again behind it, and logged."""
    return JSONResponse({"message": "Internal error"}, 500, {"cache-control": "no-store"})
