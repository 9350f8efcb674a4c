"""Bearer tokens: JSON web tokens (RFC 7519), signed by a key of a JWKS file or URL, or by a shared secret.

Invariant (no algorithm confusion): the kind of configured key determines the accepted algorithms. A shared secret never
verifies a token with a public-key algorithm, nor a public key one with an HMAC algorithm. A token without `exp` is
rejected.

Keys of a URL are fetched again every FETCH_EVERY_S, and sooner when a token has an unknown key, at most every
FETCH_AGAIN_S. While the URL cannot be reached, the last fetched keys stay in use.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import structlog

from tidemill.base.clock import Clock
from tidemill.base.config.listeners import OauthSection
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.runtime.daemon_threads import call_in_daemon_thread
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


class VerifiedToken(msgspec.Struct, frozen=True):
    """Verified token. `expires_ms` is its own `exp`; it is accepted until `ends_ms`, which allows for clock
    differences. `claims`: all claims of the token."""

    principal: str
    expires_ms: int
    ends_ms: int
    claims: Mapping[str, object]


class TokenVerifier:
    def __init__(self, settings: OauthSection, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._keys: Any = None
        self._looked_s = float("-inf")
        self._seen: tuple[int, int] = (0, 0)
        self._one = asyncio.Lock()
        url = urlsplit(settings.jwks_url)
        if settings.jwks_url and not _is_safe(url.scheme, url.hostname):
            raise InvalidError(
                f"refusing to fetch token keys in clear text: security.oauth.jwks_url={settings.jwks_url}.",
                fix="Use https.",
            )

    async def start(self) -> None:
        """Read the keys of a file or the secret. Raises InvalidError."""
        if not self._settings.jwks_url:
            await self._load_keys()

    async def verify(self, token: str) -> VerifiedToken:
        """Verify a token. Raises AuthenticationFailedError; UnavailableError while no key has ever been read."""
        from joserfc import jwt
        from joserfc.errors import JoseError

        if len(token) > TOKEN_CHARS_MAX:
            raise AuthenticationFailedError("token is too long")
        await self._load_keys()
        settings = self._settings
        try:
            try:
                found = jwt.decode(token, self._keys, algorithms=self._algorithms)
            except (JoseError, ValueError) as error:
                if not await self._refetch_keys(error):
                    raise
                found = jwt.decode(token, self._keys, algorithms=self._algorithms)
            claims = found.claims
            self._check_claims(claims)
        except AuthenticationFailedError:
            raise
        except Exception as error:
            # An untrusted token may make the library fail in any way. Every failure means that the token is invalid.
            raise AuthenticationFailedError(f"invalid token: {type(error).__name__}: {error}") from error
        name = claims.get(settings.principal_claim)
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
            raise AuthenticationFailedError(f"token names no principal: claim={settings.principal_claim}")
        expires_ms = int(claims["exp"] * 1000)
        return VerifiedToken(USER + name, expires_ms, expires_ms + settings.leeway_s * 1000, claims)

    def _check_claims(self, claims: Any) -> None:
        """Raise AuthenticationFailedError if a claim is missing, malformed, expired or of another issuer or
        audience."""
        settings, now_s = self._settings, self._clock.now_ms() / 1000
        if not isinstance(claims, dict):
            raise AuthenticationFailedError("token has no claims")
        for name in ("exp", "nbf", "iat"):
            value = claims.get(name)
            if name == "exp" and value is None:
                raise AuthenticationFailedError("token has no expiry")
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e11
            ):
                raise AuthenticationFailedError(f"token claim is not a valid time: claim={name}")
        if claims["exp"] + settings.leeway_s <= now_s:
            raise AuthenticationFailedError("token has expired")
        if max(claims.get("nbf", 0), claims.get("iat", 0)) - settings.leeway_s > now_s:
            raise AuthenticationFailedError("token is not valid yet")
        if settings.issuer and claims.get("iss") != settings.issuer:
            raise AuthenticationFailedError("token is of another issuer")
        audience = claims.get("aud")
        if settings.audience and settings.audience not in (audience if isinstance(audience, list) else [audience]):
            raise AuthenticationFailedError("token is for another audience")

    @property
    def _algorithms(self) -> list[str]:
        return _SECRET if self._settings.secret else _PUBLIC

    async def _refetch_keys(self, error: Exception) -> bool:
        """Return whether a fetch, after a token that no key verifies, brought other keys."""
        if not self._settings.jwks_url or self._clock.monotonic_s() - self._looked_s < FETCH_AGAIN_S:
            return False
        before = self._keys
        await self._load_keys(due_s=FETCH_AGAIN_S)
        return self._keys is not before

    async def _load_keys(self, due_s: float = FETCH_EVERY_S) -> None:
        """Read the keys if that is due. Raises UnavailableError while none was ever read, InvalidError for a bad
        file."""
        settings = self._settings
        async with self._one:
            if settings.secret:
                self._keys = self._keys or _import_secret(settings.secret)
                return
            if settings.jwks_file:
                await asyncio.to_thread(self._read_file, Path(settings.jwks_file))
                return
            if self._clock.monotonic_s() - self._looked_s >= due_s:
                self._looked_s = self._clock.monotonic_s()
                try:
                    body = await call_in_daemon_thread(partial(_fetch, settings.jwks_url), "jwks")
                    self._keys = _parse_key_set(body)
                except (OSError, ValueError, InvalidError) as error:
                    log.warning("access.keys_not_fetched", url=settings.jwks_url, error=str(error))
                    self._looked_s += FETCH_AGAIN_S - due_s  # retry after FETCH_AGAIN_S instead of the full interval
            if self._keys is None:
                raise UnavailableError(f"cannot read the token keys: url={settings.jwks_url}.")

    def _read_file(self, path: Path) -> None:
        """Read the file if it changed. On error the previous keys stay in use.
        Raises InvalidError if there are no keys yet."""
        try:
            found = path.stat()
            if (found.st_mtime_ns, found.st_size) == self._seen:
                return
            self._keys = _parse_key_set(path.read_bytes())
            self._seen = (found.st_mtime_ns, found.st_size)
        except (OSError, InvalidError) as error:
            if self._keys is None:
                raise InvalidError(
                    f"cannot read the token keys: security.oauth.jwks_file={path} error={error}.",
                    fix="Name a readable JWKS file.",
                ) from error
            log.warning("access.keys_not_read", path=str(path), error=str(error))


def _is_safe(scheme: str, host: str | None) -> bool:
    return scheme == "https" or (scheme == "http" and host in ("127.0.0.1", "::1", "localhost"))


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Redirect handler that rejects redirects to insecure URLs."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        to = urlsplit(newurl)
        if not _is_safe(to.scheme, to.hostname):
            raise urllib.error.URLError(f"insecure redirect to {newurl[:200]}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(url: str) -> bytes:
    """Fetch a JWKS document. Raises OSError, ValueError."""
    opener = urllib.request.build_opener(_SafeRedirects)
    with opener.open(url, timeout=_FETCH_TIMEOUT_S) as answer:
        body: bytes = answer.read(_KEYS_BYTES_MAX + 1)
    if len(body) > _KEYS_BYTES_MAX:
        raise ValueError(f"key document is larger than {_KEYS_BYTES_MAX} bytes")
    return body


def _parse_key_set(body: bytes) -> Any:
    """Parse a JWKS document. Keys of unknown kinds, and secret keys, are ignored. Raises InvalidError."""
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet, import_key

    try:
        listed = json.loads(body)["keys"]
        keys = []
        for each in listed:
            if each.get("kty") in ("RSA", "EC", "OKP") and each.get("use", "sig") == "sig":
                keys.append(import_key(each))
    except (ValueError, KeyError, TypeError, AttributeError, JoseError) as error:
        raise InvalidError(f"not a JSON web key set (JWKS): error={error!r}.", fix="Name a JWKS document.") from error
    if not keys:
        raise InvalidError("the key set (JWKS) has no public signature key.", fix="Name a JWKS document.")
    return KeySet(keys)


def _import_secret(secret: str) -> Any:
    from joserfc.jwk import OctKey

    if len(secret.encode()) < 32:
        raise InvalidError("the token secret is too short: security.oauth.secret.", fix="Use at least 32 bytes.")
    return OctKey.import_key(secret)
