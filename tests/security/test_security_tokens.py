"""Bearer tokens: accepted and rejected ones, and the sources of their keys."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Coroutine
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OctKey, RSAKey

from tidemill.base.clock import ManualClock
from tidemill.base.config.listeners import OauthSection
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.security.oauth_tokens import FETCH_AGAIN_S, FETCH_EVERY_S, TokenVerifier, VerifiedToken
from tidemill.security.scram import AuthenticationFailedError

SECRET = "a secret of thirty-two bytes or more"
NOW_S = 1_700_000_000
EC = ECKey.generate_key("P-256", {"kid": "one"})
OTHER = ECKey.generate_key("P-256", {"kid": "two"})
RSA = RSAKey.generate_key(2048, {"kid": "rsa"})


def run(work: Coroutine[Any, Any, VerifiedToken]) -> VerifiedToken:
    return asyncio.run(work)


def clock() -> ManualClock:
    return ManualClock(NOW_S * 1000)


def claims(**more: Any) -> dict[str, Any]:
    return {"sub": "alice", "exp": NOW_S + 60, **more}


def signed(key: Any, algorithm: str, body: dict[str, Any], **header: Any) -> str:
    return str(jwt.encode({"alg": algorithm, "kid": key.kid, **header}, body, key, algorithms=[algorithm]))


def jwks(*keys: Any) -> bytes:
    return json.dumps(KeySet(list(keys)).as_dict(private=False)).encode()


@pytest.fixture
def tokens(tmp_path: Path) -> TokenVerifier:
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(EC, RSA))
    return TokenVerifier(OauthSection(jwks_file=str(path), issuer="us", audience="kafka"), clock())


GOOD = claims(iss="us", aud=["x", "kafka"])


@pytest.mark.parametrize(("key", "algorithm"), [(EC, "ES256"), (RSA, "RS256"), (RSA, "PS512")])
def test_a_token_of_a_known_key_says_who_and_until_when(tokens: TokenVerifier, key: Any, algorithm: str) -> None:
    expires_ms = (NOW_S + 60) * 1000
    found = run(tokens.verify(signed(key, algorithm, GOOD)))
    assert found == VerifiedToken("User:alice", expires_ms, expires_ms + 30_000, GOOD)


@pytest.mark.parametrize(
    "body",
    [
        {"sub": "alice", "iss": "us", "aud": "kafka"},
        {**GOOD, "exp": NOW_S - 31},
        {**GOOD, "exp": float("inf")},
        {**GOOD, "exp": float("nan")},
        {**GOOD, "exp": str(NOW_S + 60)},
        {**GOOD, "exp": True},
        {**GOOD, "nbf": NOW_S + 31},
        {**GOOD, "iat": NOW_S + 31},
        {**GOOD, "iss": "them"},
        {**GOOD, "aud": "postgres"},
        {**GOOD, "aud": None},
        {**GOOD, "sub": ""},
        {**GOOD, "sub": 7},
        {**GOOD, "sub": "x" * 300},
        {key: value for key, value in GOOD.items() if key != "sub"},
    ],
)
def test_a_token_with_claims_that_do_not_count_is_refused(tokens: TokenVerifier, body: dict[str, Any]) -> None:
    parts = signed(EC, "ES256", GOOD).split(".")
    assert len(parts) == 3
    with pytest.raises(AuthenticationFailedError):
        run(tokens.verify(_signed_raw(body)))


def _signed_raw(body: dict[str, Any]) -> str:
    """Return a correctly signed token with arbitrary claims: client libraries refuse to write some of them."""
    from joserfc import jws

    return str(
        jws.serialize_compact({"alg": "ES256", "kid": "one"}, json.dumps(body).encode(), EC, algorithms=["ES256"])
    )


def test_a_token_of_a_strange_key_or_without_signature_is_refused(tokens: TokenVerifier) -> None:
    def b64(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    public = base64.urlsafe_b64encode(json.dumps(EC.as_dict(private=False)).encode()).decode()
    confused = OctKey.import_key(public, {"kid": "one"})
    good = signed(EC, "ES256", GOOD)
    for token in (
        signed(OTHER, "ES256", GOOD),
        signed(confused, "HS256", GOOD),
        f"{b64({'alg': 'none'})}.{b64(GOOD)}.",
        f"{b64({'alg': 'ES256', 'kid': 'one', 'jwk': OTHER.as_dict(private=False)})}.{b64(GOOD)}.{good.split('.')[2]}",
        good[:-4] + "AAAA",
        good.split(".")[0] + "." + b64({**GOOD, "sub": "root"}) + "." + good.split(".")[2],
        "",
        "a.b.c",
        "x" * 20_000,
    ):
        with pytest.raises(AuthenticationFailedError):
            run(tokens.verify(token))


def test_a_secret_verifies_only_what_is_signed_by_secrets() -> None:
    tokens = TokenVerifier(OauthSection(secret=SECRET), clock())
    key = OctKey.import_key(SECRET)
    assert run(tokens.verify(str(jwt.encode({"alg": "HS256"}, claims(), key)))).principal == "User:alice"
    with pytest.raises(AuthenticationFailedError):
        run(tokens.verify(signed(EC, "ES256", claims())))
    with pytest.raises(InvalidError, match="32 bytes"):
        asyncio.run(TokenVerifier(OauthSection(secret="short"), clock()).start())


def test_a_file_is_read_again_when_it_changes_and_kept_when_it_breaks(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(InvalidError, match="jwks_file"):
        asyncio.run(TokenVerifier(OauthSection(jwks_file=str(path)), clock()).start())
    path.write_bytes(jwks(EC))
    tokens = TokenVerifier(OauthSection(jwks_file=str(path)), clock())

    async def scenario() -> None:
        await tokens.start()
        await tokens.verify(signed(EC, "ES256", claims()))
        path.write_bytes(jwks(OTHER, RSA))
        await tokens.verify(signed(OTHER, "ES256", claims()))
        with pytest.raises(AuthenticationFailedError):
            await tokens.verify(signed(EC, "ES256", claims()))
        path.write_text("{}")
        await tokens.verify(signed(OTHER, "ES256", claims()))

    asyncio.run(scenario())


def test_keys_of_a_url_are_fetched_seldom_and_outlive_the_server() -> None:
    asked: list[str] = []
    keys = [EC]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(jwks(*keys))

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    time = clock()
    tokens = TokenVerifier(OauthSection(jwks_url=f"http://127.0.0.1:{server.server_port}/keys", leeway_s=3_600), time)
    token, newer = signed(EC, "ES256", claims()), signed(OTHER, "ES256", claims())

    async def scenario() -> None:
        for _ in range(5):
            await tokens.verify(token)
        assert len(asked) == 1
        keys.append(OTHER)
        with pytest.raises(AuthenticationFailedError):
            await tokens.verify(newer)
        assert len(asked) == 1, "a token that nobody knows does not make us ask at once again"
        time.advance(int(FETCH_AGAIN_S * 1000) + 1)
        await tokens.verify(newer)
        assert len(asked) == 2
        server.shutdown()
        server.server_close()
        time.advance(int(FETCH_EVERY_S * 1000) + 1)
        await tokens.verify(token)

    asyncio.run(scenario())
    thread.join(10)
    with pytest.raises(UnavailableError):
        run(TokenVerifier(OauthSection(jwks_url=f"http://127.0.0.1:{server.server_port}/keys"), clock()).verify(token))
    with pytest.raises(InvalidError, match="https"):
        TokenVerifier(OauthSection(jwks_url="http://keys.example/jwks"), clock())


SHARED = TokenVerifier(OauthSection(secret=SECRET), ManualClock(NOW_S * 1000))


@given(
    st.text(max_size=100)
    | st.lists(st.binary(max_size=30), min_size=3, max_size=3).map(
        lambda parts: ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
    )
)
def test_any_text_is_refused(token: str) -> None:
    with pytest.raises(AuthenticationFailedError):
        asyncio.run(SHARED.verify(token))
