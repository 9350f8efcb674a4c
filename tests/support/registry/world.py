"""Registries over real domains in memory: any number of processes of one cluster, and one of them behind HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.sections import RegistrySection
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.metastore.cluster_manifest import ClusterManifest, Presence
from tidemill.metastore.factory import NODE, create_metastore
from tidemill.metastore.metastore import Metastore
from tidemill.node.http.server import HttpServer
from tidemill.objects.memory import MemoryObjects
from tidemill.registry.http import registry_routes
from tidemill.registry.registry import Registry
from tidemill.shards.api import run_inline

T = TypeVar("T")

STRING = '"string"'


def record(*fields: str, name: str = "R") -> str:
    """An Avro record; a field is `name:type` or `name:type=default` in JSON."""
    made: list[dict[str, Any]] = []
    for field in fields:
        named, _, rest = field.partition(":")
        kind, _, default = rest.partition("=")
        made.append({"name": named, "type": json.loads(kind) if kind[:1] in '[{"' else kind})
        if default:
            made[-1]["default"] = json.loads(default)
    return json.dumps({"type": "record", "name": name, "fields": made}, separators=(",", ":"))


class Faulty:
    """A metastore whose next commits fail as `faults` say: "before" (UnknownOutcomeError, nothing landed), "after"
    (UnknownOutcomeError, it landed). Everything else is the real one's."""

    def __init__(self, inner: Metastore) -> None:
        self._inner = inner
        self.faults: list[tuple[str, Exception]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], *, expects: Mapping[bytes, int] = {}) -> int:
        when, error = self.faults.pop(0) if self.faults else ("", None)
        if when == "before":
            assert error is not None
            raise error
        seqno = await self._inner.commit(rows, expects=expects)
        if when == "after":
            assert error is not None
            raise error
        return seqno


class Cluster:
    """`node()` is one more process."""

    def __init__(self, state: MemoryState | None = None, objects: MemoryObjects | None = None) -> None:
        self.clock = SystemClock()
        self.rand = Rand()
        self.state = state or MemoryState()
        self.objects = objects or MemoryObjects(self.clock)
        self._metastores: list[Metastore] = []

    def metastore(self) -> Metastore:
        rand = Rand(len(self._metastores))
        consensus = MemoryConsensus(self.clock, self.state)
        first = not self._metastores
        settings = {"settings": NODE} if first else {}
        found = create_metastore(consensus, self.objects, self.clock, rand, holder=f"n{rand.nonce()}", **settings)
        self._metastores.append(found)
        return found

    def node(self, settings: RegistrySection | None = None, metastore: Any = None) -> Registry:
        return Registry(metastore or self.metastore(), self.clock, Rand(), run_inline, settings)

    async def persisted(self) -> None:
        """Every row into the bucket, and the cluster's manifest with it; no sign of life."""
        metastore = self._metastores[0]
        await metastore.flush(30)
        cluster = await metastore.cluster()
        uuids = tuple(domain.domain_uuid for domain in await metastore.domains())  # type: ignore[attr-defined]
        manifest = ClusterManifest(cluster.uuid, cluster.label, cluster.incarnation, uuids, cluster.created_ms)
        presence = Presence(self.objects, self.clock, self.rand, "n1")
        await presence.publish(manifest)
        await presence.withdraw()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for metastore in reversed(self._metastores):
            await metastore.aclose()


class Rest:
    """A registry behind the node's own HTTP server; `ask` says (status, decoded body)."""

    def __init__(self, settings: RegistrySection | None = None) -> None:
        self._portal = BlockingPortal("registry-test")
        self.failures: list[BaseException] = []
        self._portal.call(self._up(settings))

    async def _up(self, settings: RegistrySection | None) -> None:
        self.cluster = Cluster()
        self.metastore = Faulty(self.cluster.metastore())
        self.registry = self.cluster.node(settings, self.metastore)
        app = Starlette(routes=registry_routes(self.registry))
        self._server = HttpServer(app, on_failure=lambda _, error: self.failures.append(error))
        self.port = await self._server.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": kind} if data is not None and kind else {})
            response = connection.getresponse()
            text = response.read()
            media = response.headers.get("content-type", "")
            return response.status, json.loads(text) if "json" in media and text else text.decode()
        finally:
            connection.close()

    def register(self, subject: str, schema: str, kind: str = "", **more: Any) -> int:
        body = {"schema": schema, **({"schemaType": kind} if kind else {}), **more}
        status, found = self.ask("POST", f"/subjects/{quote(subject, safe='')}/versions", body)
        assert status == 200, found
        return int(found["id"])

    def error(self, method: str, path: str, body: Any = None) -> int:
        status, found = self.ask(method, path, body)
        assert status >= 400 and status == int(str(found["error_code"])[:3]), (status, found)
        assert found["message"]
        return int(found["error_code"])

    def close(self) -> None:
        self._portal.call(self._server.aclose())
        self._portal.call(self.cluster.__aexit__())
        self._portal.close()
        assert not self.failures
