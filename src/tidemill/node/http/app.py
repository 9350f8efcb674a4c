"""Application of a set of routes. A request that no route serves is refused as JSON, like every other refusal."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute


def build_application(routes: Sequence[BaseRoute]) -> Starlette:
    return Starlette(
        routes=routes, exception_handlers={HTTPException: _http_error_response, Exception: _internal_error_response}
    )


def _http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "There is nothing at this path.", 405: f"This path does not support {request.method}."}
    headers = {**(error.headers or {}), "cache-control": "no-store"}
    return JSONResponse({"message": said.get(error.status_code, error.detail)}, error.status_code, headers)


def _internal_error_response(request: Request, error: Exception) -> Response:
    """Return the response for a handler that raised. Starlette raises the error again, and the server logs it."""
    return JSONResponse({"message": "Internal error"}, 500, {"cache-control": "no-store"})
