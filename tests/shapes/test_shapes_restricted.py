"""Principals that may read only some shapes, and only their rows: behind the guard, over real HTTP."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import pytest
from structlog.testing import capture_logs

from support.shapes.guarded import Guarded, bearer, may
from support.shapes.node_client import NodeClient
from support.shapes.signing import KEYS, query_of
from support.shapes.world import Answer, ShapeWorld
from support.waiting import until
from tidemill.base.clock import SystemClock
from tidemill.security.acls import Operation
from tidemill.shapes import ShapeSettings
from tidemill.shapes.definition.planner import ShapeRequest
from tidemill.shapes.definition.server_defined import FromClaim, ServerDefinedShape
from tidemill.shapes.definition.signed_urls import SigningKeys
from tidemill.shapes.http.authorization import ShapeAuthorizer

pytestmark = [pytest.mark.postgres]

DDL = """
CREATE TABLE item (id int PRIMARY KEY, tenant text NOT NULL, n int NOT NULL, secret text);
INSERT INTO item SELECT i, 't' || i % 3, i, 's' || i FROM generate_series(1, 30) i;
"""
SHOWN = ("id", "tenant", "n")
NAMED = (
    ServerDefinedShape("mine", "item", "tenant = $1", (FromClaim("tenant"),), SHOWN),
    ServerDefinedShape("some", "item", "tenant = ANY($1)", (FromClaim("tenants"),), SHOWN, narrow=True),
    ServerDefinedShape("all", "item"),
)
RULES = [
    may("ann", "shape.mine"), may("ann", "shape.mine", Operation.DELETE), may("bob", "shape.mine"),
    may("bob", "shape.some"), may("eve", "other"),
]  # fmt: skip


@asynccontextmanager
async def guarded_world(dsn: str, *, long_poll_s: float = 5.0) -> AsyncIterator[tuple[ShapeWorld, Guarded]]:
    grants = ShapeAuthorizer(SystemClock(), NAMED, SigningKeys(KEYS, leeway_s=0))
    settings = ShapeSettings(long_poll_s=long_poll_s, allow_delete=True)
    async with (
        Guarded(grants, RULES) as guarded,
        ShapeWorld(dsn, DDL, settings, grants=grants, front=guarded.front) as world,
    ):
        yield world, guarded


def of_ann() -> str:
    """Return a token created now: it is valid for ten minutes, and tests may run long after their file is imported."""
    return bearer("ann", tenant="t1")


def of_bob() -> str:
    return bearer("bob", tenant="t2", tenants=["t0", "t2"])


def tenants(answer: Answer) -> set[str]:
    return {item["value"]["tenant"] for item in answer.items if item.get("value")}


async def test_f116_a_token_sees_its_shapes_and_its_rows_and_a_handle_is_no_right(postgres_dsn: str) -> None:
    async with guarded_world(postgres_dsn) as (world, _):
        ann = await world.ask("/v1/shape?shape=mine&offset=-1", authorization=of_ann())
        bob = await world.ask("/v1/shape?shape=mine&offset=-1", authorization=of_bob())
        assert tenants(ann) == {"t1"} and tenants(bob) == {"t2"} and ann.handle != bob.handle
        for answer in (ann, bob):
            assert answer.headers["cache-control"].startswith("private") and answer.headers["vary"] == "authorization"
            ages = [int(part.partition("=")[2]) for part in answer.headers["cache-control"].split(",")[1:]]
            assert sum(ages) <= 600, "no longer than the token"
        for query in ("offset=0_inf", "offset=0_inf&live=true", "offset=0_inf&live=true&live_sse=true", "offset=-1"):
            stolen = await world.ask(f"/v1/shape?shape=mine&handle={ann.handle}&{query}", authorization=of_bob())
            assert stolen.status == 409 and stolen.handle == bob.handle and stolen.items == [], query
        for method, body in (("GET", None), ("POST", b'{"where": "tenant = \'t1\' OR true"}')):
            for more in ("", f"&handle={ann.handle}", f"&handle={bob.handle}"):
                more += "&subset__where=true" if method == "GET" else ""
                target = f"/v1/shape?shape=mine&log=changes_only&offset=now{more}"
                answer = await world.ask(target, method, body, authorization=of_bob())
                shown = {row["value"]["tenant"] for row in answer.json["data"]} if answer.status == 200 else set()
                assert shown <= {"t2"} and answer.status in (200, 409), (method, more)
        now = await world.ask("/v1/shape?shape=mine&offset=now", authorization=of_bob())
        assert now.status == 200 and now.items == []
        many = await world.ask("/v1/shape?shape=some&offset=-1&where=n%3C10", authorization=of_bob())
        assert tenants(many) == {"t0", "t2"} and {int(item["value"]["n"]) for item in many.items} <= set(range(10))
        lacking = await world.ask("/v1/shape?shape=some&offset=-1", authorization=bearer("bob", tenant="t2"))
        assert lacking.status == 403 and "claim=tenants" in lacking.json["message"]

        # One may end what it names, and nothing by the handle alone.
        for target in (f"handle={bob.handle}", f"shape=mine&handle={bob.handle}", f"table=item&handle={bob.handle}"):
            ended = await world.ask(f"/v1/shape?{target}", "DELETE", authorization=of_ann())
            assert ended.status in (403, 404), target
        assert (
            await world.ask(f"/v1/shape?shape=mine&handle={bob.handle}", "DELETE", authorization=of_bob())
        ).status == 403
        proofs = {"": 401, "Bearer a.b.c": 401, bearer("ann", -5, tenant="t1"): 401, bearer("ann"): 403}
        for proof, status in proofs.items():
            assert (await world.ask("/v1/shape?shape=mine&offset=-1", authorization=proof)).status == status
        mine = await world.ask(f"/v1/shape?shape=mine&handle={ann.handle}", "DELETE", authorization=of_ann())
        assert mine.status == 202
        assert world.service.find_by_handle(bob.handle) is not None


async def test_what_is_not_allowed_is_refused_in_the_same_words_whether_it_exists_or_not(postgres_dsn: str) -> None:
    async with guarded_world(postgres_dsn) as (world, _):
        root = await world.ask("/v1/shape?shape=all&offset=-1", authorization=bearer("root"))
        assert root.status == 200 and len(root.items) == 30
        queries = [
            "shape=all", "shape=nothing", "table=item", "table=public.item", "table=missing", "table=ITEM",
            "table=%69tem", "table=shard.item", "table=shard:missing", "table=a.b.c", "table=%22item", "table=",
            "shape=", "shape=mine&shape=all", "shape=mine&table=item", "table=item&shape=mine", "shape=Mine",
            "shape=mine%00", "shape=mine%20", f"shape=all&handle={root.handle}", f"table=item&handle={root.handle}",
            f"handle={root.handle}", "", "Table=item", "SHAPE=mine", "shape=all&subset__where=true",
            "tabl%65=item", "table=item%0A", "&shape=all", "shape=mine&;shape=all&shape=all",
        ]  # fmt: skip
        token = of_ann()
        with capture_logs() as lines:
            refusals: set[tuple[int, bytes]] = set()
            for query in queries:
                for method, body in (("GET", None), ("POST", b"{}"), ("DELETE", None)):
                    target = f"/v1/shape?{query}&offset=now&log=changes_only"
                    answer = await world.ask(target, method, body, authorization=token)
                    refusals.add((answer.status, answer.body))
                    if answer.status == 400:
                        refusals.discard((answer.status, answer.body))
                        assert query == "shape=mine&;shape=all", (method, query)
        assert refusals == {(403, b'{"message": "User:ann is not authorized for this shape request."}')}
        assert any(line["audit"] and line["name"] == "shape.all" for line in lines)
        reported = " ".join(map(str, lines))
        assert token.partition(" ")[2] not in reported and "eyJ" not in reported
        for path in (
            "/v1/shape%0A", "/v1/shape/", "//v1/shape", "/v1//shape", "/V1/shape", "/v1/shape%2F", "/v1/./shape",
            "/v1/shape;x", "/v1/shape%00", "/x/../v1/shape", "/api/shapes", "/api/shapes%0A",
        ):  # fmt: skip
            answer = await world.ask(f"{path}?shape=all&offset=-1", authorization=of_ann())
            assert answer.status in (403, 404) and not answer.body.startswith(b"["), path
            signed = await world.ask(f"{path}?signature=x&shape=all&offset=-1")
            assert signed.status in (401, 404), path
        same = await world.ask("/v1/%73hape?shape=mine&offset=-1", authorization=of_ann())
        assert tenants(same) == {"t1"}, "percent-encoding is no other path"


async def test_f117_a_token_that_ends_and_a_rule_that_goes_end_what_waits(postgres_dsn: str) -> None:
    async with guarded_world(postgres_dsn, long_poll_s=20) as (world, guarded):
        start = await world.ask("/v1/shape?shape=mine&offset=-1", authorization=of_ann())
        live = f"/v1/shape?shape=mine&offset={start.offset}&handle={start.handle}&live=true"
        for more, status in (("", 401), ("&live_sse=true", 200)):
            for _ in range(10):  # on a busy machine it may be over before the request is there
                ends_s = time.time() + 1.5
                short = bearer("ann", 1.5, tenant="t1")
                answer = await world.ask(live + more, authorization=short)
                assert time.time() >= ends_s and b'"t1"' not in answer.body
                if answer.status == status:
                    break
            assert answer.status == status
        for n, more in ((77, ""), (78, "&live_sse=true")):
            current = await world.ask("/v1/shape?shape=mine&offset=-1", authorization=of_ann())
            shape = world.service.find_by_handle(current.handle)
            assert shape is not None
            live = f"/v1/shape?shape=mine&offset={current.offset}&handle={current.handle}&live=true{more}"
            waiting = asyncio.ensure_future(world.ask(live, authorization=of_ann()))
            await until(lambda: shape.waiting_count)  # noqa: B023
            await guarded.rulebook.delete([RULES[0]])
            await world.db.execute(f"INSERT INTO item SELECT max(id) + 1, 't1', {n}, '' FROM item")  # type: ignore[arg-type]
            answer = await waiting
            assert f'"n":"{n}"'.encode() not in answer.body
            assert answer.status == (200 if more else 403)
            assert (await world.ask(live, authorization=of_ann())).status == 403
            await guarded.rulebook.add([RULES[0]])


async def test_a_signed_url_needs_no_token_and_may_be_kept_by_caches(postgres_dsn: str) -> None:
    async with guarded_world(postgres_dsn) as (world, _):
        now_s = int(time.time())
        signed = dict(query_of(ShapeRequest("item", "tenant = $1", ("t2",)), now_s + 60))
        for proof in ({}, {"authorization": "Bearer a.b.c"}):
            found = await world.request("/v1/shape", {**signed, "offset": "-1"}, proof)
            assert tenants(found) == {"t2"} and found.headers["cache-control"].startswith("public")
        forged = {**signed, "params[1]": "t1", "offset": "-1"}
        refused = await world.request(
            "/v1/shape", forged, {"origin": "http://localhost:3000", "authorization": of_ann()}
        )
        assert refused.status == 401 and "signature" in refused.json["message"]
        assert refused.headers["access-control-allow-origin"] == "http://localhost:3000", "a page can read why"
        assert (await world.request("/v1/shape", {**signed, "shape": "mine", "offset": "-1"})).status == 400
        ended = await world.request("/v1/shape", {**signed, "handle": found.handle}, method="DELETE")
        assert ended.status == 401


async def test_no_request_of_a_restricted_principal_sees_a_row_outside_its_clause(postgres_dsn: str) -> None:
    """Clients use various clauses, columns and subsets, while rows move between tenants."""
    rand = random.Random(11)
    clauses = ["", "true", "n > 10", "tenant = 't1' OR true", "NOT (n = 3)", "n IN (1, 2, 3, 4) OR tenant <> 't0'",
               "100 / (n - 4) < 1000", "tenant LIKE '%'", "tenant IS NOT NULL"]  # fmt: skip
    async with guarded_world(postgres_dsn, long_poll_s=0.5) as (world, _):
        expected: dict[str, set[int]] = {}

        async def follow(clause: str) -> None:
            params = {"shape": "some", **({"where": clause} if clause else {})}
            offset, handle, live = "-1", "", "false"
            rows: dict[str, dict[str, Any]] = {}
            while clause not in expected or {int(row["id"]) for row in rows.values()} != expected[clause]:
                query = {**params, "offset": offset, **({"handle": handle, "live": live} if handle else {})}
                answer = await world.request("/v1/shape", query, {"authorization": of_bob()})
                assert answer.status == 200, answer.body
                for item in answer.items:
                    assert item["value"].get("tenant", "t0") in ("t0", "t2"), (clause, item)
                    assert "secret" not in item["value"]
                    if item["headers"]["operation"] == "delete":
                        del rows[item["key"]]
                    else:
                        rows[item["key"]] = {**rows.get(item["key"], {}), **item["value"]}
                offset, handle = answer.offset, answer.handle
                live = "true" if "up-to-date" in answer.controls else "false"
                subset = {**params, "log": "changes_only", "offset": "now", "subset__where": rand.choice(clauses[1:])}
                found = await world.request("/v1/shape", subset, {"authorization": of_bob()})
                assert {row["value"]["tenant"] for row in found.json["data"]} <= {"t0", "t2"}

        tasks = [asyncio.ensure_future(follow(clause)) for clause in clauses]
        for _ in range(40):
            # Row 4 stays another tenant's: there the clause that divides by n - 4 would fail.
            key, other, n = rand.randint(5, 40), rand.randint(0, 2), rand.choice([0, 1, 2, 3, 5, 11, 12])
            statement = rand.choice(
                [
                    f"UPDATE item SET tenant = 't{other}' WHERE id = {key}",
                    f"UPDATE item SET n = {n} WHERE id BETWEEN {key} AND {key + 2}",
                    f"INSERT INTO item VALUES ({key}, 't{other}', {key}, 'x') ON CONFLICT DO NOTHING",
                    f"DELETE FROM item WHERE id = {key}",
                    f"UPDATE item SET id = id + 100 WHERE id = {key}"
                    f" AND NOT EXISTS (SELECT FROM item WHERE id = {key + 100})",
                ]
            )
            await world.db.execute(statement)  # type: ignore[arg-type]
        await world.db.execute("UPDATE item SET secret = 'y' WHERE id = 4")
        for clause in clauses:
            mine = "SELECT * FROM item WHERE tenant IN ('t0', 't2') OFFSET 0"
            cursor = await world.db.execute(f"SELECT id FROM ({mine}) AS mine WHERE {clause or 'true'}")  # type: ignore[arg-type]
            expected[clause] = {row[0] for row in await cursor.fetchall()}
        await asyncio.gather(*tasks)


@pytest.mark.node
async def test_the_stock_client_follows_its_tenants_rows_by_token_and_by_signed_url(postgres_dsn: str) -> None:
    async with guarded_world(postgres_dsn, long_poll_s=2) as (world, _):
        url = f"{world.server.url}/v1/shape"
        signed = dict(query_of(ShapeRequest("item", "tenant = $1", ("t2",), SHOWN), int(time.time()) + 60))
        token = NodeClient(url, {"shape": "mine"}, headers={"Authorization": of_ann()})
        narrow = NodeClient(url, {"shape": "some", "where": "n > 20"}, "sse", headers={"Authorization": of_bob()})
        by_url = NodeClient(f"{url}?{urlencode(signed)}", {})
        short = dict(query_of(ShapeRequest("item", "tenant = $1", ("t1",)), int(time.time()) + 4))
        ending = NodeClient(f"{url}?{urlencode(short)}", {})
        refused = NodeClient(url, {"table": "item"}, headers={"Authorization": of_ann()})

        def shown(client: NodeClient) -> set[tuple[str, int]]:
            return {(row["tenant"], int(row["id"])) for row in client.rows}

        def of(*names: str, above: int = 0) -> set[tuple[str, int]]:
            return {(f"t{i % 3}", i) for i in range(above + 1, 31) if f"t{i % 3}" in names}

        async with token, narrow, by_url, ending, refused:
            await until(lambda: shown(token) == of("t1") and shown(by_url) == of("t2"))
            await until(lambda: shown(narrow) == of("t0", "t2", above=20))
            await world.db.execute("UPDATE item SET tenant = 't2' WHERE id IN (1, 28)")
            await world.db.execute("UPDATE item SET tenant = 't1' WHERE id = 30")
            await until(lambda: shown(token) == (of("t1") - {("t1", 1), ("t1", 28)}) | {("t1", 30)})
            await until(lambda: shown(by_url) == of("t2") | {("t2", 1), ("t2", 28)})
            await until(lambda: shown(narrow) == (of("t0", "t2", above=20) - {("t0", 30)}) | {("t2", 28)})
            await until(lambda: refused.last.get("status") == 403)
            await until(lambda: ending.last.get("status") == 401)
            assert "expired" in ending.last["error"]
