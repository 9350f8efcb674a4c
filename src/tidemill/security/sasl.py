"""SASL mechanisms for the metastore's users and for tokens. Each mechanism is an exchange of messages that ends with a
principal or with AuthenticationFailedError.

    PLAIN                  [authzid] 00 user 00 password (RFC 4616), checked against the user's SCRAM credential
    SCRAM-SHA-256, -512    `scram`
    OAUTHBEARER            gs2 header · 01 auth=Bearer TOKEN 01 [key=value 01…] 01 (RFC 7628)

Invariant: neither a reply nor its timing reveals whether a user exists. An unknown user is checked against a decoy
credential, which every node derives alike (`users`).

Key derivation is expensive: at most DERIVED_AT_ONCE passwords are derived concurrently, in threads. Failed
authentications, of any kind, are delayed by client address: each failure is answered more slowly than the one before.

Invariant (bounded queue): at most CHECKS_MAX passwords wait, and at most CHECKS_PER_ADDRESS of one address. Of one user
at one address, at most FAILED_PER_USER checks that failed within LONGEST_DELAY_S: a client cannot evade the delay by
closing its connections, and other users of its address are checked.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.errors import UnavailableError
from tidemill.security.oauth_tokens import TokenVerifier
from tidemill.security.principals import USER
from tidemill.security.scram import (
    NAMES,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    AuthenticationFailedError,
    ScramServer,
    matches_password,
)
from tidemill.security.users import Users

PLAIN: Final = "PLAIN"
OAUTHBEARER: Final = "OAUTHBEARER"
MECHANISMS: Final = (PLAIN, *NAMES.values(), OAUTHBEARER)
DERIVED_AT_ONCE: Final = 2
CHECKS_MAX: Final = 1_024
"""Limit of password checks that wait: some seconds of work, below the time limit of Kafka clients."""
CHECKS_PER_ADDRESS: Final = 512
"""Limit for one address, at least the default of `kafka.connections_per_address_max`: after a restart all of them
arrive together."""
FAILED_PER_USER: Final = 16
PASSWORD_CHARS_MAX: Final = 1_024
FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 2.0
FORGOTTEN_AFTER_S: Final = 60.0
ADDRESSES_MAX: Final = 1_000
"""Limit of addresses whose failures are remembered."""

T = TypeVar("T")
_STRONGEST_FIRST: Final = (SCRAM_SHA_512, SCRAM_SHA_256)


class SaslStep(msgspec.Struct, frozen=True):
    """Result of one message. `principal` "" = the exchange continues. `expires_ms` 0 = the authentication never
    expires."""

    reply: bytes
    principal: str = ""
    expires_ms: int = 0


class SaslExchange(Protocol):
    async def step(self, message: bytes) -> SaslStep:
        """Process one message. Raises AuthenticationFailedError; UnavailableError if the credentials cannot be read
        now.
        """
        ...


class Authenticator:
    def __init__(self, users: Users, rand: Rand, tokens: TokenVerifier | None = None) -> None:
        self.users = users
        self.tokens = tokens
        self._rand = rand
        self._checks = PasswordChecks()
        self._deriving = asyncio.Semaphore(DERIVED_AT_ONCE)

    def start_exchange(self, mechanism: str, host: str) -> SaslExchange:
        """Start the exchange of a client at this address."""
        if mechanism == PLAIN:
            return _Plain(self, host)
        if mechanism == OAUTHBEARER:
            assert self.tokens is not None
            return _OauthBearer(self.tokens)
        number = next(number for number, name in NAMES.items() if name == mechanism)
        return _Scram(self.users, ScramServer(number, self._rand.nonce()))

    async def verify_password(self, user: str, password: str, host: str) -> str:
        """Return the principal of a user with this password. `host`: address of the client. Raises
        AuthenticationFailedError, TooManyChecksError."""
        if not user or len(password) > PASSWORD_CHARS_MAX:
            raise AuthenticationFailedError("user name missing or password too long", user)
        with self._checks.count(host, user):
            first, second = await asyncio.gather(*(self.users.credential(user, each) for each in _STRONGEST_FIRST))
            found = first or second
            decoy = await self.users.decoy(user)
            async with self._deriving:
                fits = await asyncio.to_thread(matches_password, found or decoy, password)
            if found is None or not fits:
                raise AuthenticationFailedError("wrong password or unknown user", user)
        return USER + user


class TooManyChecksError(UnavailableError):
    """Too many passwords are being checked: this one was not. The client may retry."""


class PasswordChecks:
    """Running password checks by address, and recently failed ones by address and user."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._failed: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def count(self, host: str, user: str) -> Iterator[None]:
        """Count the check in the body. Raises TooManyChecksError."""
        if (
            self._running[host] >= CHECKS_PER_ADDRESS
            or self._running.total() >= CHECKS_MAX
            or self._failed[host, user] >= FAILED_PER_USER
        ):
            raise TooManyChecksError(
                f"too many passwords are being checked: host={host}.", fix="Retry in some seconds."
            )
        self._running[host] += 1
        try:
            yield
        except AuthenticationFailedError:
            self._failed[host, user] += 1
            asyncio.get_running_loop().call_later(LONGEST_DELAY_S, _release, self._failed, (host, user))
            raise
        finally:
            _release(self._running, host)


def _release(counts: Counter[T], key: T) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class _Plain:
    def __init__(self, authenticator: Authenticator, host: str) -> None:
        self._authenticator = authenticator
        self._host = host

    async def step(self, message: bytes) -> SaslStep:
        try:
            parts = message.decode().split("\x00")
        except UnicodeDecodeError as error:
            raise AuthenticationFailedError("message is not UTF-8") from error
        if len(parts) != 3:
            raise AuthenticationFailedError("message is not authzid, user and password")
        authzid, user, password = parts
        if authzid and authzid != user:
            raise AuthenticationFailedError("authorization id differs from the user", user)
        return SaslStep(b"", await self._authenticator.verify_password(user, password, self._host))


class _Scram:
    def __init__(self, users: Users, server: ScramServer) -> None:
        self._users = users
        self._server = server
        self._user: str | None = None

    async def step(self, message: bytes) -> SaslStep:
        if self._user is not None:
            return SaslStep(self._server.server_final(message), USER + self._user)
        mechanism = self._server.mechanism
        user = self._server.read_client_first(message)
        found, decoy = await self._users.credential(user, mechanism), await self._users.decoy(user, mechanism)
        self._user = user
        return SaslStep(self._server.server_first(found or decoy))


class _OauthBearer:
    def __init__(self, tokens: TokenVerifier) -> None:
        self._tokens = tokens

    async def step(self, message: bytes) -> SaslStep:
        try:
            header, *pairs = message.decode("ascii").split("\x01")
        except UnicodeDecodeError as error:
            raise AuthenticationFailedError("message is not ASCII") from error
        if header.split(",")[0] not in ("n", "y") or len(pairs) < 3 or pairs[-2:] != ["", ""]:
            raise AuthenticationFailedError("not an OAUTHBEARER message")
        given = [value for pair in pairs for key, _, value in [pair.partition("=")] if key == "auth"]
        kind, _, token = (given[0] if len(given) == 1 else "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise AuthenticationFailedError("no bearer token")
        found = await self._tokens.verify(token.strip())
        _, _, authzid = header.split(",")[1].partition("a=") if header.count(",") == 2 else ("", "", "")
        if authzid and USER + authzid != found.principal:
            raise AuthenticationFailedError("authorization id differs from the principal", found.principal)
        return SaslStep(b"", found.principal, found.expires_ms)


class AuthFailureThrottle:
    """Failure counts by address, and the delay that they cause: it doubles with each failure. Pure and bounded."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def delay_s(self, host: str, now_s: float) -> float:
        count, last_s = self._counts.pop(host, (0, now_s))
        count = 1 if now_s - last_s > FORGOTTEN_AFTER_S else count + 1
        self._counts[host] = (count, now_s)
        if len(self._counts) > ADDRESSES_MAX:
            self._counts.popitem(last=False)
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(count - 1, 10)))
