"""SCRAM as a server: the RFC's exchanges, an independent client (in the Kafka tests), and hostile messages."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.security.scram import (
    NAMES,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    AuthenticationFailedError,
    Credential,
    ScramServer,
    decoy_credential,
    derive_credential,
    matches_password,
)

RFC_SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
RFC_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
RFC_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
RFC_FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)


def client_final(credential: Credential, password: str, first: bytes, challenge: bytes) -> bytes:
    """Return the final message of an honest client, derived from the RFC independently of the server's code."""
    name = "sha256" if credential.mechanism == SCRAM_SHA_256 else "sha512"
    header, _, bare = first.decode().partition(",,")
    fields = dict(part.split("=", 1) for part in challenge.decode().split(","))
    salted = hashlib.pbkdf2_hmac(name, password.encode(), base64.b64decode(fields["s"]), int(fields["i"]))
    client_key = hmac.new(salted, b"Client Key", name).digest()
    without = f"c={base64.b64encode((header + ',,').encode()).decode()},r={fields['r']}"
    signed = ",".join([bare, challenge.decode(), without]).encode()
    signature = hmac.new(hashlib.new(name, client_key).digest(), signed, name).digest()
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    return f"{without},p={base64.b64encode(proof).decode()}".encode()


def test_the_exchange_of_rfc_7677() -> None:
    credential = derive_credential("user", SCRAM_SHA_256, "pencil", RFC_SALT)
    server = ScramServer(SCRAM_SHA_256, RFC_NONCE)
    assert server.read_client_first(RFC_FIRST) == "user"
    challenge = server.server_first(credential)
    assert challenge == f"r=rOprNGfwEbeRWgbNEkqO{RFC_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode()
    assert client_final(credential, "pencil", RFC_FIRST, challenge) == RFC_FINAL
    assert server.server_final(RFC_FINAL) == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


@pytest.mark.parametrize("mechanism", list(NAMES))
@pytest.mark.parametrize("user", ["u", "a,b=c", "naïve", "=2C"])
def test_only_the_right_password_gets_in(mechanism: int, user: str) -> None:
    credential = derive_credential(user, mechanism, "pässword", b"salt" * 6)
    spelt = user.replace("=", "=3D").replace(",", "=2C")
    for password, right in (("pässword", True), ("password", False), ("", False)):
        server = ScramServer(mechanism, "ours")
        first = f"n,,n={spelt},r=theirs,ext=1".encode()
        assert server.read_client_first(first) == user
        challenge = server.server_first(credential)
        final = client_final(credential, password, first, challenge)
        if right:
            assert server.server_final(final).startswith(b"v=")
        else:
            with pytest.raises(AuthenticationFailedError):
                server.server_final(final)
        assert matches_password(credential, password) == right


def test_a_decoy_fits_no_password_and_looks_like_a_user_every_time() -> None:
    first, again = (
        decoy_credential("nobody", SCRAM_SHA_512, b"secret"),
        decoy_credential("nobody", SCRAM_SHA_512, b"secret"),
    )
    real = derive_credential("u", SCRAM_SHA_512, "p", first.salt)
    assert first == again != decoy_credential("nobody", SCRAM_SHA_512, b"other")
    assert (len(first.salt), first.iterations) == (len(real.salt), real.iterations)
    assert len(first.stored_key) == len(real.stored_key)
    assert not matches_password(first, "")


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n",
        b"n,,",
        b"n,,n=user",
        b"n,,n=,r=x",
        b"n,,n=user,r=",
        b"p=tls-unique,,n=user,r=x",
        b"n,a=other,n=user,r=x",
        b"n,b=user,n=user,r=x",
        b"n,,m=ext,n=user,r=x",
        b"n,,n=us=er,r=x",
        b"n,,n=us=2cer,r=x",
        b"n,,n=\xff,r=x",
        b"n,,n=a\x00b,r=x",
    ],
)
def test_a_first_message_that_is_none_is_refused(first: bytes) -> None:
    with pytest.raises(AuthenticationFailedError):
        ScramServer(SCRAM_SHA_256, "n").read_client_first(first)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"c=biws", b"c=eSws"),
        (b"c=biws", b"c=biws="),
        (b"c=biws,", b""),
        (b"r=rOpr", b"r=xOpr"),
        (b"p=dHzb", b"p=AAAA"),
        (b"p=dHzbZ", b"p="),
        (b",p=", b",q="),
        (b"hNlF$k0", b"hNlF$k"),
    ],
)
def test_a_final_message_that_was_changed_is_refused(old: bytes, new: bytes) -> None:
    server = ScramServer(SCRAM_SHA_256, RFC_NONCE)
    server.read_client_first(RFC_FIRST)
    server.server_first(derive_credential("user", SCRAM_SHA_256, "pencil", RFC_SALT))
    assert old in RFC_FINAL
    with pytest.raises(AuthenticationFailedError):
        server.server_final(RFC_FINAL.replace(old, new))


MESSAGE = st.one_of(
    st.binary(max_size=200),
    st.lists(
        st.sampled_from([b"n", b"y", b",", b"n=", b"r=", b"a=", b"c=", b"p=", b"biws", b"user", b"=", b"\x00"])
    ).map(b"".join),
)


@given(MESSAGE, MESSAGE)
def test_whatever_arrives_is_refused_or_goes_on(first: bytes, final: bytes) -> None:
    server = ScramServer(SCRAM_SHA_256, "nonce")
    try:
        user = server.read_client_first(first)
    except AuthenticationFailedError:
        return
    assert user
    server.server_first(decoy_credential(user, SCRAM_SHA_256, b"s"))
    with pytest.raises(AuthenticationFailedError):
        server.server_final(final)
