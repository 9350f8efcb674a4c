"""Static files: the node's page, and directories of the configuration (`http.pages`).

/            the page of the node
/console/…   its scripts and styles, and vendored libraries that other pages may use, too
/NAME/…      a directory of `http.pages`, for example the page of an application

The node's page loads nothing from elsewhere, and its content security policy permits nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).with_name("static")
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a node that was upgraded serves another page: revalidate by ETag
}


class ConsoleFiles(StaticFiles):
    """Static files with the headers of the node's page."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    async def home(_: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    return [Route("/", home, methods=["GET"]), Mount("/console", ConsoleFiles(directory=STATIC))]


def configured_pages(pages: Mapping[str, str]) -> list[BaseRoute]:
    """Return a mount for each directory of `http.pages`. A directory need not exist yet."""
    return [
        Mount(f"/{name}", StaticFiles(directory=directory, html=True, check_dir=False))
        for name, directory in sorted(pages.items())
    ]
