"""Routing of shape requests: any node serves shapes of shards; the capturing node serves shapes of a captured table.

A table's changes pass through the process that holds the replication slot, so its shapes live there. Any other node
answers 307 with that node's address; browsers and the published client follow it.
"""

from __future__ import annotations

import asyncio

import structlog
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError, TidemillError
from tidemill.capture.naming import table_name, topic_name
from tidemill.consensus.api import Consensus, Lease
from tidemill.metastore.catalogue import Catalogue
from tidemill.node.captures.balancer import node_of
from tidemill.shapes.definition.planner import SHARD_PREFIXES, parse_shard_name, parse_table_name
from tidemill.shapes.http.authorization import NAME_PARAM, ShapeAuthorizer

CACHE_S = 1.0
RETRY_AFTER_S = 1
ROUTED_METHODS = ("GET", "HEAD", "POST")
"""Routed methods. 307 retains method and body: a POST requests a subset of the shape that its query names."""

NO_STORE = {"cache-control": "no-store"}

log = structlog.get_logger()


class ShapeRouting:
    """ASGI middleware for `/v1/shape`. `holder` is this process's name in capture leases."""

    def __init__(
        self,
        app: ASGIApp,
        catalogue: Catalogue,
        consensus: Consensus,
        holder: str,
        clock: Clock,
        grants: ShapeAuthorizer | None = None,
    ) -> None:
        self._app = app
        self._grants = grants or ShapeAuthorizer(clock)
        self._catalogue = catalogue
        self._consensus = consensus
        self._holder = holder
        self._clock = clock
        self._owners: dict[tuple[str, str], str] = {}
        """Owners: (capture, schema.table) → URL of the node that captures it; "" for this node, "?" for none at
        present."""
        self._captures: frozenset[str] = frozenset()
        """Known captures, including those without a table."""
        self._looked_s = -CACHE_S
        self._known = False
        self._looking = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/shape" or scope["method"] not in ROUTED_METHODS:
            await self._app(scope, receive, send)
            return
        query = scope["query_string"].decode("latin-1")
        asked = QueryParams(query)
        table = self._grants.requested_table(asked)
        owner = await self._owner_url(table) if table and not table.startswith(SHARD_PREFIXES) else ""
        if owner is None:
            name = f"shape={asked[NAME_PARAM]}" if NAME_PARAM in asked else f"table={table}"
            message = {"message": f"no node captures this table at present: {name}"}
            response = JSONResponse(message, 503, headers={**NO_STORE, "retry-after": str(RETRY_AFTER_S)})
            await response(scope, receive, send)
        elif owner:
            await RedirectResponse(f"{owner}/v1/shape?{query}", 307, headers=NO_STORE)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _owner_url(self, table: str) -> str | None:
        """Return the URL of the node to redirect to; "" to serve here, None if no node leads the table at present.

        An unknown table may have been created a moment ago. If one other node runs all captures that may have it, that
        node is asked; otherwise the shape room here answers with its error.
        """
        await self._refresh_owners()
        if not self._known:
            return None
        prefix, _, rest = table.partition(":")
        named = prefix in self._captures
        try:
            name = table_name(*parse_table_name(rest if named else table))
        except InvalidError:
            return ""
        found = {
            owner
            for (capture, captured), owner in self._owners.items()
            if captured == name and (not named or capture == prefix)
        }
        found = found or {owner for (capture, _), owner in self._owners.items() if not named or capture == prefix}
        owner = found.pop() if len(found) == 1 else ""
        return None if owner == "?" else owner

    async def topics_of(self, table: str) -> list[str]:
        """Return the topics whose records a shape of `table` shows: `shard.NAME` for a shard, however the request
        spells it; for an unknown table all topics that it may get, because a request may wait for it; `table` itself
        if it is neither."""
        shard = parse_shard_name(table)
        if shard is not None:
            return [f"shard.{shard}"]
        await self._refresh_owners()
        prefix, _, rest = table.partition(":")
        named = prefix in self._captures
        try:
            wanted = parse_table_name(rest if named else table)
        except InvalidError:
            return [table]
        name = table_name(*wanted)
        found = [
            topic_name(capture, *wanted)
            for capture, captured in sorted(self._owners)
            if captured == name and (not named or capture == prefix)
        ]
        may = sorted(self._captures)
        return found or [topic_name(each, *wanted) for each in may if not named or each == prefix] or [table]

    async def _refresh_owners(self) -> None:
        """Refresh the owners at most once a second, for all concurrent callers. A failed refresh leaves them
        unchanged."""
        if self._known and self._looking.locked():
            return
        async with self._looking:
            if self._clock.monotonic_s() - self._looked_s <= CACHE_S:
                return
            try:
                self._owners, self._captures = await self._read_owners()
                self._known = True
            except TidemillError as error:
                log.warning("captures could not be read", error=str(error))
            self._looked_s = self._clock.monotonic_s()

    def _redirect_target(self, lease: Lease) -> str:
        """Return where to send a request. An earlier process of this node whose lease has not expired had this
        node's address: a redirect there would come back here in a loop."""
        if lease.holder == self._holder:
            return ""
        return "?" if node_of(lease.holder) == node_of(self._holder) else lease.info.decode()

    async def _read_owners(self) -> tuple[dict[tuple[str, str], str], frozenset[str]]:
        leases = {lease.name.removeprefix("capture/"): lease for lease in await self._consensus.leases("capture/")}
        owners: dict[tuple[str, str], str] = {}
        for table in await self._catalogue.all_tables():
            lease = leases.get(table.capture)
            owners[table.capture, table.table] = (
                self._redirect_target(lease) if lease is not None and lease.live else "?"
            )
        return owners, frozenset(leases) | {capture for capture, _ in owners}
