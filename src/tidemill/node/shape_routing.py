"""Routing of shape requests: any node serves shapes of shards; the capturing node serves shapes of a captured table.

A table's changes pass through the process that holds the replication slot, so its shapes live there. Any other node
answers 307 with that node's address; browsers and the published client follow it.

- Invariant (one answer): every node gives a table without its capture's name the same meaning, from rows and leases
  that all nodes read: the only capture that carries it. Of several on different nodes, all nodes answer as one node
  with all of these captures does.
- Invariant (no disclosure): a request without the secret of the shapes, or with a signature that is not valid, is not
  routed, because a redirect and an error name captured tables and nodes. The shape room of this node refuses it.
- Invariant (every capture is asked): a table that no row names may have been created a moment ago, and only its capture
  knows. So a request for it visits the nodes of all captures, in the order of their names, until one has the table. The
  redirect lists the captures that do not have it (`ASKED_PARAM`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

import structlog
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError, TidemillError
from tidemill.capture.naming import table_name, topic_name
from tidemill.consensus.api import Consensus, Lease
from tidemill.metastore.catalogue import Catalogue
from tidemill.node.captures.balancer import node_of
from tidemill.shapes.definition.permissions import AccessDeniedError
from tidemill.shapes.definition.planner import SHARD_PREFIXES, parse_shard_name, parse_table_name
from tidemill.shapes.http.authorization import NAME_PARAM, ShapeAuthorizer, check_secret, client_host, is_signed
from tidemill.shapes.http.error_status import NOT_CAPTURED_KEY, ROUTING_ERROR_KEY
from tidemill.shapes.http.params import BadRequestError
from tidemill.shapes.tables.table_search import several_databases_error

CACHE_S = 1.0
RETRY_AFTER_S = 1
ROUTED_METHODS = ("GET", "HEAD", "POST")
"""Routed methods. 307 retains method and body: a POST requests a subset of the shape that its query names."""

NO_STORE = {"cache-control": "no-store"}

ASKED_PARAM = "tidemill_asked"
"""Last parameter of a redirect for a table that no row names: captures that do not have it, comma-separated. It is
removed before the request is served."""

NOWHERE = "?"
"""Instead of a URL: the node that leads the capture cannot be named at present."""

log = structlog.get_logger()


def _rank(state: str, *, led: bool) -> int:
    """Return the rank of a captured table among those of its name; the lowest one is meant. `led`: a node leads its
    capture.

    The search of one node prefers states in this order, too. First come captured tables, then parked ones, whose
    changes will continue. Skipped tables come after tables whose capture moves to another node, so that clients of the
    latter do not have to start over.
    """
    if state in ("captured", "parked"):
        return (0 if state == "captured" else 1) if led else 2
    return 3 if led else 4


class _Route(NamedTuple):
    """The node that serves a request.

    url       its URL, "" = this node, None = no node at present
    rivals    captures on several nodes that have the table
    missing   captures that do not have it
    own       captures of this node, if others follow
    next_url  as `url`, if the captures of this node do not have the table either
    """

    url: str | None = ""
    rivals: Sequence[str] = ()
    missing: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    next_url: str | None = ""


def _split_asked(query: str) -> tuple[str, tuple[str, ...]]:
    """Return the query as its client sent it, and the captures that do not have its table."""
    before, mark, after = query.rpartition(f"&{ASKED_PARAM}=")
    return (before, tuple(unquote(after).split(","))) if mark and "&" not in after else (query, ())


class _UnlessNotCaptured:
    """Sends a response on, unless it states that no capture of this node has the table."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send

    async def send(self, message: Message) -> None:
        if not self.suppressed:
            await self._send(message)

    @property
    def suppressed(self) -> bool:
        return NOT_CAPTURED_KEY in self._scope


class ShapeRouting:
    """ASGI middleware for `/v1/shape`. `holder`: this process's name in capture leases. `secret`: `shapes.secret`."""

    def __init__(
        self,
        app: ASGIApp,
        catalogue: Catalogue,
        consensus: Consensus,
        holder: str,
        clock: Clock,
        grants: ShapeAuthorizer | None = None,
        secret: str = "",
    ) -> None:
        self._app = app
        self._grants = grants or ShapeAuthorizer(clock)
        self._secret = secret
        self._catalogue = catalogue
        self._consensus = consensus
        self._holder = holder
        self._clock = clock
        self._states: dict[tuple[str, str], str] = {}
        """(capture, schema.table) → state of the table."""
        self._leaders: Mapping[str, str | None] = {}
        """Known captures, including those without a table → URL of the node that captures; "" for this node, NOWHERE,
        or None if no node leads it."""
        self._looked_s = -CACHE_S
        self._known = False
        self._looking = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/shape" or scope["method"] not in ROUTED_METHODS:
            await self._app(scope, receive, send)
            return
        query, asked_before = _split_asked(scope["query_string"].decode("latin-1"))
        scope["query_string"] = query.encode("latin-1")
        asked = QueryParams(query)
        table = self._grants.requested_table(asked)
        route = _Route()
        if table and not table.startswith(SHARD_PREFIXES) and self._has_credential(asked, client_host(scope)):
            route = await self._find_route(table, asked_before)
        if route.rivals:
            scope[ROUTING_ERROR_KEY] = several_databases_error(
                (capture, *parse_table_name(table)) for capture in route.rivals
            )
        url, missing = route.url, route.missing
        if url == "":
            if not route.own:
                await self._app(scope, receive, send)
                return
            sender = _UnlessNotCaptured(scope, send)
            await self._app(scope, receive, sender.send)
            if not sender.suppressed:
                return
            url, missing = route.next_url, (*missing, *route.own)
        if url is None:
            name = f"shape={asked[NAME_PARAM]}" if NAME_PARAM in asked else f"table={table}"
            message = {"message": f"no node captures this table at present: {name}"}
            response = JSONResponse(message, 503, headers={**NO_STORE, "retry-after": str(RETRY_AFTER_S)})
            await response(scope, receive, send)
        else:
            mark = f"&{ASKED_PARAM}={quote(','.join(missing), safe=',')}" if missing else ""
            await RedirectResponse(f"{url}/v1/shape?{query}{mark}", 307, headers=NO_STORE)(scope, receive, send)

    def _has_credential(self, query: QueryParams, host: str) -> bool:
        """Return whether the signature, or without one the secret, is valid. Tokens and passwords are checked before
        (`http.auth`)."""
        try:
            if is_signed(query):
                self._grants.authorize(query, None, host)
            else:
                check_secret(query, self._secret)
        except (AccessDeniedError, BadRequestError):
            return False
        return True

    async def _find_route(self, table: str, asked_before: Sequence[str]) -> _Route:
        await self._refresh_owners()
        if not self._known:
            return _Route(None)
        prefix, _, rest = table.partition(":")
        named = prefix in self._leaders
        try:
            name = table_name(*parse_table_name(rest if named else table))
        except InvalidError:
            return _Route()
        captures = [prefix] if named else sorted(self._leaders)
        ranks = {
            capture: _rank(self._states[capture, name], led=self._leaders[capture] is not None)
            for capture in captures
            if self._states.get((capture, name), "dropped") != "dropped"
        }
        if not ranks:
            return self._route_unknown(captures, asked_before)
        best = [capture for capture, rank in ranks.items() if rank == min(ranks.values())]
        urls = {self._leaders[capture] for capture in best}
        if len(urls) > 1 and ranks[best[0]] == 0:
            return _Route(rivals=best)
        return _Route(_reachable(self._leaders[best[0]]))

    def _route_unknown(self, captures: Sequence[str], asked_before: Sequence[str]) -> _Route:
        """Return the route of a table that no row names: to the nodes of `captures`, one after the other.

        Captures that no node leads are not waited for: they may have been removed from the configuration.
        """
        led = [capture for capture in captures if self._leaders[capture] is not None]
        if not led:
            return _Route(None if captures else "")
        own = tuple(capture for capture in led if self._leaders[capture] == "")
        missing = tuple(capture for capture in asked_before if capture in led)
        others = [self._leaders[capture] for capture in led if capture not in (*own, *missing)]
        if not others or not set(own) <= set(missing):
            return _Route("", missing=missing, own=own if others else (), next_url=_reachable(next(iter(others), "")))
        return _Route(_reachable(others[0]), missing=missing)

    def is_led_elsewhere(self, capture: str) -> bool:
        """Return whether another node led the capture when the leaders were last read."""
        return self._leaders.get(capture) not in (None, "", NOWHERE)

    async def topics_of(self, table: str) -> list[str]:
        """Return the topics whose records a shape of `table` shows: `shard.NAME` for a shard, however the request
        spells it; for an unknown table all topics that it may get, because a request may wait for it; `table` itself
        if it is neither."""
        shard = parse_shard_name(table)
        if shard is not None:
            return [f"shard.{shard}"]
        await self._refresh_owners()
        prefix, _, rest = table.partition(":")
        named = prefix in self._leaders
        try:
            wanted = parse_table_name(rest if named else table)
        except InvalidError:
            return [table]
        name = table_name(*wanted)
        found = [
            topic_name(capture, *wanted)
            for capture, captured in sorted(self._states)
            if captured == name and (not named or capture == prefix)
        ]
        may = sorted(self._leaders)
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
                self._states, self._leaders = await self._read_owners()
                self._known = True
            except TidemillError as error:
                log.warning("captures could not be read", error=str(error))
            self._looked_s = self._clock.monotonic_s()

    def _redirect_target(self, lease: Lease) -> str:
        """Return where to send a request. An earlier process of this node whose lease has not expired had this
        node's address: a redirect there would come back here in a loop."""
        if lease.holder == self._holder:
            return ""
        return NOWHERE if node_of(lease.holder) == node_of(self._holder) else lease.info.decode()

    async def _read_owners(self) -> tuple[dict[tuple[str, str], str], Mapping[str, str | None]]:
        leases = await self._consensus.leases("capture/")
        states = {(table.capture, table.table): table.state for table in await self._catalogue.all_tables()}
        leaders: dict[str, str | None] = {capture: None for capture, _ in states}
        for lease in leases:
            leaders[lease.name.removeprefix("capture/")] = self._redirect_target(lease) if lease.live else None
        return states, leaders


def _reachable(url: str | None) -> str | None:
    return None if url == NOWHERE else url
