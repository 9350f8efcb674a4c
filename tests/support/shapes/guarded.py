"""The HTTP guard in front of a node's shapes, with test tokens and rules."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

from joserfc import jwt
from joserfc.jwk import OctKey
from starlette.types import ASGIApp

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.listeners import OauthSection
from tidemill.base.errors import InvalidError
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.factory import create_metastore
from tidemill.node.http.auth import AuthDependencies, AuthMiddleware
from tidemill.objects.memory import MemoryObjects
from tidemill.security.acl_cache import AclCache
from tidemill.security.acls import AclRule, Operation, Resource
from tidemill.security.oauth_tokens import TokenVerifier
from tidemill.security.sasl import Authenticator
from tidemill.security.users import Users
from tidemill.shapes.definition.planner import parse_table_name
from tidemill.shapes.http.authorization import ShapeAuthorizer

SECRET = "a secret of thirty-two bytes or more"


def bearer(user: str, lives_s: float = 600.0, **claims: Any) -> str:
    said = {"sub": user, "exp": time.time() + lives_s, **claims}
    return f"Bearer {jwt.encode({'alg': 'HS256'}, said, OctKey.import_key(SECRET))}"


def may(user: str, name: str, operation: Operation = Operation.READ) -> AclRule:
    return AclRule(int(Resource.TOPIC), 3, name, f"User:{user}", "*", int(operation), 3)


class Guarded:
    """`async with Guarded(grants, rules) as guarded`; `guarded.front` is for a ShapeWorld."""

    def __init__(self, grants: ShapeAuthorizer, rules: Sequence[AclRule]) -> None:
        self._grants = grants
        self._rules = rules
        self.clock = SystemClock()
        self.guards: list[AuthMiddleware] = []

    async def __aenter__(self) -> Self:
        rand = Rand()
        self._consensus = MemoryConsensus(self.clock)
        self._metastore = create_metastore(self._consensus, MemoryObjects(self.clock), self.clock, rand)
        self.rulebook = AclCache(self._metastore, self.clock, ["User:root"])
        await self.rulebook.add(list(self._rules))
        # No leeway: tokens of these tests end when they say.
        tokens = TokenVerifier(OauthSection(secret=SECRET, leeway_s=0), self.clock)
        self._parties = AuthDependencies(
            Authenticator(Users(self._metastore, self.clock), rand, tokens), self.rulebook, self._topics_of
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._metastore.aclose()
        await self._consensus.aclose()

    async def _topics_of(self, table: str) -> list[str]:
        """Return the topics of a database `main` with one table."""
        try:
            name = parse_table_name(table)
        except InvalidError:
            return [table]
        return ["main.public.item"] if name == ("public", "item") else [table]

    def front(self, app: ASGIApp) -> ASGIApp:
        guard = AuthMiddleware(app, self.clock, within_tls=True, grants=self._grants)
        guard.parties = self._parties
        self.guards.append(guard)
        return guard
