"""What stands before the shapes of a node: the guard of HTTP, with tokens and rules of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

from joserfc import jwt
from joserfc.jwk import OctKey
from starlette.types import ASGIApp

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import InvalidError
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.factory import metastore_on
from tidemill.node.http.auth import Guard, Parties
from tidemill.objects.memory import MemoryObjects
from tidemill.security.acl_cache import AclCache
from tidemill.security.acls import Operation, Resource, Rule
from tidemill.security.oauth_tokens import Tokens, TokenSettings
from tidemill.security.sasl import Authenticator
from tidemill.security.users import Users
from tidemill.shapes.definition.planner import split_table
from tidemill.shapes.http.authorization import Grants

SECRET = "a secret of thirty-two bytes or more"


def bearer(user: str, lives_s: float = 600.0, **claims: Any) -> str:
    said = {"sub": user, "exp": time.time() + lives_s, **claims}
    return f"Bearer {jwt.encode({'alg': 'HS256'}, said, OctKey.import_key(SECRET))}"


def may(user: str, name: str, operation: Operation = Operation.READ) -> Rule:
    return Rule(int(Resource.TOPIC), 3, name, f"User:{user}", "*", int(operation), 3)


class Guarded:
    """`async with Guarded(grants, rules) as guarded`; `guarded.front` is for a ShapeWorld."""

    def __init__(self, grants: Grants, rules: Sequence[Rule]) -> None:
        self._grants = grants
        self._rules = rules
        self.clock = SystemClock()
        self.guards: list[Guard] = []

    async def __aenter__(self) -> Self:
        rand = Rand()
        self._consensus = MemoryConsensus(self.clock)
        self._metastore = metastore_on(self._consensus, MemoryObjects(self.clock), self.clock, rand)
        self.rulebook = AclCache(self._metastore, self.clock, ["User:root"])
        await self.rulebook.add(list(self._rules))
        # No leeway: tokens of these tests end when they say.
        tokens = Tokens(TokenSettings(secret=SECRET, leeway_s=0), self.clock)
        self._parties = Parties(
            Authenticator(Users(self._metastore, self.clock), rand, tokens), self.rulebook, self._topics_of
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._metastore.aclose()
        await self._consensus.aclose()

    async def _topics_of(self, table: str) -> list[str]:
        """As of a database main with one table."""
        try:
            name = split_table(table)
        except InvalidError:
            return [table]
        return ["main.public.item"] if name == ("public", "item") else [table]

    def front(self, app: ASGIApp) -> ASGIApp:
        guard = Guard(app, self.clock, within_tls=True, grants=self._grants)
        guard.parties = self._parties
        self.guards.append(guard)
        return guard
