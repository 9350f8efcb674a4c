"""Bearer tokens: JSON web tokens (RFC 7519), signed by a key of a JWKS file or URL, or by a shared secret.

TO1  The kind of key says which algorithms count: a secret never verifies what asks for a public key, and the other
     way round. A token without `exp` is refused.
TO2  Keys of a URL are fetched anew once in FETCH_EVERY_S, and sooner for a key that nobody knows, at most once in
     FETCH_AGAIN_S. While it is away the last ones serve.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.security.principals import NAME_CHARS_MAX, USER
from tidemill.security.scram import AuthenticationFailedError

TOKEN_CHARS_MAX: Final = 16 << 10
FETCH_EVERY_S: Final = 3_600.0
FETCH_AGAIN_S: Final = 30.0
_FETCH_TIMEOUT_S: Final = 5.0
_KEYS_BYTES_MAX: Final = 1 << 20
_PUBLIC: Final = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
_SECRET: Final = ["HS256", "HS384", "HS512"]

log = structlog.get_logger()


class TokenSettings(msgspec.Struct, frozen=True):
    """One of `jwks_file`, `jwks_url`, `secret`. `issuer` and `audience`: asked for unless empty."""

    jwks_file: str = ""
    jwks_url: str = ""
    secret: str = ""
    issuer: str = ""
    audience: str = ""
    principal_claim: str = "sub"
    leeway_s: int = 30


class Bearer(msgspec.Struct, frozen=True):
    """`expires_ms` as it says itself; until `ends_ms` it counts, for clocks may differ. `claims`: what else it says."""

    principal: str
    expires_ms: int
    ends_ms: int
    claims: Mapping[str, object]


class Tokens:
    def __init__(self, settings: TokenSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._keys: Any = None
        self._looked_s = float("-inf")
        self._seen: tuple[int, int] = (0, 0)
        self._one = asyncio.Lock()
        url = urlsplit(settings.jwks_url)
        if settings.jwks_url and not _is_safe(url.scheme, url.hostname):
            raise InvalidError(
                f"keys of tokens would be fetched in clear text: security.oauth.jwks_url={settings.jwks_url}.",
                fix="Use https.",
            )

    async def start(self) -> None:
        """Read the keys of a file or secret. Raises InvalidError."""
        if not self._settings.jwks_url:
            await self._look()

    async def verify(self, token: str) -> Bearer:
        """Raises AuthenticationFailedError; Unavailable while no key was ever read."""
        from joserfc import jwt
        from joserfc.errors import JoseError

        if len(token) > TOKEN_CHARS_MAX:
            raise AuthenticationFailedError("a token that is too long")
        await self._look()
        settings = self._settings
        try:
            try:
                found = jwt.decode(token, self._keys, algorithms=self._algorithms)
            except (JoseError, ValueError) as error:
                if not await self._look_again(error):
                    raise
                found = jwt.decode(token, self._keys, algorithms=self._algorithms)
            claims = found.claims
            self._check(claims)
        except AuthenticationFailedError:
            raise
        except Exception as error:
            # A stranger's token may break a library in any way: all of them mean no.
            raise AuthenticationFailedError(f"a token that does not count: {type(error).__name__}: {error}") from error
        name = claims.get(settings.principal_claim)
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
            raise AuthenticationFailedError(f"a token that names nobody: claim={settings.principal_claim}")
        expires_ms = int(claims["exp"] * 1000)
        return Bearer(USER + name, expires_ms, expires_ms + settings.leeway_s * 1000, claims)

    def _check(self, claims: Any) -> None:
        """Raises AuthenticationFailedError."""
        settings, now_s = self._settings, self._clock.now_ms() / 1000
        if not isinstance(claims, dict):
            raise AuthenticationFailedError("a token without claims")
        for name in ("exp", "nbf", "iat"):
            value = claims.get(name)
            if name == "exp" and value is None:
                raise AuthenticationFailedError("a token that never expires")
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e11
            ):
                raise AuthenticationFailedError(f"a token with a time that is none: claim={name}")
        if claims["exp"] + settings.leeway_s <= now_s:
            raise AuthenticationFailedError("a token that has expired")
        if max(claims.get("nbf", 0), claims.get("iat", 0)) - settings.leeway_s > now_s:
            raise AuthenticationFailedError("a token of the future")
        if settings.issuer and claims.get("iss") != settings.issuer:
            raise AuthenticationFailedError("a token of another issuer")
        audience = claims.get("aud")
        if settings.audience and settings.audience not in (audience if isinstance(audience, list) else [audience]):
            raise AuthenticationFailedError("a token for another audience")

    @property
    def _algorithms(self) -> list[str]:
        return _SECRET if self._settings.secret else _PUBLIC

    async def _look_again(self, error: Exception) -> bool:
        """After a token that no key fits: are there newer keys?"""
        if not self._settings.jwks_url or self._clock.monotonic_s() - self._looked_s < FETCH_AGAIN_S:
            return False
        before = self._keys
        await self._look(due_s=FETCH_AGAIN_S)
        return self._keys is not before

    async def _look(self, due_s: float = FETCH_EVERY_S) -> None:
        """Raises UnavailableError while no key was ever read, InvalidError at a file that holds none."""
        settings = self._settings
        async with self._one:
            if settings.secret:
                self._keys = self._keys or _secret(settings.secret)
                return
            if settings.jwks_file:
                await asyncio.to_thread(self._read_file, Path(settings.jwks_file))
                return
            if self._clock.monotonic_s() - self._looked_s >= due_s:
                self._looked_s = self._clock.monotonic_s()
                try:
                    self._keys = _key_set(await asyncio.to_thread(_fetched, settings.jwks_url))
                except (OSError, ValueError, InvalidError) as error:
                    log.warning("access.keys_not_fetched", url=settings.jwks_url, error=str(error))
                    self._looked_s += FETCH_AGAIN_S - due_s  # asked again that much sooner
            if self._keys is None:
                raise UnavailableError(f"the keys of tokens cannot be read: url={settings.jwks_url}.")

    def _read_file(self, path: Path) -> None:
        """Anew when the file changed; one that cannot be read leaves the keys that there were."""
        try:
            found = path.stat()
            if (found.st_mtime_ns, found.st_size) == self._seen:
                return
            self._keys = _key_set(path.read_bytes())
            self._seen = (found.st_mtime_ns, found.st_size)
        except (OSError, InvalidError) as error:
            if self._keys is None:
                raise InvalidError(
                    f"the keys of tokens cannot be read: security.oauth.jwks_file={path} error={error}.",
                    fix="Name a readable JWKS file.",
                ) from error
            log.warning("access.keys_not_read", path=str(path), error=str(error))


def _is_safe(scheme: str, host: str | None) -> bool:
    return scheme == "https" or (scheme == "http" and host in ("127.0.0.1", "::1", "localhost"))


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect leads to where keys may be fetched from, or nowhere."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        to = urlsplit(newurl)
        if not _is_safe(to.scheme, to.hostname):
            raise urllib.error.URLError(f"a redirect to {newurl[:200]}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetched(url: str) -> bytes:
    """Raises OSError, ValueError."""
    opener = urllib.request.build_opener(_SafeRedirects)
    with opener.open(url, timeout=_FETCH_TIMEOUT_S) as answer:
        body: bytes = answer.read(_KEYS_BYTES_MAX + 1)
    if len(body) > _KEYS_BYTES_MAX:
        raise ValueError(f"more than {_KEYS_BYTES_MAX} bytes of keys")
    return body


def _key_set(body: bytes) -> Any:
    """Raises InvalidError. Keys of kinds that we do not know, and secrets, are left out."""
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet, import_key

    try:
        listed = json.loads(body)["keys"]
        keys = []
        for each in listed:
            if each.get("kty") in ("RSA", "EC", "OKP") and each.get("use", "sig") == "sig":
                keys.append(import_key(each))
    except (ValueError, KeyError, TypeError, AttributeError, JoseError) as error:
        raise InvalidError(f"not a set of keys (JWKS): error={error!r}.", fix="Name a JWKS document.") from error
    if not keys:
        raise InvalidError("a set of keys (JWKS) without a public key for signatures.", fix="Name a JWKS document.")
    return KeySet(keys)


def _secret(secret: str) -> Any:
    from joserfc.jwk import OctKey

    if len(secret.encode()) < 32:
        raise InvalidError("a secret of tokens is too short: security.oauth.secret.", fix="Use 32 bytes at least.")
    return OctKey.import_key(secret)
