"""SCRAM as a server: the RFC's exchanges, an independent client (in the Kafka tests), and hostile messages."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.metastore.factory import create_metastore
from tidemill.objects.memory import MemoryObjects
from tidemill.security.sasl import Authenticator
from tidemill.security.scram import (
    ITERATIONS_MIN,
    NAMES,
    SALT_BYTES,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    AuthenticationFailedError,
    Credential,
    CredentialForm,
    ScramServer,
    decoy_credential,
    derive_credential,
    form_of,
    matches_password,
)
from tidemill.security.users import ANY_MECHANISM, Users

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
        decoy_credential("nobody", SCRAM_SHA_512, b"secret", ()),
        decoy_credential("nobody", SCRAM_SHA_512, b"secret", ()),
    )
    real = derive_credential("u", SCRAM_SHA_512, "p", first.salt)
    assert first == again != decoy_credential("nobody", SCRAM_SHA_512, b"other", ())
    assert first.salt != decoy_credential("nobody", SCRAM_SHA_256, b"secret", ()).salt, "as of a user"
    assert (len(first.salt), first.iterations) == (len(real.salt), real.iterations)
    assert len(first.stored_key) == len(real.stored_key)
    assert not matches_password(first, "")


async def test_decoys_are_those_of_every_node_and_have_the_forms_of_stored_credentials() -> None:
    clock, state, objects = SystemClock(), MemoryState(), MemoryObjects(SystemClock())
    consensus = [MemoryConsensus(clock, state) for _ in range(2)]
    metastores = [create_metastore(each, objects, clock, Rand(), holder=f"n{i}") for i, each in enumerate(consensus)]
    first, second = (Users(each, clock) for each in metastores)
    try:
        names = [f"user-{i}" for i in range(64)]
        before = [await first.decoy(name, SCRAM_SHA_512) for name in names]
        assert before == [await second.decoy(name, SCRAM_SHA_512) for name in names]
        assert {(len(each.salt), each.iterations) for each in before} == {(SALT_BYTES, ITERATIONS_MIN)}
        assert len({each.salt for each in before}) == 64
        exchanges = [Authenticator(users, Rand()).start_exchange("SCRAM-SHA-512", "h") for users in (first, second)]
        challenges = [(await each.step(b"n,,n=nobody,r=x")).reply.split(b",", 1)[1] for each in exchanges]
        assert challenges[0] == challenges[1], "salt and iterations"
        for user, mechanism, salt, iterations in (
            ("a", SCRAM_SHA_512, b"\x00" * 64, 8_192),
            ("b", SCRAM_SHA_256, b"1ru4zzt" * 4, 4_097),
            ("b", SCRAM_SHA_512, b"1ru4zzt" * 4, 16_384),
            ("c", SCRAM_SHA_256, b"\x00" * 9, 5_000),
        ):
            await first.put(derive_credential(user, mechanism, "p", salt, iterations))

        async def forms(mechanism: int) -> set[CredentialForm]:
            decoys = [await first.decoy(name, mechanism) for name in names]
            return {form_of(each.mechanism, each.salt, each.iterations) for each in decoys}

        a, b = CredentialForm(SCRAM_SHA_512, 64, 8_192), CredentialForm(SCRAM_SHA_512, 28, 16_384, is_text=True)
        c = CredentialForm(SCRAM_SHA_256, 9, 5_000)
        assert await forms(SCRAM_SHA_512) == {a, b}
        assert await forms(SCRAM_SHA_256) == {c, CredentialForm(SCRAM_SHA_256, 28, 4_097, is_text=True)}
        assert await forms(ANY_MECHANISM) == {a, b, c}, "a password is checked against one credential of each user"
    finally:
        for each in (*metastores, *consensus):
            await each.aclose()


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
    server.server_first(decoy_credential(user, SCRAM_SHA_256, b"s", ()))
    with pytest.raises(AuthenticationFailedError):
        server.server_final(final)
