"""Which node serves a shape: shards anywhere, a captured table on the node that captures it.

A table's changes pass through the process that holds the replication slot, so its shapes live there.
Any other node answers 307 with that node's address; browsers and the published client follow it.
"""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.responses import JSONResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill.base.clock import Clock
from tidemill.consensus.api import Consensus
from tidemill.metastore.catalogue import CaptureRow, Catalogue

CACHE_S = 1.0
RETRY_AFTER_S = 1
SHARD_PREFIXES = ("shard.", "shard:")
CORS = {"access-control-allow-origin": "*", "cache-control": "no-store"}


class ShapeRouting:
    """ASGI middleware for `/v1/shape`. `holder` is this process's name in capture leases."""

    def __init__(self, app: ASGIApp, catalogue: Catalogue, consensus: Consensus, holder: str, clock: Clock) -> None:
        self._app = app
        self._catalogue = catalogue
        self._consensus = consensus
        self._holder = holder
        self._clock = clock
        self._owners: dict[str, str] = {}
        """schema.table → URL of the node that captures it; "" = this one"""
        self._known_since_s = -CACHE_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/shape" or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        query = scope["query_string"].decode("latin-1")
        table = next(iter(parse_qs(query).get("table", [])), "")
        owner = await self._owner(table) if table and not table.startswith(SHARD_PREFIXES) else ""
        if owner is None:
            message = {"message": f"no node captures this table just now: table={table}"}
            response = JSONResponse(message, 503, headers={**CORS, "retry-after": str(RETRY_AFTER_S)})
            await response(scope, receive, send)
        elif owner:
            await RedirectResponse(f"{owner}/v1/shape?{query}", 307, headers=CORS)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _owner(self, table: str) -> str | None:
        """ "" = serve here (unknown tables too: the shape room words that error), None = nobody leads it now."""
        now_s = self._clock.monotonic_s()
        if now_s - self._known_since_s > CACHE_S:
            self._owners = await self._read_owners()
            self._known_since_s = now_s
        name = table.replace('"', "")
        owner = self._owners.get(name if "." in name else f"public.{name}", "")
        return None if owner == "?" else owner

    async def _read_owners(self) -> dict[str, str]:
        leases = {lease.name.removeprefix("capture/"): lease for lease in await self._consensus.leases("capture/")}
        owners: dict[str, str] = {}
        for row in await self._catalogue.list(CaptureRow):
            lease = leases.get(row.name)
            if lease is not None and lease.live:
                owner = "" if lease.holder == self._holder else lease.info.decode()
            else:
                owner = "?"
            owners.update(dict.fromkeys(row.topics, owner))
        return owners
