"""The node that serves a shape, for every way to write its table's name, also while consensus is unreachable."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from starlette.types import ASGIApp

from support.shapes.signing import KEYS, query_of
from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.errors import UnavailableError
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.api import Lease
from tidemill.metastore.catalogue import CaptureTableRow
from tidemill.node.http.auth import AuthDependencies, AuthMiddleware
from tidemill.node.http.server import build_application
from tidemill.node.shape_routing import ShapeRouting
from tidemill.shapes import ShapeService, ShapeSettings, shape_routes
from tidemill.shapes.definition.planner import ShapeRequest
from tidemill.shapes.definition.server_defined import ServerDefinedShape
from tidemill.shapes.definition.signed_urls import SigningKeys
from tidemill.shapes.http.authorization import ShapeAuthorizer


class Cluster:
    """Leases and captures, the part of consensus and catalogue that routing uses."""

    def __init__(self) -> None:
        self.away = False
        self.looks = 0
        self.led_by = {"shop": "b", "crm": "c"}
        self.unled: set[str] = set()
        """Captures whose lease has ended."""
        self.more: list[tuple[str, str, str]] = []
        """Further tables: capture, table, state."""
        self.slow = asyncio.Event()
        self.slow.set()

    async def leases(self, _: str) -> list[Lease]:
        self.looks += 1
        await self.slow.wait()
        if self.away:
            raise UnavailableError("consensus does not answer.")
        return [
            Lease(f"capture/{capture}", f"{node}/1", 1, 1, 1, capture not in self.unled, f"http://{node}".encode())
            for capture, node in self.led_by.items()
        ]

    async def all_tables(self) -> list[CaptureTableRow]:
        shop = [("shop", name) for name in ("public.orders", "public.Odd Name", "sales.orders", "public.both")]
        crm = [("crm", name) for name in ("public.people", "public.both")]
        rows = [(capture, table, "captured") for capture, table in (*shop, *crm)]
        return [CaptureTableRow(capture, table, "t", state) for capture, table, state in (*rows, *self.more)]


class Router:
    def __init__(self) -> None:
        self.cluster = Cluster()
        self.clock = ManualClock()
        stores: Any = self.cluster
        named = [
            ServerDefinedShape("mine", "orders"),
            ServerDefinedShape("theirs", "people"),
            ServerDefinedShape("sums", "shard.orders"),
        ]
        grants = ShapeAuthorizer(self.clock, named)
        self.app = ShapeRouting(self._here, stores, stores, "a/1", self.clock, grants=grants)

    async def _here(self, _: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, table: str, method: str = "GET", parameter: str = "table") -> tuple[int, str]:
        """Return (status, host of the redirect)."""
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        query = f"{parameter}={quote(table)}&offset=-1".encode()
        scope = {"type": "http", "path": "/v1/shape", "method": method, "query_string": query, "headers": []}
        await self.app(scope, None, send)  # type: ignore[arg-type]
        location = dict(sent[0]["headers"]).get(b"location", b"").decode()
        return sent[0]["status"], location.partition("/v1/shape")[0]


@pytest.mark.parametrize(
    ("table", "status", "host"),
    [
        ("orders", 307, "http://b"),
        ("Orders", 307, "http://b"),
        ("PUBLIC.orders", 307, "http://b"),
        ('"public"."orders"', 307, "http://b"),
        ("shop:orders", 307, "http://b"),
        ("sales.orders", 307, "http://b"),
        ('"Odd Name"', 307, "http://b"),
        ("Odd Name", 307, "http://c"),  # no capture has it yet: both are asked
        ("people", 307, "http://c"),
        ("crm:both", 307, "http://c"),
        ("shop:both", 307, "http://b"),
        ("both", 200, ""),
        ("crm:orders", 307, "http://c"),  # it may have been made a moment ago: its capture is asked
        ('"unterminated', 200, ""),
        ("a.b.c", 200, ""),
        ("shard.orders", 200, ""),
        ("tidemill.orders", 200, ""),
        ("shop:tidemill.orders", 307, "http://b"),
        ("shop:shard.orders", 307, "http://b"),
    ],
)
def test_a_table_is_found_as_the_shapes_write_it(table: str, status: int, host: str) -> None:
    assert asyncio.run(Router().ask(table)) == (status, host)


@pytest.mark.parametrize(
    ("name", "status", "host"),
    [("mine", 307, "http://b"), ("theirs", 307, "http://c"), ("sums", 200, ""), ("nothing", 200, "")],
)
def test_a_shape_that_the_server_defines_is_found_by_its_table(name: str, status: int, host: str) -> None:
    assert asyncio.run(Router().ask(name, parameter="shape")) == (status, host)


def test_a_subset_by_post_is_sent_to_the_node_that_captures_its_table() -> None:
    assert asyncio.run(Router().ask("orders", "POST")) == (307, "http://b")
    assert asyncio.run(Router().ask("orders", "DELETE")) == (200, "")


async def test_while_consensus_is_away_what_was_known_is_used_and_else_the_client_tries_again() -> None:
    router = Router()
    router.cluster.away = True
    assert await router.ask("orders") == (503, "")
    assert await router.ask("tidemill.orders") == await router.ask("shard.orders") == (200, "")
    router.cluster.away = False
    router.clock.advance(1_500)
    assert await router.ask("orders") == (307, "http://b")
    router.cluster.away = True
    router.clock.advance(1_500)
    assert await router.ask("orders") == (307, "http://b")


async def test_many_requests_share_one_look() -> None:
    router = Router()
    router.cluster.slow.clear()
    first = [asyncio.ensure_future(router.ask("orders")) for _ in range(20)]
    await asyncio.sleep(0)
    router.cluster.slow.set()
    assert set(await asyncio.gather(*first)) == {(307, "http://b")}
    assert router.cluster.looks == 1
    router.clock.advance(1_500)
    router.cluster.slow.clear()
    looking = asyncio.ensure_future(router.ask("orders"))
    await asyncio.sleep(0)
    assert await router.ask("orders") == (307, "http://b"), "nobody else waits for the look under way"
    router.cluster.slow.set()
    await looking
    assert router.cluster.looks == 2


class Capture:
    """A capture without tables, as its shapes query it. It may be `adding` one."""

    knows_tables = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.adding = ""

    async def wait_for_table(self, schema: str, table: str, timeout_s: float) -> bool:
        self.asked.append(table)
        if table == self.adding:
            raise UnavailableError("the table is being added.")
        return False

    def check_tables_soon(self) -> None: ...

    def unavailability(self, schema: str, table: str) -> None: ...


class Nodes:
    """Nodes a, b and c with the shapes of the captures that they lead. `async with Nodes(cluster) as nodes`.

    With `signing`, the nodes authenticate clients.
    """

    def __init__(
        self, cluster: Cluster, settings: ShapeSettings | None = None, signing: SigningKeys | None = None
    ) -> None:
        self._cluster: Any = cluster
        self._signing = signing
        self._secret = settings.secret if settings is not None else ""
        self.captures = {name: Capture() for name in cluster.led_by}
        self.services = {node: ShapeService(SystemClock(), Rand(1), StatusTracker(), settings) for node in "abc"}
        self._apps: dict[str, ASGIApp] = {}

    async def __aenter__(self) -> Nodes:
        for capture, node in self._cluster.led_by.items():
            self.services[node].add_database(capture, "", lambda: [], self.captures[capture])
        named = [ServerDefinedShape("mine", "both"), ServerDefinedShape("nowhere", "unknown")]
        for node, service in self.services.items():
            clock = SystemClock()
            grants = ShapeAuthorizer(clock, named, self._signing)
            app = build_application(shape_routes(service, grants))
            routing = ShapeRouting(app, self._cluster, self._cluster, f"{node}/1", clock, grants, self._secret)
            service.set_leaders(routing.is_led_elsewhere)
            guard = AuthMiddleware(routing, clock, within_tls=True, grants=grants)
            unused: Any = None
            guard.parties = AuthDependencies(unused, None, routing.topics_of)
            self._apps[f"http://{node}"] = routing if self._signing is None else guard
        return self

    async def __aexit__(self, *exc: object) -> None:
        for service in self.services.values():
            await service.aclose()

    async def get(self, node: str, query: str, method: str = "GET") -> tuple[int, Any, str]:
        """Follow redirects as a client does; return status, body and the nodes that were asked."""
        url, visited = f"http://{node}", ""
        while len(visited) < 10:
            visited += url[-1]
            status, body, location = await self._ask(url, query, method)
            if status != 307:
                return status, json.loads(body), visited
            url, _, query = location.partition("/v1/shape?")
        raise AssertionError(f"redirected without end: {visited}")

    async def _ask(self, url: str, query: str, method: str) -> tuple[int, bytes, str]:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}"}

        scope = {"type": "http", "path": "/v1/shape", "method": method, "query_string": query.encode(), "headers": []}
        await self._apps[url](scope, receive, send)
        location = dict(sent[0]["headers"]).get(b"location", b"").decode()
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]), location


async def test_a_table_of_several_databases_is_refused_alike_by_every_node_once_the_request_is_authorized() -> None:
    reason = "the table is in several databases: tables=crm:public.both, shop:public.both. Use one of these."
    async with Nodes(Cluster(), ShapeSettings(secret="s")) as nodes:
        for node in "abc":
            for method in ("GET", "POST"):
                status, body, visited = await nodes.get(node, "table=both&offset=-1&secret=s", method)
                assert (status, body["errors"], visited) == (400, {"table": [reason]}, node)
            assert (await nodes.get(node, "table=both&offset=-1&secret=x"))[0] == 401
            status, body, _ = await nodes.get(node, "shape=mine&offset=-1&secret=s")
            assert status == 503 and "crm" not in str(body), "the client cannot change what the server defines"


async def test_a_table_that_one_capture_carries_is_served_there_whatever_others_say_of_theirs() -> None:
    router = Router()
    both = ("left", "dropped", "refused", "parked")
    router.cluster.more = [(each, f"public.t_{s}", s if each == "shop" else "captured")
                           for s in both for each in ("shop", "crm")]  # fmt: skip
    for state in both:
        assert await router.ask(f"t_{state}") == (307, "http://c"), state
    router.cluster.unled = {"crm"}
    router.clock.advance(1_500)
    for state in ("left", "dropped", "refused"):
        assert await router.ask(f"t_{state}") == (503, ""), f"{state}: the capture moves to another node"
    assert await router.ask("t_parked") == (307, "http://b")
    assert await router.ask("both") == (307, "http://b"), "a capture that no node leads may have been removed"


async def test_one_that_is_skipped_or_paused_everywhere_is_answered_by_the_node_of_one_capture() -> None:
    router = Router()
    router.cluster.more = [(each, f"public.{s}", s) for s in ("left", "parked") for each in ("shop", "crm")]
    router.cluster.more.append(("shop", "public.gone", "dropped"))
    assert await router.ask("left") == await router.ask("parked") == (307, "http://c")
    assert await router.ask("gone") == (307, "http://c"), "as one that no capture has"


@pytest.mark.parametrize(("node", "visited"), [("a", "acb"), ("b", "bc"), ("c", "cb")])
async def test_a_table_that_no_row_names_is_sought_by_every_capture_before_it_is_refused(
    node: str, visited: str
) -> None:
    async with Nodes(Cluster()) as nodes:
        status, body, found = await nodes.get(node, "table=unknown&offset=-1")
        assert (status, found) == (400, visited)
        assert body["errors"]["table"][0].startswith('table "public"."unknown" is not captured.')
        assert all(capture.asked for capture in nodes.captures.values())
        assert (await nodes.get(node, "table=unknown&offset=0_0&handle=h"))[::2] == (409, visited), "it has rows"


@pytest.mark.parametrize(("node", "visited"), [("a", "ac"), ("b", "bc"), ("c", "c")])
async def test_a_table_that_was_created_a_moment_ago_is_awaited_by_its_capture_whichever_node_is_asked(
    node: str, visited: str
) -> None:
    async with Nodes(Cluster()) as nodes:
        nodes.captures["crm"].adding = "young"
        status, body, found = await nodes.get(node, "table=young&offset=-1")
        assert (status, body["message"], found) == (503, "the table is being added.", visited)


async def test_a_capture_that_left_a_node_is_not_awaited_there() -> None:
    """A node that ignored the leases would answer that this capture is starting, as long as it runs elsewhere."""
    cluster = Cluster()
    async with Nodes(cluster) as nodes:
        nodes.services["b"].add_database("crm", "", lambda: [], Capture())
        await nodes.services["b"].release_database("crm")
        assert (await nodes.get("b", "table=unknown&offset=-1"))[::2] == (400, "bc")
        assert (await nodes.get("c", "table=unknown&offset=-1"))[::2] == (400, "cb")


async def test_the_mark_of_routing_is_no_parameter_of_the_request() -> None:
    """A request for a shape that the server defines must not have unknown parameters."""
    async with Nodes(Cluster()) as nodes:
        status, body, visited = await nodes.get("a", "shape=nowhere&offset=-1")
        assert (status, body["message"], visited) == (503, "This shape cannot be served as it is defined.", "acb")
        assert (await nodes.get("a", "table=unknown&offset=-1&tidemill_asked=shop,crm,other"))[::2] == (400, "a")


@pytest.mark.parametrize("table", ["orders", "people", "both", "unknown"])
async def test_a_request_without_a_valid_signature_or_secret_does_not_learn_which_node_captures_a_table(
    table: str,
) -> None:
    expires_s = SystemClock().now_ms() // 1000 + 60
    signed = query_of(ShapeRequest(table), expires_s)
    forged = [(name, "0" if name == "signature" else value) for name, value in signed]
    async with Nodes(Cluster(), signing=SigningKeys(KEYS)) as nodes:
        for query, status in (
            (f"table={table}&signature=0&x=1", 400),
            (f"table={table}&signature=0&tidemill_asked=crm", 401),
            (f"table={table}&table={table}&signature=0", 400),
            (f"shape=mine&table={table}&signature=0", 400),
            (urlencode(forged), 401),
            (f"{urlencode(forged)}&tidemill_asked=crm", 401),
        ):
            found, body, visited = await nodes.get("a", f"offset=-1&{query}")
            assert (found, visited) == (status, "a"), (query, body)
            assert table not in str(body)
    async with Nodes(Cluster(), ShapeSettings(secret="s")) as nodes:
        for query in (f"table={table}&offset=-1", f"table={table}&offset=-1&secret=x"):
            assert (await nodes.get("a", query))[::2] == (401, "a")


async def test_a_signed_request_visits_every_capture_of_a_table_that_no_row_names() -> None:
    query = urlencode([*query_of(ShapeRequest("unknown"), SystemClock().now_ms() // 1000 + 60), ("offset", "-1")])
    async with Nodes(Cluster(), signing=SigningKeys(KEYS)) as nodes:
        status, body, visited = await nodes.get("a", query)
        assert (status, visited) == (400, "acb")
        assert body["errors"]["table"][0].startswith('table "public"."unknown" is not captured.')
