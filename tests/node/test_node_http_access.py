"""Authentication and authorization of HTTP: bearer tokens, passwords, the ACLs of the Kafka endpoint, and TLS."""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from joserfc import jwt
from joserfc.jwk import OctKey
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from support.kafka.security import Authority
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.listeners import RESERVED_PAGES, OauthSection
from tidemill.base.errors import UnavailableError
from tidemill.consensus.memory import MemoryConsensus
from tidemill.lake.catalogue import MAY_READ_SCOPE_KEY
from tidemill.metastore.factory import create_metastore
from tidemill.node.http.auth import AuthDependencies, AuthMiddleware, RequiredPermission, required_permissions
from tidemill.node.http.server import HttpServer
from tidemill.objects.memory import MemoryObjects
from tidemill.registry.http.messages import parse_subject
from tidemill.registry.http.routes import RegistryRouter, path_table
from tidemill.security.acl_cache import AclCache
from tidemill.security.acls import CLUSTER_NAME, AclRule, Authorizer, Operation, Resource
from tidemill.security.oauth_tokens import TokenVerifier
from tidemill.security.sasl import Authenticator
from tidemill.security.scram import NAMES, derive_credential
from tidemill.security.users import Users

SECRET = "a secret of thirty-two bytes or more"
OP, R = Operation, Resource
CLUSTER = RequiredPermission(OP.DESCRIBE, R.CLUSTER, CLUSTER_NAME)


def bearer(user: str, lives_s: float = 600.0) -> str:
    claims = {"sub": user, "exp": int(time.time() + lives_s)}
    return f"Bearer {jwt.encode({'alg': 'HS256'}, claims, OctKey.import_key(SECRET))}"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def app(scope: Scope, receive: Any, send: Any) -> None:
    headers = [(b"cache-control", b"public, max-age=5, s-maxage=60"), (b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"here"})


def scope_of(path: str, *, method: str = "GET", query: str = "", host: str = "9.9.9.9", **headers: str) -> Scope:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": (host, 1),
    }


async def ask(guard: AuthMiddleware, scope: Scope) -> tuple[int, dict[bytes, bytes]]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    await guard(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"])


async def topics_of(table: str) -> list[str]:
    return [f"shop.{table}"]


@asynccontextmanager
async def opened_world(*, within_tls: bool = True) -> AsyncIterator[tuple[AuthMiddleware, Users, AclCache]]:
    clock, rand = SystemClock(), Rand()
    consensus = MemoryConsensus(clock)
    metastore = create_metastore(consensus, MemoryObjects(clock), clock, rand)
    users, rulebook = Users(metastore, clock), AclCache(metastore, clock, ["User:root"])
    for mechanism in NAMES:
        await users.put(derive_credential("alice", mechanism, "pässword", b"salt" * 6))
    guard = AuthMiddleware(app, clock, within_tls=within_tls)
    guard.parties = AuthDependencies(
        Authenticator(users, rand, TokenVerifier(OauthSection(secret=SECRET), clock)), rulebook, topics_of
    )
    try:
        yield guard, users, rulebook
    finally:
        await metastore.aclose()
        await consensus.aclose()


async def test_who_proves_nothing_sees_only_whether_the_node_lives() -> None:
    async with opened_world() as (guard, _, _):
        for path in ("/healthz", "/readyz", "/v1/health"):
            assert (await ask(guard, scope_of(path)))[0] == 200
        assert (await ask(guard, scope_of("/v1/shape", method="OPTIONS")))[0] == 200
        for path in ("/", "/metrics", "/healthz/", "//healthz", "/api/status", "/v1/shape", "/subjects", "/nothing"):
            status, headers = await ask(guard, scope_of(path))
            assert status == 401 and headers[b"www-authenticate"].startswith(b"Bearer")


async def test_f248_what_proves_nothing_is_turned_away() -> None:
    async with opened_world() as (guard, _, _):
        for proof in (
            "Bearer a.b.c",
            bearer("alice", -600),
            basic("alice", "wrong"),
            basic("nobody", "pässword"),
            "Basic !!!",
            "Basic " + base64.b64encode(b"no colon").decode(),
            "Digest x",
            "Bearer",
            "x" * 30_000,
        ):
            guard._failures._counts.clear()
            assert (await ask(guard, scope_of("/metrics", authorization=proof)))[0] == 401, proof
        twice = scope_of("/metrics", authorization=bearer("root"))
        twice["headers"] *= 2
        assert (await ask(guard, twice))[0] == 401


async def test_a_principal_may_what_the_rules_of_kafka_allow() -> None:
    async with opened_world() as (guard, _, rulebook):
        rule = AclRule(int(R.TOPIC), 3, "shop.public.orders", "User:alice", "*", int(OP.READ), 3)
        await rulebook.add([rule])
        for proof in (bearer("alice"), basic("alice", "pässword")):
            one = {"query": "table=public.orders", "authorization": proof}
            assert (await ask(guard, scope_of("/v1/shape", **one)))[0] == 200
            for query in ("table=public.users", "table=public.orders&table=public.users", "", "table="):
                assert (await ask(guard, scope_of("/v1/shape", query=query, authorization=proof)))[0] == 403
            assert (await ask(guard, scope_of("/v1/shape", method="DELETE", **one)))[0] == 403
            assert (await ask(guard, scope_of("/metrics", authorization=proof)))[0] == 403
        assert (await ask(guard, scope_of("/metrics", authorization=bearer("root"))))[0] == 200
        await rulebook.delete([rule])
        assert (await ask(guard, scope_of("/v1/shape", **one)))[0] == 403, "also who was known a moment ago"


async def test_a_password_outside_of_tls_counts_only_from_this_machine() -> None:
    async with opened_world(within_tls=False) as (guard, _, rulebook):
        await rulebook.add([AclRule(int(R.CLUSTER), 3, CLUSTER_NAME, "User:alice", "*", int(OP.DESCRIBE), 3)])
        proof = basic("alice", "pässword")
        assert (await ask(guard, scope_of("/metrics", authorization=proof)))[0] == 401
        assert (await ask(guard, scope_of("/metrics", authorization=proof, host="127.0.0.1")))[0] == 200
        assert (await ask(guard, scope_of("/metrics", authorization=bearer("alice"))))[0] == 200


async def test_a_proof_from_this_machine_does_not_serve_another() -> None:
    """A proof that was accepted from the loopback address is cached, but not for other addresses that send the same."""
    async with opened_world(within_tls=False) as (guard, _, _):
        proof = basic("alice", "pässword")
        assert (await ask(guard, scope_of("/metrics", authorization=proof, host="127.0.0.1")))[0] == 403
        assert (await ask(guard, scope_of("/metrics", authorization=proof)))[0] == 401


async def test_answers_are_kept_by_no_cache_that_serves_others() -> None:
    async with opened_world() as (guard, _, _):
        _, headers = await ask(guard, scope_of("/metrics", authorization=bearer("root")))
        assert headers[b"cache-control"] == b"private, max-age=5" and headers[b"vary"] == b"authorization"
        _, headers = await ask(guard, scope_of("/healthz"))
        assert headers[b"cache-control"] == b"public, max-age=5, s-maxage=60"


async def test_before_the_node_can_tell_and_while_it_cannot_everything_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_world() as (guard, users, _):
        parties, guard.parties = guard.parties, None
        assert (await ask(guard, scope_of("/metrics", authorization=bearer("root"))))[0] == 503
        assert (await ask(guard, scope_of("/readyz")))[0] == 200
        guard.parties = parties

        async def away(*_: Any) -> None:
            raise UnavailableError("the metastore is away.")

        monkeypatch.setattr(users, "credential", away)
        assert (await ask(guard, scope_of("/metrics", authorization=basic("alice", "pässword"))))[0] == 503


async def test_a_password_for_whose_check_there_is_no_room_is_not_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_world() as (guard, _, _):
        proof = basic("alice", "pässword")
        with monkeypatch.context() as patch:
            patch.setattr("tidemill.security.sasl.CHECKS_PER_ADDRESS", 0)
            status, headers = await ask(guard, scope_of("/metrics", authorization=proof))
            assert (status, headers[b"retry-after"]) == (503, b"1")
        assert (await ask(guard, scope_of("/metrics", authorization=proof)))[0] == 403, "it is right"


async def test_many_requests_with_one_password_wait_for_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    real, may_end = Authenticator.verify_password, asyncio.Event()
    may_end.set()

    async def verify(authenticator: Authenticator, user: str, password: str, host: str) -> str:
        checked.append(user)
        await may_end.wait()
        return await real(authenticator, user, password, host)

    monkeypatch.setattr(Authenticator, "verify_password", verify)
    async with opened_world() as (guard, _, _):
        proof = basic("alice", "pässword")
        answers = await asyncio.gather(*(ask(guard, scope_of("/metrics", authorization=proof)) for _ in range(300)))
        assert {status for status, _ in answers} == {403} and checked == ["alice"]
        proof = basic("alice", "wrong")
        answers = await asyncio.gather(*(ask(guard, scope_of("/metrics", authorization=proof)) for _ in range(3)))
        assert {status for status, _ in answers} == {401} and checked == ["alice"] * 2
        may_end.clear()
        first, second = (asyncio.ensure_future(ask(guard, scope_of("/metrics", authorization=proof))) for _ in range(2))
        await until(lambda: len(checked) == 3)
        first.cancel()
        assert (await second)[0] == 503, "it may try again"
        assert not guard._verifying


async def test_what_is_known_of_proofs_is_bounded() -> None:
    async with opened_world() as (guard, _, _):
        assert guard.parties is not None
        guard.parties = guard.parties._replace(rulebook=None)
        for i in range(1_100):
            assert (await ask(guard, scope_of("/metrics", authorization=bearer(f"u{i}"))))[0] == 200
        assert len(guard._known) <= 1_000


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("GET", "/metrics", CLUSTER),
        ("HEAD", "/", CLUSTER),
        ("POST", "/metrics", RequiredPermission(OP.ALTER, R.CLUSTER, CLUSTER_NAME)),
        ("POST", "/v1/shape", CLUSTER),
        ("GET", "/subjects", CLUSTER),
        ("GET", "/schemas", CLUSTER),
        ("GET", "/schemas/ids/7", None),
        ("GET", "/schemas/ids/7/subjects", CLUSTER),
        ("POST", "/subjects/orders-value/versions", RequiredPermission(OP.WRITE, R.TOPIC, "orders")),
        ("POST", "/subjects/orders-value", RequiredPermission(OP.DESCRIBE, R.TOPIC, "orders")),
        ("GET", "/subjects/orders-key/versions/latest", RequiredPermission(OP.DESCRIBE, R.TOPIC, "orders")),
        ("DELETE", "/subjects/orders-key/versions/1", RequiredPermission(OP.DELETE, R.TOPIC, "orders")),
        ("DELETE", "/subjects/%3A.%3Asecret-value", RequiredPermission(OP.DELETE, R.TOPIC, "secret")),
        ("DELETE", "/subjects/a%2Fversions", RequiredPermission(OP.DELETE, R.TOPIC, "a/versions")),
        ("POST", "/compatibility/subjects/plain/versions/1", RequiredPermission(OP.DESCRIBE, R.TOPIC, "plain")),
        ("GET", "/config", RequiredPermission(OP.DESCRIBE_CONFIGS, R.CLUSTER, CLUSTER_NAME)),
        ("PUT", "/config", RequiredPermission(OP.ALTER_CONFIGS, R.CLUSTER, CLUSTER_NAME)),
        ("PUT", "/mode/orders-value", RequiredPermission(OP.ALTER_CONFIGS, R.TOPIC, "orders")),
        ("PUT", "/subjects/orders-value", RequiredPermission(OP.ALTER, R.TOPIC, "orders")),
        ("POST", "/subjects", RequiredPermission(OP.ALTER, R.CLUSTER, CLUSTER_NAME)),
        ("DELETE", "/subjects", RequiredPermission(OP.ALTER, R.CLUSTER, CLUSTER_NAME)),
        ("GET", "/iceberg/v1/config", None),
        ("GET", "/iceberg/v1/namespaces/tidemill/tables", None),
        ("GET", "/iceberg/v1/namespaces/tidemill/tables/orders", RequiredPermission(OP.READ, R.TOPIC, "shard.orders")),
        (
            "POST",
            "/iceberg/v1/namespaces/tidemill/tables/%6Frders/metrics",
            RequiredPermission(OP.READ, R.TOPIC, "shard.orders"),
        ),
        ("GET", "/icebergs", CLUSTER),
    ],
)
def test_what_a_path_needs(method: str, path: str, wanted: RequiredPermission | None) -> None:
    assert required_permissions(method, path, path.encode(), []) == ([] if wanted is None else [wanted])


def test_every_path_with_a_need_of_its_own_is_in_the_table_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "security.md").read_text()
    header, table = re.findall(r"^(\| path \| needs \|)\n((?:\|.*\n)+)", page, re.MULTILINE)[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`/([a-z0-9]+)", row.split("|")[1])}
    others = {
        name
        for name in RESERVED_PAGES
        for path in (f"/{name}", f"/{name}/x", f"/{name}/subjects/x", f"/{name}/ids/7", f"/{name}/v1/config")
        if required_permissions("GET", path, path.encode(), []) != [CLUSTER]
    }
    assert header and {"subjects", "schemas", "iceberg"} <= others <= named


@pytest.mark.parametrize(
    "spelled",
    [
        ":.:secret-value", "%3A.%3Asecret-value", "%3a%2E%3asecret%2Dvalue", "secret-value/", "/secret-value",
        "%253A.%253Asecret-value", ":.::.:secret-value", ":other:secret-value", ":*:secret-value", ":.:", ":.:%2F",
        "Secret-value", " secret-value", "secret-value%2F", "secret-value%3Fx", "secret%00-value", "%FF:.:secret-value",
    ],
)  # fmt: skip
@pytest.mark.parametrize("around", ["/subjects/{}", "/config/{}", "/mode/{}", "/compatibility/subjects/{}/versions"])
def test_the_subject_that_is_judged_is_the_one_that_is_served(spelled: str, around: str) -> None:
    raw = around.format(spelled).encode()
    served: list[str] = []

    async def note(_: Request, subject: str, *rest: str) -> Response:
        served.append(parse_subject(subject))
        return Response()

    registry: Any = None
    rows = [(m, p, note) for m, p, _ in path_table(registry) if "*" in p and p[0] != "schemas"]
    method = "POST" if "compat" in around else "DELETE"
    scope = {"type": "http", "method": method, "path": unquote(raw.decode()), "raw_path": raw, "headers": []}
    asyncio.run(RegistryRouter(rows).serve(Request(scope)))
    for subject in served:
        (need,) = required_permissions(method, scope["path"], raw, [])
        assert (need.resource, need.name) == (R.TOPIC, subject.removesuffix("-value"))


def test_who_ends_a_shape_by_its_handle_alone_may_change_the_cluster() -> None:
    """The handle does not identify the owner of the shape."""
    assert required_permissions("DELETE", "/v1/shape", b"/v1/shape", []) == [
        RequiredPermission(OP.ALTER, R.CLUSTER, CLUSTER_NAME)
    ]
    assert required_permissions("DELETE", "/v1/shape", b"/v1/shape", ["shape.mine"]) == [
        RequiredPermission(OP.DELETE, R.TOPIC, "shape.mine")
    ]


@pytest.mark.parametrize("path", ["/api/rows", "/api/dead-letters"])
async def test_rows_of_a_table_need_what_its_shape_needs_and_nothing_else(path: str) -> None:
    async with opened_world() as (guard, _, rulebook):
        rule = AclRule(int(R.TOPIC), 3, "shard.orders", "User:alice", "*", int(OP.READ), 3)
        await rulebook.add([rule])
        mine = basic("alice", "pässword")
        for query, status in (
            ("table=orders", 200),
            ("table=orders&as_of=7", 200),
            ("table=payroll", 403),
            ("table=orders&table=payroll", 403),
            ("table=orders%00", 403),
            ("", 403),
        ):
            assert (await ask(guard, scope_of(path, query=query, authorization=mine)))[0] == status, query
        assert (await ask(guard, scope_of("/api/overview", query="table=orders", authorization=mine)))[0] == 403
        assert (await ask(guard, scope_of(path, method="POST", query="table=orders", authorization=mine)))[0] == 403


async def test_the_catalogue_shows_a_principal_the_tables_that_it_may_read() -> None:
    tables = "/iceberg/v1/namespaces/tidemill/tables"
    async with opened_world() as (guard, _, rulebook):
        await rulebook.add([AclRule(int(R.TOPIC), 3, "shard.orders", "User:alice", "*", int(OP.READ), 3)])
        mine = basic("alice", "pässword")
        assert (await ask(guard, scope_of(tables)))[0] == 401
        for table, status in (("orders", 200), ("payroll", 403), ("orders%00", 403)):
            assert (await ask(guard, scope_of(f"{tables}/{table}", authorization=mine)))[0] == status, table
        listing = scope_of(tables, authorization=mine)
        assert (await ask(guard, listing))[0] == 200
        may_read = listing[MAY_READ_SCOPE_KEY]
        assert may_read("orders") and not may_read("payroll")


async def test_a_path_that_a_router_would_take_for_another_is_none() -> None:
    async with opened_world() as (guard, _, _):
        for path in ("/v1/shape\n", "/metrics\n", "/healthz\n"):
            status, _ = await ask(guard, scope_of(path, query="table=a", authorization=bearer("root")))
            assert status == 404


def test_a_subset_by_post_needs_what_reading_its_shape_needs() -> None:
    for method in ("GET", "HEAD", "POST"):
        assert required_permissions(method, "/v1/shape", b"/v1/shape", ["shop.public.orders"]) == [
            RequiredPermission(OP.READ, R.TOPIC, "shop.public.orders")
        ]


def test_no_method_or_path_needs_what_nobody_can_be_given() -> None:
    """Every request requires an operation that ACLs can grant, and none is open to everyone."""
    from tidemill.security.acls import OPERATIONS

    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "TRACE"):
        for path in (
            "/",
            "/v1/shape",
            "/subjects",
            "/subjects/a",
            "/subjects/a/versions",
            "/schemas",
            "/config/a",
            "/contexts",
            "/mode",
        ):
            found = required_permissions(method, path, path.encode(), [])
            assert found and all(need.operation in OPERATIONS[need.resource] for need in found), (method, path)
    assert not Authorizer().allows("User:x", "h", OP.DESCRIBE, R.CLUSTER, CLUSTER_NAME)


async def test_http_within_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    server = HttpServer(app, on_failure=lambda *_: None, tls=authority.tls())
    await server.start()
    context = ssl.create_default_context(cafile=authority.certificate)

    def get(url: str, **more: Any) -> int:
        with urllib.request.urlopen(url, timeout=20, **more) as answer:
            return int(answer.status)

    try:
        assert await asyncio.to_thread(get, server.url, context=context) == 200
        with pytest.raises((OSError, HTTPException)):
            await asyncio.to_thread(get, server.url.replace("https", "http"))
    finally:
        await server.aclose()
