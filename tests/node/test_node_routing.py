"""The node that serves a shape, for every way to write its table's name, also while consensus is unreachable."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import pytest

from tidemill.base.clock import ManualClock
from tidemill.base.errors import UnavailableError
from tidemill.consensus.api import Lease
from tidemill.metastore.catalogue import CaptureTableRow
from tidemill.node.shape_routing import ShapeRouting
from tidemill.shapes.definition.server_defined import ServerDefinedShape
from tidemill.shapes.http.authorization import ShapeAuthorizer


class Cluster:
    """Leases and captures, the part of consensus and catalogue that routing uses."""

    def __init__(self) -> None:
        self.away = False
        self.looks = 0
        self.slow = asyncio.Event()
        self.slow.set()

    async def leases(self, _: str) -> list[Lease]:
        self.looks += 1
        await self.slow.wait()
        if self.away:
            raise UnavailableError("consensus does not answer.")
        held = {"shop": ("b/1", b"http://b"), "crm": ("c/1", b"http://c")}
        return [Lease(f"capture/{n}", holder, 1, 1, 1, True, info) for n, (holder, info) in held.items()]

    async def all_tables(self) -> list[CaptureTableRow]:
        shop = [("shop", name) for name in ("public.orders", "public.Odd Name", "sales.orders", "public.both")]
        crm = [("crm", name) for name in ("public.people", "public.both")]
        return [CaptureTableRow(capture, table, "t") for capture, table in (*shop, *crm)]


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
        ("Odd Name", 200, ""),
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
