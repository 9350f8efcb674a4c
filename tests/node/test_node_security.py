"""One node from its configuration with all security enabled: TLS, SASL, ACLs, HTTP with authentication."""

from __future__ import annotations

import asyncio
import base64
import ssl
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from support.kafka.security import Authority
from support.ports import free_address
from tidemill.base.config.config import Config, exposed_servers, is_authorization_on, parse
from tidemill.base.errors import InvalidError
from tidemill.cli.context import open_stores
from tidemill.cli.main import app as cli
from tidemill.console.app import console_routes
from tidemill.node.node import Node
from tidemill.security.acl_cache import AclCache
from tidemill.security.acls import CLUSTER_NAME, AclRule, Operation, Resource
from tidemill.security.scram import NAMES, derive_credential
from tidemill.security.users import Users

PASSWORD = "a password"
KEY = "a key of urls, of thirty-two bytes or more"


def configuration(tmp_path: Path, authority: Authority) -> Path:
    certificate, key = authority.server()
    path = tmp_path / "tidemill.toml"
    path.write_text(f"""
[node]
data = "{tmp_path}/data"
http = "{free_address()}"
kafka = "{free_address()}"
[kafka]
security = "sasl_ssl"
[security]
super_users = ["User:root"]
[security.tls]
certificate = "{Path(certificate).relative_to(tmp_path)}"
key = "{Path(key).relative_to(tmp_path)}"
[http]
authenticate = true
tls = true
[topics.orders]
partitions = 1
[shape.mine]
table = "tidemill.orders"
where = "owner = $1"
params = [{{ claim = "sub" }}]
[security.signing]
keys = {{ k1 = "{KEY}" }}
""")
    return path


def users_and_rules(path: Path) -> None:
    """Write users and rules before any node runs, as the command line does."""
    with open_stores(path, create=True) as opened:
        users, rulebook = Users(opened.metastore, opened.clock), AclCache(opened.metastore, opened.clock)
        for user in ("root", "alice"):
            for mechanism in NAMES:
                opened.portal.call(users.put(derive_credential(user, mechanism, PASSWORD, b"salt" * 6)))
        rule = AclRule(int(Resource.CLUSTER), 3, CLUSTER_NAME, "User:alice", "*", int(Operation.DESCRIBE), 3)
        opened.portal.call(rulebook.add([rule]))


async def test_a_node_with_every_door_locked_lets_in_whom_its_rules_allow(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    path = configuration(tmp_path, authority)
    users_and_rules(path)
    from tidemill.base.config.config import load

    config = load(path)
    assert is_authorization_on(config) and not exposed_servers(config)
    context = ssl.create_default_context(cafile=authority.certificate)

    def get(path: str, user: str = "") -> int:
        headers = {"authorization": "Basic " + base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()} if user else {}
        request = urllib.request.Request(f"https://{config.node.http}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20, context=context) as answer:
                return int(answer.status)
        except HTTPError as refused:
            return refused.code

    def kafka(user: str) -> AdminClient:
        return AdminClient(
            {
                "bootstrap.servers": config.node.kafka,
                "security.protocol": "sasl_ssl",
                "sasl.mechanism": "SCRAM-SHA-256",
                "sasl.username": user,
                "sasl.password": PASSWORD,
                "ssl.ca.location": str(authority.certificate),
            }
        )

    runner = CliRunner()

    def client_side() -> None:
        assert get("/api/status") == 401 and get("/healthz") == 200
        assert get("/api/status", "alice") == 200
        assert get("/v1/shape?table=public.orders&offset=-1", "alice") == 403
        assert get("/v1/shape?shape=mine&offset=-1", "alice") == 403
        assert get("/v1/shape?shape=mine&offset=-1&where=true", "root") == 400
        assert get("/v1/shape?shape=mine&offset=-1", "root") == 503, "there is no such shard yet"
        assert get("/v1/shape?shape=yours&offset=-1", "root") == 404
        signed = runner.invoke(cli, ["shape", "sign", "tidemill.orders", "--config", str(path)]).output.strip()
        query = signed.partition("?")[2]
        assert get(f"/v1/shape?{query}&offset=-1") == 400, "it counts, and there is no such shard yet"
        assert get(f"/v1/shape?{query}x&offset=-1") == 401
        assert get("/subjects/orders-value/versions", "alice") == 403
        assert get("/subjects", "alice") == 200
        assert list(kafka("root").list_topics(timeout=30).topics) == ["orders"]
        assert list(kafka("alice").list_topics(timeout=30).topics) == []
        with pytest.raises(ck.KafkaException):
            AdminClient({"bootstrap.servers": config.node.kafka, "socket.timeout.ms": 2000}).list_topics(timeout=3)

    node, stop = Node(config, console_routes), asyncio.Event()
    running = asyncio.ensure_future(node.run(stop))
    async with asyncio.timeout(90):
        while node.not_ready_reason():
            assert not running.done(), running.exception()
            await asyncio.sleep(0.05)
        try:
            await asyncio.to_thread(client_side)
        finally:
            stop.set()
            await running


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kafka": {"security": "ssl"}}, "security.tls.certificate"),
        ({"http": {"tls": True}}, "http.tls"),
        ({"kafka": {"security": "tls"}}, "kafka.security"),
        (
            {"kafka": {"security": "sasl_plaintext"}, "security": {"sasl": {"mechanisms": ["OAUTHBEARER"]}}},
            "OAUTHBEARER",
        ),
        ({"security": {"sasl": {"mechanisms": ["GSSAPI"]}}}, "mechanisms"),
        ({"security": {"sasl": {"mechanisms": []}}}, "mechanisms"),
        ({"security": {"super_users": ["root"]}}, "User:NAME"),
        ({"security": {"oauth": {"secret": "x", "jwks_file": "y"}}}, "several places"),
        ({"security": {"tls": {"client_auth": "maybe"}}}, "client_auth"),
        ({"security": {"signing": {"keys": {"k1": "short"}}}}, "32 bytes"),
        ({"security": {"signing": {"keys": {"K 1": "x" * 32}}}}, "K 1"),
        ({"security": {"signing": {"keys": {"k1": "x" * 32}, "use": "k2"}}}, "k2"),
        ({"shape": {"a": {"table": "t", "where": "x = $1", "params": [{"claim": "x"}]}}}, "http.authenticate"),
        ({"shape": {"a": {"table": "t", "params": [{"clam": "x"}]}}}, "shape.a.params"),
        ({"shape": {"a": {"table": "t", "params": [{"client": 2}]}}}, "numbered from 1"),
        ({"shape": {"a": {"table": "t", "narrow": True, "params": [{"client": 1}]}}}, "narrow"),
        ({"shape": {"a": {"table": "t", "columns": [""]}}}, "has no name"),
        ({"shape": {"A": {"table": "t"}}}, "'A'"),
        ({"shape": {"a": {}}}, "shape.a.table"),
        ({"shape": {"a": {"table": "t", "narow": True}}}, "shape.a.narrow"),
    ],
)
def test_what_does_not_fit_together_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidError, match=named):
        parse(values, origin="tidemill.toml")


def test_rules_are_asked_once_clients_prove_who_they_are() -> None:
    tls = {"certificate": "a.pem", "key": "a.key", "client_ca": "ca.pem"}

    def config(**values: Any) -> Config:
        return parse(values, origin="tidemill.toml")

    assert not is_authorization_on(config())
    assert is_authorization_on(config(kafka={"security": "sasl_plaintext"}))
    assert not is_authorization_on(config(kafka={"security": "ssl"}, security={"tls": tls}))
    assert is_authorization_on(config(kafka={"security": "ssl"}, security={"tls": {**tls, "client_auth": "required"}}))
    assert is_authorization_on(config(security={"authorize": True}))
    assert not is_authorization_on(config(kafka={"security": "sasl_plaintext"}, security={"authorize": False}))
