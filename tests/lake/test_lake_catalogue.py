"""The REST catalogue: paths, bodies and refusals, over published tables of the test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.types import Message

from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.lake.catalogue import MAY_READ_SCOPE_KEY, PublishedTable, StorageAccess, catalogue_routes, storage_access
from tidemill.node.http.server import build_application

T = "/iceberg/v1/namespaces/tidemill/tables"
METADATA: dict[str, Any] = {
    "format-version": 3,
    "current-snapshot-id": 2,
    "refs": {"main": {"snapshot-id": 2, "type": "branch"}, "t5": {"snapshot-id": 2, "type": "tag"}},
    "snapshots": [{"snapshot-id": 1}, {"snapshot-id": 2}],
}


class Tables:
    def __init__(self, *names: str) -> None:
        self.names = names
        self.error: Exception | None = None
        self.version = 1

    async def list_names(self) -> Sequence[str]:
        if self.error is not None:
            raise self.error
        return self.names

    async def load(self, table: str) -> PublishedTable:
        if self.error is not None:
            raise self.error
        if table not in self.names:
            raise MissingError(f"there is no such table: table={table}.")
        return PublishedTable(f"file:///b/lake/{table}/{self.version}.json", json.dumps(METADATA).encode())


class Catalogue:
    def __init__(self, *names: str, access: StorageAccess | None = None) -> None:
        self.tables = Tables(*names)
        self._app = build_application(catalogue_routes(self.tables, access or StorageAccess()))

    async def ask(
        self, target: str, method: str = "GET", headers: Mapping[str, str] = {}, **scope: Any
    ) -> tuple[int, Any, dict[str, str]]:
        """Return (status, JSON of the body, headers)."""
        path, _, query = target.partition("?")
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"{}"}

        asked = {
            "type": "http",
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await self._app(asked | scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent[1:])
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], json.loads(body) if body else None, found


async def test_a_client_finds_its_way_from_the_configuration_to_the_table() -> None:
    catalogue = Catalogue("orders", "customer")
    status, config, _ = await catalogue.ask("/iceberg/v1/config?warehouse=any")
    assert status == 200 and "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}" in config["endpoints"]
    assert not [each for each in config["endpoints"] if each.startswith(("POST", "DELETE")) and "metrics" not in each]
    assert (await catalogue.ask("/iceberg/v1/namespaces"))[1] == {"namespaces": [["tidemill"]]}
    assert (await catalogue.ask("/iceberg/v1/namespaces?parent=tidemill"))[1] == {"namespaces": []}
    found = (await catalogue.ask("/iceberg/v1/namespaces/tidemill"))[1]
    assert found == {"namespace": ["tidemill"], "properties": {}}
    _, listed, _ = await catalogue.ask(T)
    assert [each["name"] for each in listed["identifiers"]] == ["customer", "orders"]
    status, table, _ = await catalogue.ask(f"{T}/orders")
    assert status == 200 and table["metadata"] == METADATA
    assert table["metadata-location"] == "file:///b/lake/orders/1.json"
    assert "storage-credentials" not in table


@pytest.mark.parametrize("path", ["/iceberg/v1/namespaces/tidemill", f"{T}/orders"])
async def test_existence_is_asked_without_a_body(path: str) -> None:
    assert (await Catalogue("orders").ask(path, "HEAD"))[:2] == (204, None)


async def test_snapshots_may_be_limited_to_those_that_a_ref_names() -> None:
    catalogue = Catalogue("orders")
    _, table, headers = await catalogue.ask(f"{T}/orders?snapshots=refs")
    assert table["metadata"]["snapshots"] == [{"snapshot-id": 2}]
    _, whole, others = await catalogue.ask(f"{T}/orders?snapshots=all")
    assert len(whole["metadata"]["snapshots"]) == 2 and headers["etag"] != others["etag"]


async def test_a_table_that_did_not_change_is_not_sent_again() -> None:
    catalogue = Catalogue("orders")
    _, _, headers = await catalogue.ask(f"{T}/orders")
    known = {"if-none-match": headers["etag"]}
    assert (await catalogue.ask(f"{T}/orders", headers=known))[:2] == (304, None)
    catalogue.tables.version = 2
    assert (await catalogue.ask(f"{T}/orders", headers=known))[0] == 200


async def test_a_list_is_read_in_pages_and_holds_only_tables_that_may_be_read() -> None:
    catalogue = Catalogue("a", "b", "c", "d", "e")
    scope = {MAY_READ_SCOPE_KEY: lambda table: table != "c"}
    names: list[str] = []
    token = ""
    while True:
        _, page, _ = await catalogue.ask(f"{T}?pageToken={token}&pageSize=2", **scope)
        names += [each["name"] for each in page["identifiers"]]
        assert len(page["identifiers"]) <= 2
        token = page.get("next-page-token", "")
        if not token:
            break
    assert names == ["a", "b", "d", "e"]
    assert (await catalogue.ask(f"{T}?pageSize=x"))[0] == 400


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/iceberg", "NoSuchNamespaceException"),
        ("/iceberg/v2/config", "NoSuchNamespaceException"),
        ("/iceberg/v1/namespaces/other", "NoSuchNamespaceException"),
        ("/iceberg/v1/namespaces?parent=other", "NoSuchNamespaceException"),
        ("/iceberg/v1/namespaces/other/tables", "NoSuchNamespaceException"),
        ("/iceberg/v1/namespaces/tidemill%1Forders/tables/refs", "NoSuchNamespaceException"),
        ("/iceberg/v1/namespaces/tidemill/views/orders", "NoSuchViewException"),
        (f"{T}/nothing", "NoSuchTableException"),
        (f"{T}/orders/plan", "NoSuchTableException"),
        (f"{T}/orders/../payroll", "NoSuchTableException"),
        (f"{T}/%6Frders%2F", "NoSuchTableException"),
    ],
)
async def test_a_place_that_does_not_exist_is_404_with_the_type_that_clients_know(path: str, kind: str) -> None:
    status, body, _ = await Catalogue("orders").ask(path)
    assert status == 404
    assert body["error"]["type"] == kind and body["error"]["code"] == 404 and body["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/iceberg/v1/namespaces"),
        ("DELETE", "/iceberg/v1/namespaces/tidemill"),
        ("POST", T),
        ("POST", f"{T}/orders"),
        ("DELETE", f"{T}/orders"),
        ("POST", "/iceberg/v1/tables/rename"),
        ("POST", "/iceberg/v1/transactions/commit"),
        ("POST", "/iceberg/v1/oauth/tokens"),
    ],
)
async def test_every_write_is_refused_in_words(method: str, path: str) -> None:
    status, body, _ = await Catalogue("orders").ask(path, method)
    assert (status, body["error"]["type"]) == (403, "ForbiddenException")
    assert "read-only" in body["error"]["message"]


async def test_metrics_of_readers_are_accepted() -> None:
    assert (await Catalogue("orders").ask(f"{T}/orders/metrics", "POST"))[0] == 204


@pytest.mark.parametrize(
    ("error", "status"),
    [(UnavailableError("the bucket does not answer."), 503), (InvalidError("a default is NaN."), 400)],
)
async def test_a_table_that_cannot_be_loaded_says_why(error: Exception, status: int) -> None:
    catalogue = Catalogue("orders")
    catalogue.tables.error = error
    found, body, headers = await catalogue.ask(f"{T}/orders")
    assert found == status and str(error) in body["error"]["message"]
    assert ("retry-after" in headers) == (status == 503)


BASE = "s3://harbour/pre"
S3 = f"{BASE}?endpoint=http://127.0.0.1:9000&region=eu-central-1"
KEYS = {"AWS_ACCESS_KEY_ID": "writer", "AWS_SECRET_ACCESS_KEY": "hidden"}


async def test_the_nodes_own_keys_are_never_given_out() -> None:
    access = storage_access(S3, KEYS, BASE)
    catalogue = Catalogue("orders", access=access)
    _, table, _ = await catalogue.ask(f"{T}/orders")
    assert table["config"]["s3.endpoint"] == "http://127.0.0.1:9000"
    assert table["config"]["s3.path-style-access"] == "true"
    assert table["config"]["s3.region"] == "eu-central-1"
    config = (await catalogue.ask("/iceberg/v1/config"))[1]
    assert "hidden" not in json.dumps([table, config]) and "writer" not in json.dumps([table, config])


async def test_configured_keys_come_with_a_table_only() -> None:
    access = storage_access(S3, KEYS, BASE, access_key_id="reader", secret_access_key="shown")
    catalogue = Catalogue("orders", access=access)
    _, table, _ = await catalogue.ask(f"{T}/orders")
    given, _ = table["storage-credentials"]
    assert [each["prefix"] for each in table["storage-credentials"]] == [f"{BASE}/lake/", f"{BASE}/shards/"]
    assert given["config"]["s3.access-key-id"] == table["config"]["s3.access-key-id"] == "reader"
    for path in ("/iceberg/v1/config", "/iceberg/v1/namespaces", T):
        assert "shown" not in json.dumps((await catalogue.ask(path))[1])


def test_other_stores_need_nothing_of_ours() -> None:
    assert storage_access("file:///data", {}, "file:///data") == StorageAccess()
    assert storage_access("gs://bucket/prefix", {}, "gs://bucket/prefix", access_key_id="a") == StorageAccess()
    hosted = storage_access("s3://harbour?endpoint=https://s3.example&virtual_host=true", KEYS, BASE)
    assert hosted.config["s3.path-style-access"] == "false" and hosted.config["s3.region"] == "us-east-1"
