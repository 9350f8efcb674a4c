"""Who asks over HTTP, and may it: the same principals and rules as at the Kafka endpoint.

    Authorization: Bearer TOKEN        a JSON web token (`access.tokens`)
    Authorization: Basic USER:PASSWORD a user's password, within TLS or from this machine alone

HA1  OPEN is answered to everybody: whether the node lives and is ready. All else needs a principal, and the operation
     that `needs` names; a path that it does not know needs the cluster's, so that a new route is not open by mistake.
HA2  A proof that counted counts for KNOWN_S more, so that not every request derives a password; a failed one is
     answered after a delay that grows by address.
HA3  What was answered to one principal is kept by no cache that serves another.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import parse_qs, unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.access.audit import Audit
from tidemill.access.failures import Failures
from tidemill.access.rulebook import Rulebook
from tidemill.access.rules import CLUSTER_NAME, Operation, Resource
from tidemill.access.sasl import Authenticator
from tidemill.access.scram import Refused
from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError

OPEN: Final = frozenset({"/healthz", "/readyz", "/v1/health"})
SHAPE: Final = "/v1/shape"
KNOWN_S: Final = 30.0
KNOWN_MAX: Final = 1_000
HEADER_BYTES_MAX: Final = 20 << 10
_CHALLENGE: Final = b'Bearer realm="tidemill", Basic realm="tidemill", charset="UTF-8"'


class Need(NamedTuple):
    operation: Operation
    resource: Resource
    name: str


class Parties(NamedTuple):
    """`rulebook` None = whoever proved who it is may do everything. `topics_of`: the topics of a shape's table."""

    authenticator: Authenticator
    rulebook: Rulebook | None
    topics_of: Callable[[str], Awaitable[Sequence[str]]]


class Guard:
    """ASGI middleware. `parties` is set when the node can tell; until then all but OPEN is 503."""

    def __init__(self, app: ASGIApp, clock: Clock, *, within_tls: bool) -> None:
        self._app = app
        self._clock = clock
        self._within_tls = within_tls
        self._audit = Audit(clock)
        self._failures = Failures()
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self.parties: Parties | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        parties = self.parties
        if parties is None:
            await _refuse(send, 503, "the node is starting.", (b"retry-after", b"1"))
            return
        host = str(scope["client"][0]) if scope.get("client") else ""
        try:
            principal = await self._principal(parties, scope, host)
        except Refused as refused:
            await self._turn_away(send, host, refused)
            return
        except TidemillError as error:
            await _refuse(send, 503, f"nobody can be known now: {error}", (b"retry-after", b"1"))
            return
        denied = await self._denied(parties, scope, principal, host)
        if denied is not None:
            about = f"{denied.operation.name} {denied.resource.name} {denied.name}"
            await _refuse(send, 403, f"{principal} may not: {about}.")
            return
        await self._app(scope, receive, _for_one(send))

    async def _denied(self, parties: Parties, scope: Scope, principal: str, host: str) -> Need | None:
        if parties.rulebook is None:
            return None
        authorizer = parties.rulebook.authorizer
        raw = scope.get("raw_path") or scope["path"].encode()
        tables = tables_of(scope["path"], scope["query_string"])
        topics = [topic for table in tables for topic in await parties.topics_of(table)]
        for need in needs(scope["method"], scope["path"], raw, topics):
            if not authorizer.allows(principal, host, need.operation, need.resource, need.name):
                self._audit.refused(
                    "http.operation_denied",
                    (principal, need.operation.name, need.resource.name, need.name),
                    principal=principal,
                    host=host,
                    operation=need.operation.name,
                    resource=need.resource.name,
                    name=need.name,
                )
                return need
        return None

    async def _principal(self, parties: Parties, scope: Scope, host: str) -> str:
        """Raises Refused, Unavailable."""
        given = [value for key, value in scope["headers"] if key == b"authorization"]
        if len(given) != 1 or len(given[0]) > HEADER_BYTES_MAX:
            raise Refused("no proof of who asks" if not given else "more than one proof, or one that is too long")
        # A password counts from this machine where it would not from another.
        digest = hashlib.sha256(given[0] + (b"\x00here" if _is_loopback(host) else b"")).digest()
        now_s = self._clock.monotonic_s()
        known = self._known.get(digest)
        if known is not None and now_s < known[1]:
            return known[0]
        principal, lives_s = await self._prove(parties.authenticator, given[0], host)
        self._known[digest] = principal, now_s + min(KNOWN_S, lives_s)
        self._known.move_to_end(digest)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return principal

    async def _prove(self, authenticator: Authenticator, header: bytes, host: str) -> tuple[str, float]:
        kind, _, proof = header.decode("latin-1").partition(" ")
        if kind.lower() == "bearer" and authenticator.tokens is not None:
            found = await authenticator.tokens.verify(proof.strip())
            return found.principal, (found.expires_ms - self._clock.now_ms()) / 1000
        if kind.lower() != "basic":
            raise Refused("a kind of proof that is not taken")
        if not self._within_tls and not _is_loopback(host):
            raise Refused("a password outside of TLS")
        try:
            user, colon, password = base64.b64decode(proof.strip(), validate=True).decode().partition(":")
        except (binascii.Error, ValueError) as error:
            raise Refused("a password that cannot be read") from error
        if not colon:
            raise Refused("a user without a password", user)
        return await authenticator.password(user, password), KNOWN_S

    async def _turn_away(self, send: Send, host: str, refused: Refused) -> None:
        if refused.message != "no proof of who asks":
            self._audit.refused(
                "http.authentication_failed", (host, refused.user), host=host, user=refused.user, reason=refused.message
            )
            await asyncio.sleep(self._failures.delay_s(host, self._clock.monotonic_s()))
        await _refuse(send, 401, "Prove who you are.", (b"www-authenticate", _CHALLENGE))


def tables_of(path: str, query: bytes) -> list[str]:
    """Of a request for a shape, whichever of several the shape room takes."""
    return parse_qs(query.decode("latin-1"), keep_blank_values=True).get("table", []) if path == SHAPE else []


def needs(method: str, path: str, raw_path: bytes, topics: Sequence[str]) -> list[Need]:
    """What a request needs, all of it. `topics`: of its `tables_of`. Pure."""
    reads = method in ("GET", "HEAD")
    if path == SHAPE and method in ("GET", "HEAD", "DELETE"):
        operation = Operation.READ if reads else Operation.DELETE
        return [Need(operation, Resource.TOPIC, topic) for topic in topics] or [_cluster()]
    # As the registry takes a path apart: a subject may hold a slash.
    parts = [unquote(part) for part in raw_path.decode("latin-1").partition("?")[0].strip("/").split("/")]
    if parts[0] in ("subjects", "compatibility", "config", "mode", "schemas", "contexts"):
        return _registry(method, parts, reads=reads)
    return [_cluster() if reads else _cluster(Operation.ALTER)]


def _registry(method: str, parts: list[str], *, reads: bool) -> list[Need]:
    """A subject is its topic's: `orders-value` and `orders-key` are of orders. A schema by its id is anybody's who is
    known, for who consumes finds the id in every record."""
    if parts[:2] == ["schemas", "ids"] and reads and len(parts) == 3:
        return []
    subject = parts[1:2] if parts[0] in ("subjects", "config", "mode") else []
    if parts[:2] == ["compatibility", "subjects"]:
        subject = parts[2:3]
    if parts[0] in ("config", "mode"):
        operation = Operation.DESCRIBE_CONFIGS if reads else Operation.ALTER_CONFIGS
    elif reads or (method == "POST" and (parts[0] == "compatibility" or len(parts) == 2)):
        operation = Operation.DESCRIBE
    elif method == "POST":
        operation = Operation.WRITE if subject else Operation.ALTER
    else:
        operation = Operation.DELETE if subject and method == "DELETE" else Operation.ALTER
    return [Need(operation, Resource.TOPIC, _topic_of(name)) for name in subject] or [_cluster(operation)]


def _topic_of(subject: str) -> str:
    return next((subject.removesuffix(end) for end in ("-key", "-value") if subject.endswith(end)), subject)


def _cluster(operation: Operation = Operation.DESCRIBE) -> Need:
    return Need(operation, Resource.CLUSTER, CLUSTER_NAME)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _for_one(send: Send) -> Send:
    """HA3."""

    async def privately(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [
                (key, _private(value) if key == b"cache-control" else value) for key, value in message["headers"]
            ]
            message = {**message, "headers": [*headers, (b"vary", b"authorization")]}
        await send(message)

    return privately


def _private(value: bytes) -> bytes:
    directives = [each.strip() for each in value.split(b",")]
    kept = [each for each in directives if each != b"public" and not each.startswith(b"s-maxage")]
    return b", ".join([b"private", *kept] if b"no-store" not in kept else kept)


async def _refuse(send: Send, status: int, message: str, *more: tuple[bytes, bytes]) -> None:
    body = json.dumps({"message": message}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
