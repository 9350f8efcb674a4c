"""SASL mechanisms over the users of the metastore and over tokens: each an exchange of messages that ends with a
principal, or with Refused.

    PLAIN                  [authzid] 00 user 00 password (RFC 4616), against the user's SCRAM credential
    SCRAM-SHA-256, -512    `scram`
    OAUTHBEARER            gs2 header · 01 auth=Bearer TOKEN 01 [key=value 01…] 01 (RFC 7628)

SA1  Whether a user exists shows neither in an answer nor in its time.
SA2  At most DERIVED_AT_ONCE passwords are derived at once, in threads.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import msgspec

from tidemill.base.clock import Rand
from tidemill.security.oauth_tokens import Tokens
from tidemill.security.principals import USER
from tidemill.security.scram import (
    NAMES,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    AuthenticationFailedError,
    ScramServer,
    decoy,
    is_password,
)
from tidemill.security.users import Users

PLAIN: Final = "PLAIN"
OAUTHBEARER: Final = "OAUTHBEARER"
MECHANISMS: Final = (PLAIN, *NAMES.values(), OAUTHBEARER)
DERIVED_AT_ONCE: Final = 2
PASSWORD_CHARS_MAX: Final = 1_024
_STRONGEST_FIRST: Final = (SCRAM_SHA_512, SCRAM_SHA_256)


class Step(msgspec.Struct, frozen=True):
    """`principal` "" = the exchange goes on. `expires_ms` 0 = the proof holds for ever."""

    reply: bytes
    principal: str = ""
    expires_ms: int = 0


class Exchange(Protocol):
    async def step(self, message: bytes) -> Step:
        """Raises AuthenticationFailedError; Unavailable where nobody can tell now."""
        ...


class Authenticator:
    def __init__(self, users: Users, rand: Rand, tokens: Tokens | None = None) -> None:
        self.users = users
        self.tokens = tokens
        self._rand = rand
        self._secret = rand.nonce().encode()
        self._deriving = asyncio.Semaphore(DERIVED_AT_ONCE)

    def exchange(self, mechanism: str) -> Exchange:
        if mechanism == PLAIN:
            return _Plain(self)
        if mechanism == OAUTHBEARER:
            assert self.tokens is not None
            return _Bearer(self.tokens)
        number = next(number for number, name in NAMES.items() if name == mechanism)
        return _Scram(self.users, ScramServer(number, self._rand.nonce()), self._secret)

    async def password(self, user: str, password: str) -> str:
        """The principal. Raises AuthenticationFailedError."""
        if not user or len(password) > PASSWORD_CHARS_MAX:
            raise AuthenticationFailedError("no user, or a password that is too long", user)
        first, second = await asyncio.gather(*(self.users.credential(user, each) for each in _STRONGEST_FIRST))
        found = first or second
        async with self._deriving:
            stored = found or decoy(user, SCRAM_SHA_512, self._secret)
            fits = await asyncio.to_thread(is_password, stored, password)
        if found is None or not fits:
            raise AuthenticationFailedError("wrong password, or no such user", user)
        return USER + user


class _Plain:
    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def step(self, message: bytes) -> Step:
        try:
            parts = message.decode().split("\x00")
        except UnicodeDecodeError as error:
            raise AuthenticationFailedError("a message that is not UTF-8") from error
        if len(parts) != 3:
            raise AuthenticationFailedError("not user and password")
        authzid, user, password = parts
        if authzid and authzid != user:
            raise AuthenticationFailedError("it asks to act as somebody else", user)
        return Step(b"", await self._authenticator.password(user, password))


class _Scram:
    def __init__(self, users: Users, server: ScramServer, secret: bytes) -> None:
        self._users = users
        self._server = server
        self._secret = secret
        self._user: str | None = None

    async def step(self, message: bytes) -> Step:
        if self._user is not None:
            return Step(self._server.final(message), USER + self._user)
        mechanism = self._server.mechanism
        user = self._server.first(message)
        found = await self._users.credential(user, mechanism) or decoy(user, mechanism, self._secret)
        self._user = user
        return Step(self._server.challenge(found))


class _Bearer:
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def step(self, message: bytes) -> Step:
        try:
            header, *pairs = message.decode("ascii").split("\x01")
        except UnicodeDecodeError as error:
            raise AuthenticationFailedError("a message that is not ASCII") from error
        if header.split(",")[0] not in ("n", "y") or len(pairs) < 3 or pairs[-2:] != ["", ""]:
            raise AuthenticationFailedError("not a message of OAUTHBEARER")
        given = [value for pair in pairs for key, _, value in [pair.partition("=")] if key == "auth"]
        kind, _, token = (given[0] if len(given) == 1 else "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise AuthenticationFailedError("no bearer token")
        found = await self._tokens.verify(token.strip())
        _, _, authzid = header.split(",")[1].partition("a=") if header.count(",") == 2 else ("", "", "")
        if authzid and USER + authzid != found.principal:
            raise AuthenticationFailedError("it asks to act as somebody else", found.principal)
        return Step(b"", found.principal, found.expires_ms)
