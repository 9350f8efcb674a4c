"""Authentication and authorization of HTTP requests, with the same principals and rules as the Kafka endpoint.

    Authorization: Bearer TOKEN        a JSON web token (`security.oauth_tokens`)
    Authorization: Basic USER:PASSWORD a user's password, only within TLS or from this machine

Invariants:

- Closed by default: only OPEN paths (is the node alive and ready) are served without a principal. Every other request
  needs the operation that `required_permissions` names; an unknown path needs an operation on the cluster, so that a
  new route is not open by mistake.
- Bounded cost: a verified credential is accepted for CREDENTIAL_CACHE_S without another check, and concurrent requests
  with equal credentials share one, so that not every request derives a password. A failed one is answered after a
  delay that grows by address.
- No shared caching: a response to one principal is not cached for another. A signed URL of a shape is a credential
  itself: everyone who has it may read the shape, and so may a cache.
- No disclosure: a refusal about shapes is the same for shapes that exist and shapes that do not.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Final, NamedTuple

from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.base.address import split_url_path
from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.lake.catalogue import MAY_READ_SCOPE_KEY, error_body, is_catalogue_path, named_table
from tidemill.registry.http.messages import plain_subject
from tidemill.security.acl_cache import AclCache
from tidemill.security.acls import CLUSTER_NAME, Operation, Resource
from tidemill.security.audit import Audit
from tidemill.security.sasl import Authenticator, AuthFailureThrottle
from tidemill.security.scram import AuthenticationFailedError
from tidemill.shapes.definition.permissions import AccessDeniedError, Requester
from tidemill.shapes.http.authorization import NAME_PARAM, REQUESTER_SCOPE_KEY, ShapeAuthorizer, client_host, is_signed
from tidemill.shapes.http.params import BadRequestError

PUBLIC_PATHS: Final = frozenset({"/healthz", "/readyz", "/v1/health"})
SHAPE_PATH: Final = "/v1/shape"
ROW_PATHS: Final = frozenset({"/api/rows", "/api/dead-letters"})
"""Paths that show rows of the tables that `table` names."""
CREDENTIAL_CACHE_S: Final = 30.0
CREDENTIAL_CACHE_MAX: Final = 1_000
HEADER_BYTES_MAX: Final = 20 << 10
_CHALLENGE: Final = b'Bearer realm="tidemill", Basic realm="tidemill", charset="UTF-8"'


class RequiredPermission(NamedTuple):
    """Operation on a resource that a request needs to be allowed."""

    operation: Operation
    resource: Resource
    name: str


class AuthDependencies(NamedTuple):
    """Dependencies of the checks. With `rulebook` None every authenticated principal may do everything. `topics_of`
    returns the topics of a shape's table. `name_claim` is the claim under which the clauses of shapes see a user who
    gave a password."""

    authenticator: Authenticator
    rulebook: AclCache | None
    topics_of: Callable[[str], Awaitable[Sequence[str]]]
    name_claim: str = "sub"


class AuthenticatedClient(NamedTuple):
    """Verified client. `claims` are those to which shapes are bound. `ends_ms=None` if the client is valid as
    long as the user has this password."""

    principal: str
    claims: Mapping[str, object]
    ends_ms: int | None
    known_until_s: float


class AuthMiddleware:
    """ASGI middleware. `parties` is set once the node can check credentials; until then all paths but OPEN return
    503."""

    def __init__(
        self,
        app: ASGIApp,
        clock: Clock,
        *,
        within_tls: bool,
        grants: ShapeAuthorizer | None = None,
    ) -> None:
        self._app = app
        self._clock = clock
        self._within_tls = within_tls
        self._grants = grants or ShapeAuthorizer(clock)
        self._audit = Audit(clock)
        self._failures = AuthFailureThrottle()
        self._known: OrderedDict[bytes, AuthenticatedClient] = OrderedDict()
        self._verifying: dict[bytes, asyncio.Future[AuthenticatedClient]] = {}
        """Running checks, which requests with equal credentials share."""
        self.parties: AuthDependencies | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        parties = self.parties
        if parties is None:
            await self._send_refusal(scope, send, 503, "the node is starting.", (b"retry-after", b"1"))
            return
        host = client_host(scope)
        if scope["path"].endswith("\n"):
            # The router's patterns also match before a trailing newline, so the router would see a known path where
            # `required_permissions` sees an unknown one.
            await self._send_refusal(scope, send, 404, "Not Found")
            return
        query = QueryParams(scope["query_string"] if scope["path"] == SHAPE_PATH else "")
        if is_signed(query) and scope["method"] in ("GET", "HEAD", "POST"):
            await self._serve_signed(scope, receive, send, query, host)
            return
        try:
            known = await self._authenticate(parties, scope, host)
        except AuthenticationFailedError as refused:
            await self._refuse_unauthenticated(scope, send, host, refused)
            return
        except TidemillError as error:
            await self._send_refusal(
                scope, send, 503, f"authentication is not possible now: {error}", (b"retry-after", b"1")
            )
            return
        principal = known.principal
        raw = scope.get("raw_path") or scope["path"].encode()
        if scope["path"] in ROW_PATHS:
            topics = [f"shard.{table}" for table in QueryParams(scope["query_string"]).getlist("table")]
        else:
            topics = await _required_topics(parties, query)
        needed = required_permissions(scope["method"], scope["path"], raw, topics)
        denied = _first_denied(parties, needed, principal, host)
        if denied is not None:
            self._audit_denial(denied, principal, host)
            about = f"is not authorized: {denied.operation.name} {denied.resource.name} {denied.name}."
            if scope["path"] == SHAPE_PATH:
                about = "is not authorized for this shape request."
            await self._send_refusal(scope, send, 403, f"{principal} {about}")
            return
        if is_catalogue_path(scope["path"]):
            scope[MAY_READ_SCOPE_KEY] = lambda table: (
                _first_denied(parties, [_read_permission(f"shard.{table}")], principal, host) is None
            )
        if scope["path"] == SHAPE_PATH:
            scope[REQUESTER_SCOPE_KEY] = Requester(
                principal, known.claims, known.ends_ms, lambda: _first_denied(parties, needed, principal, host) is None
            )
        await self._app(scope, receive, _with_private_caching(send))

    async def _send_refusal(
        self, scope: Scope, send: Send, status: int, message: str, *more: tuple[bytes, bytes]
    ) -> None:
        in_catalogue = is_catalogue_path(scope["path"])
        body = error_body(status, message) if in_catalogue else json.dumps({"message": message}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            *more,
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _serve_signed(self, scope: Scope, receive: Receive, send: Send, query: QueryParams, host: str) -> None:
        """Pass on a request with a valid signature, for any client. The shape room checks the signature
        again, and serves what it signs."""
        try:
            with suppress(BadRequestError):  # routing passes such a request to the shape room, which words that error
                self._grants.authorize(query, None, host)
        except AccessDeniedError as denied:
            await self._send_refusal(scope, send, denied.status, str(denied))
            return
        await self._app(scope, receive, send)

    def _audit_denial(self, need: RequiredPermission, principal: str, host: str) -> None:
        self._audit.log_refusal(
            "http.operation_denied",
            (principal, need.operation.name, need.resource.name, need.name),
            principal=principal,
            host=host,
            operation=need.operation.name,
            resource=need.resource.name,
            name=need.name,
        )

    async def _authenticate(self, parties: AuthDependencies, scope: Scope, host: str) -> AuthenticatedClient:
        """Return the client that the credential proves. Raises AuthenticationFailedError, UnavailableError."""
        given = [value for key, value in scope["headers"] if key == b"authorization"]
        if len(given) != 1 or len(given[0]) > HEADER_BYTES_MAX:
            raise AuthenticationFailedError(
                "no credential was given" if not given else "more than one credential, or one that is too long"
            )
        # A password is accepted from this machine where it would not be from another.
        digest = hashlib.sha256(given[0] + (b"\x00here" if _is_loopback(host) else b"")).digest()
        now_s = self._clock.monotonic_s()
        known = self._known.get(digest)
        if known is not None and now_s < known.known_until_s:
            return known
        verifying = self._verifying.get(digest)
        if verifying is not None:
            return await asyncio.shield(verifying)
        verifying = self._verifying[digest] = asyncio.get_running_loop().create_future()
        try:
            known = self._known[digest] = await self._verify_credential(parties, given[0], host, now_s)
        except BaseException as error:
            own = isinstance(error, TidemillError)
            verifying.set_exception(error if own else UnavailableError("the check of this credential was interrupted."))
            verifying.exception()  # no other request may wait for it
            raise
        finally:
            del self._verifying[digest]
        verifying.set_result(known)
        self._known.move_to_end(digest)
        while len(self._known) > CREDENTIAL_CACHE_MAX:
            self._known.popitem(last=False)
        return known

    async def _verify_credential(
        self, parties: AuthDependencies, header: bytes, host: str, now_s: float
    ) -> AuthenticatedClient:
        kind, _, proof = header.decode("latin-1").partition(" ")
        authenticator = parties.authenticator
        if kind.lower() == "bearer" and authenticator.tokens is not None:
            found = await authenticator.tokens.verify(proof.strip())
            claims = {name: found.claims[name] for name in self._grants.used_claims if name in found.claims}
            lives_s = (found.expires_ms - self._clock.now_ms()) / 1000
            return AuthenticatedClient(found.principal, claims, found.ends_ms, now_s + min(CREDENTIAL_CACHE_S, lives_s))
        if kind.lower() != "basic":
            raise AuthenticationFailedError("an unsupported authentication scheme")
        if not self._within_tls and not _is_loopback(host):
            raise AuthenticationFailedError("a password without TLS")
        try:
            user, colon, password = base64.b64decode(proof.strip(), validate=True).decode().partition(":")
        except (binascii.Error, ValueError) as error:
            raise AuthenticationFailedError("a malformed password credential") from error
        if not colon:
            raise AuthenticationFailedError("a user without a password", user)
        principal = await authenticator.verify_password(user, password, host)
        return AuthenticatedClient(principal, {parties.name_claim: user}, None, now_s + CREDENTIAL_CACHE_S)

    async def _refuse_unauthenticated(
        self, scope: Scope, send: Send, host: str, refused: AuthenticationFailedError
    ) -> None:
        if refused.message != "no credential was given":
            self._audit.log_refusal(
                "http.authentication_failed", (host, refused.user), host=host, user=refused.user, reason=refused.message
            )
            await asyncio.sleep(self._failures.delay_s(host, self._clock.monotonic_s()))
        await self._send_refusal(scope, send, 401, "Authentication is required.", (b"www-authenticate", _CHALLENGE))


async def _required_topics(parties: AuthDependencies, query: QueryParams) -> list[str]:
    """Return the topics that a shape request needs, whichever of several tables the shape room picks: `shape.NAME`
    for a server-defined shape, and the topics of every named table."""
    if parties.rulebook is None:
        return []
    named = [f"shape.{name}" for name in query.getlist(NAME_PARAM)]
    return named + [topic for table in query.getlist("table") for topic in await parties.topics_of(table)]


def _first_denied(
    parties: AuthDependencies, needed: Sequence[RequiredPermission], principal: str, host: str
) -> RequiredPermission | None:
    """Return the first need that the current rules do not allow."""
    if parties.rulebook is None:
        return None
    allows = parties.rulebook.authorizer.allows
    return next(
        (need for need in needed if not allows(principal, host, need.operation, need.resource, need.name)), None
    )


def required_permissions(method: str, path: str, raw_path: bytes, topics: Sequence[str]) -> list[RequiredPermission]:
    """Return everything that a request needs. `topics` are those whose rows it reads (`_required_topics`). Pure."""
    reads = method in ("GET", "HEAD")
    if path in ROW_PATHS and reads and topics:
        return [_read_permission(topic) for topic in topics]
    if is_catalogue_path(path):
        # Lists contain only tables that the principal may read, and writes are refused for everybody.
        table = named_table(raw_path)
        return [] if table is None else [_read_permission(f"shard.{table}")]
    if path == SHAPE_PATH and method == "DELETE":
        # A handle alone may name any shape.
        return [RequiredPermission(Operation.DELETE, Resource.TOPIC, topic) for topic in topics] or [
            _cluster_permission(Operation.ALTER)
        ]
    if path == SHAPE_PATH and (reads or method == "POST"):  # a POST reads a subset
        return [_read_permission(topic) for topic in topics] or [_cluster_permission()]
    parts = split_url_path(raw_path)
    if parts[0] in ("subjects", "compatibility", "config", "mode", "schemas", "contexts"):
        return _registry_permissions(method, parts, reads=reads)
    return [_cluster_permission() if reads else _cluster_permission(Operation.ALTER)]


def _read_permission(topic: str) -> RequiredPermission:
    return RequiredPermission(Operation.READ, Resource.TOPIC, topic)


def _registry_permissions(method: str, parts: list[str], *, reads: bool) -> list[RequiredPermission]:
    """Return the needs of a schema registry request. A subject belongs to its topic: `orders-value` and `orders-key`
    belong to `orders`. Every authenticated client may read a schema by id, because a consumer finds the id in every
    record."""
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
    return [
        RequiredPermission(operation, Resource.TOPIC, _topic_of_subject(plain_subject(name))) for name in subject
    ] or [_cluster_permission(operation)]


def _topic_of_subject(subject: str) -> str:
    return next((subject.removesuffix(end) for end in ("-key", "-value") if subject.endswith(end)), subject)


def _cluster_permission(operation: Operation = Operation.DESCRIBE) -> RequiredPermission:
    return RequiredPermission(operation, Resource.CLUSTER, CLUSTER_NAME)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _with_private_caching(send: Send) -> Send:
    """Mark responses as private to one principal, so that no shared cache stores them."""

    async def privately(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [
                (key, _private_directives(value) if key == b"cache-control" else value)
                for key, value in message["headers"]
            ]
            message = {**message, "headers": [*headers, (b"vary", b"authorization")]}
        await send(message)

    return privately


def _private_directives(value: bytes) -> bytes:
    directives = [each.strip() for each in value.split(b",")]
    kept = [each for each in directives if each != b"public" and not each.startswith(b"s-maxage")]
    return b", ".join([b"private", *kept] if b"no-store" not in kept else kept)
