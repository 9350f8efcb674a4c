"""SCRAM of RFC 5802 and 7677 as a server speaks it, without channel binding. Pure: the nonce is passed in.

    client first    gs2 header "n,," or "y,,", perhaps with a=NAME · n=NAME · r=NONCE [· extensions]
    server first    r=NONCE+ours · s=salt, base64 · i=iterations
    client final    c=gs2 header, base64 · r=the whole nonce [· extensions] · p=proof, base64
    server final    v=signature, base64

What is stored is Kafka's: salt, iterations and the two keys, of which no password follows. Passwords and names are
their UTF-8 bytes (Kafka does not prepare them as RFC 4013 says).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final, NamedTuple

import msgspec

from tidemill.base.errors import InvalidError

SCRAM_SHA_256: Final = 1
SCRAM_SHA_512: Final = 2
"""Kafka's numbers (KIP-554)."""
NAMES: Final = {SCRAM_SHA_256: "SCRAM-SHA-256", SCRAM_SHA_512: "SCRAM-SHA-512"}
ITERATIONS_MIN: Final = 4_096
ITERATIONS_MAX: Final = 16_384
SALT_BYTES: Final = 24
SIZES: Final = {SCRAM_SHA_256: 32, SCRAM_SHA_512: 64}
"""Bytes of a salted password."""
_HASHES: Final = {SCRAM_SHA_256: "sha256", SCRAM_SHA_512: "sha512"}


class AuthenticationFailedError(InvalidError):
    """The client did not prove who it is. `reason` is for the log, never for the client."""

    def __init__(self, reason: str, user: str = "") -> None:
        super().__init__(reason)
        self.user = user


class Credential(msgspec.Struct, frozen=True):
    """One user's, of one mechanism."""

    user: str
    mechanism: int
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


def salted(mechanism: int, password: str, salt: bytes, iterations: int) -> bytes:
    """Hi() of the RFC. Some milliseconds: for a thread."""
    return hashlib.pbkdf2_hmac(_HASHES[mechanism], password.encode(), salt, iterations)


def credential_of(user: str, mechanism: int, salted_password: bytes, salt: bytes, iterations: int) -> Credential:
    name = _HASHES[mechanism]
    client_key = hmac.digest(salted_password, b"Client Key", name)
    stored_key = hashlib.new(name, client_key).digest()
    return Credential(user, mechanism, salt, stored_key, hmac.digest(salted_password, b"Server Key", name), iterations)


def made_of(user: str, mechanism: int, password: str, salt: bytes, iterations: int = ITERATIONS_MIN) -> Credential:
    """Some milliseconds: for a thread."""
    return credential_of(user, mechanism, salted(mechanism, password, salt, iterations), salt, iterations)


def is_password(found: Credential, password: str) -> bool:
    """Some milliseconds: for a thread."""
    given = made_of(found.user, found.mechanism, password, found.salt, found.iterations)
    return hmac.compare_digest(given.stored_key, found.stored_key)


def decoy(user: str, mechanism: int, secret: bytes) -> Credential:
    """What nobody's password fits, the same for a name every time: who asks learns not whether the user exists."""
    salt = hmac.digest(secret, user.encode(), "sha512")[:SALT_BYTES]
    size = SIZES[mechanism]
    return Credential(user, mechanism, salt, hmac.digest(secret, salt, "sha512")[:size], bytes(size), ITERATIONS_MIN)


class _Asked(NamedTuple):
    header: str
    bare: str
    user: str
    nonce: str


class ScramServer:
    """One exchange: `first`, then `challenge`, then `final`. Each raises AuthenticationFailedError."""

    def __init__(self, mechanism: int, nonce: str) -> None:
        self.mechanism = mechanism
        self._nonce = nonce
        self._asked: _Asked | None = None
        self._server_first = ""
        self._credential: Credential | None = None

    def first(self, message: bytes) -> str:
        """The name of who wants in."""
        text = _text(message)
        header_flag, _, rest = text.partition(",")
        authzid, comma, bare = rest.partition(",")
        if header_flag not in ("n", "y") or not comma or (authzid and not authzid.startswith("a=")):
            raise AuthenticationFailedError("a first message without its header, or one that asks for channel binding")
        fields = bare.split(",")
        if len(fields) < 2 or not fields[0].startswith("n=") or not fields[1].startswith("r=") or len(fields[1]) < 3:
            raise AuthenticationFailedError("a first message without name and nonce")
        user = _name(fields[0][2:])
        if authzid and _name(authzid[2:]) != user:
            raise AuthenticationFailedError("it asks to act as somebody else", user)
        self._asked = _Asked(f"{header_flag},{authzid},", bare, user, fields[1][2:])
        return user

    def challenge(self, credential: Credential) -> bytes:
        assert self._asked is not None
        self._credential = credential
        salt = base64.b64encode(credential.salt).decode()
        self._server_first = f"r={self._asked.nonce}{self._nonce},s={salt},i={credential.iterations}"
        return self._server_first.encode()

    def final(self, message: bytes) -> bytes:
        asked, credential = self._asked, self._credential
        assert asked is not None and credential is not None
        text = _text(message)
        without_proof, _, proof_text = text.rpartition(",p=")
        fields = without_proof.split(",")
        if len(fields) < 2 or not fields[0].startswith("c=") or not fields[1].startswith("r="):
            raise AuthenticationFailedError("a final message without its fields", asked.user)
        if _base64(fields[0][2:], asked.user) != asked.header.encode():
            raise AuthenticationFailedError("the final message has another header than the first", asked.user)
        if not hmac.compare_digest(fields[1][2:].encode(), f"{asked.nonce}{self._nonce}".encode()):
            raise AuthenticationFailedError("the final message has another nonce", asked.user)
        name = _HASHES[self.mechanism]
        authenticated = f"{asked.bare},{self._server_first},{without_proof}".encode()
        signature = hmac.digest(credential.stored_key, authenticated, name)
        proof = _base64(proof_text, asked.user)
        if len(proof) != len(signature):
            raise AuthenticationFailedError("a proof of another size", asked.user)
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        if not hmac.compare_digest(hashlib.new(name, client_key).digest(), credential.stored_key):
            raise AuthenticationFailedError("wrong password, or no such user", asked.user)
        return b"v=" + base64.b64encode(hmac.digest(credential.server_key, authenticated, name))


def _text(message: bytes) -> str:
    try:
        text = message.decode()
    except UnicodeDecodeError as error:
        raise AuthenticationFailedError("a message that is not UTF-8") from error
    if "\x00" in text:
        raise AuthenticationFailedError("a message with a null character")
    return text


def _name(text: str) -> str:
    """Raises AuthenticationFailedError for one in which `,` or `=` is not written as the RFC says."""
    plain = text.replace("=2C", ",").replace("=3D", "=")
    if not plain or plain.replace("=", "=3D").replace(",", "=2C") != text:
        raise AuthenticationFailedError("a name that is empty or not written as RFC 5802 says")
    return plain


def _base64(text: str, user: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise AuthenticationFailedError("a field that is not base64", user) from error
