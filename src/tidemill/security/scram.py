"""Server side of SCRAM (RFC 5802, RFC 7677), without channel binding. Pure: the nonce is passed in.

    client first    gs2 header "n,," or "y,,", perhaps with a=NAME · n=NAME · r=NONCE [· extensions]
    server first    r=NONCE+ours · s=salt, base64 · i=iterations
    client final    c=gs2 header, base64 · r=the whole nonce [· extensions] · p=proof, base64
    server final    v=signature, base64

Credentials are stored as in Kafka: salt, iterations and the two derived keys, from which the password cannot be
recovered. Passwords and names are their UTF-8 bytes (like Kafka, this does not apply SASLprep, RFC 4013).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
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
"""Size of a salted password in bytes."""
_TEXT: Final = b"0123456789abcdefghijklmnopqrstuvwxyz"
_HASHES: Final = {SCRAM_SHA_256: "sha256", SCRAM_SHA_512: "sha512"}


class AuthenticationFailedError(InvalidError):
    """The client failed to authenticate. `reason` is for the log, never for the client."""

    def __init__(self, reason: str, user: str = "") -> None:
        super().__init__(reason)
        self.user = user


class Credential(msgspec.Struct, frozen=True):
    """SCRAM credential of one user for one mechanism."""

    user: str
    mechanism: int
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


def derive_salted_password(mechanism: int, password: str, salt: bytes, iterations: int) -> bytes:
    """Return Hi() of RFC 5802. Takes some milliseconds: run it in a thread."""
    return hashlib.pbkdf2_hmac(_HASHES[mechanism], password.encode(), salt, iterations)


def credential_of(user: str, mechanism: int, salted_password: bytes, salt: bytes, iterations: int) -> Credential:
    name = _HASHES[mechanism]
    client_key = hmac.digest(salted_password, b"Client Key", name)
    stored_key = hashlib.new(name, client_key).digest()
    return Credential(user, mechanism, salt, stored_key, hmac.digest(salted_password, b"Server Key", name), iterations)


def derive_credential(
    user: str, mechanism: int, password: str, salt: bytes, iterations: int = ITERATIONS_MIN
) -> Credential:
    """Derive the credential of a password. Takes some milliseconds: run it in a thread."""
    return credential_of(
        user, mechanism, derive_salted_password(mechanism, password, salt, iterations), salt, iterations
    )


def matches_password(found: Credential, password: str) -> bool:
    """Return whether the password matches the credential. Takes some milliseconds: run it in a thread."""
    given = derive_credential(found.user, found.mechanism, password, found.salt, found.iterations)
    return hmac.compare_digest(given.stored_key, found.stored_key)


class CredentialForm(NamedTuple):
    """Properties of a credential that a client sees or measures. The bytes of its salt do not belong to them.

    `is_text`: the salt consists of letters and digits, like the salts of Java's tools.
    """

    mechanism: int
    salt_bytes: int = SALT_BYTES
    iterations: int = ITERATIONS_MIN
    is_text: bool = False


def form_of(mechanism: int, salt: bytes, iterations: int) -> CredentialForm:
    return CredentialForm(mechanism, len(salt), iterations, salt.isalnum())


def decoy_credential(user: str, mechanism: int, secret: bytes, forms: Sequence[CredentialForm]) -> Credential:
    """Return a credential that no password matches, always the same for a name and a secret, so that a client cannot
    learn whether the user exists.

    It has one of `forms`: those of the stored credentials in order, so that decoys have them as often as users, and few
    decoys change with a stored credential. Without forms it is one of `mechanism`.
    """
    seed = hmac.digest(secret, bytes([mechanism]) + user.encode(), "sha512")
    form = forms[int.from_bytes(seed[:8]) * len(forms) >> 64] if forms else CredentialForm(mechanism or SCRAM_SHA_512)
    salt = hashlib.shake_256(b"salt" + seed).digest(form.salt_bytes)
    if form.is_text:
        salt = bytes(_TEXT[each % len(_TEXT)] for each in salt)
    size = SIZES[form.mechanism]
    stored_key = hashlib.shake_256(b"key" + seed).digest(size)
    return Credential(user, form.mechanism, salt, stored_key, bytes(size), form.iterations)


class _ClientFirst(NamedTuple):
    header: str
    bare: str
    user: str
    nonce: str


class ScramServer:
    """Server side of one exchange: `read_client_first`, then `server_first`, then `server_final`. Each raises
    AuthenticationFailedError."""

    def __init__(self, mechanism: int, nonce: str) -> None:
        self.mechanism = mechanism
        self._nonce = nonce
        self._asked: _ClientFirst | None = None
        self._server_first = ""
        self._credential: Credential | None = None

    def read_client_first(self, message: bytes) -> str:
        """Parse the client's first message; return the user name."""
        text = _decode_text(message)
        header_flag, _, rest = text.partition(",")
        authzid, comma, bare = rest.partition(",")
        if header_flag not in ("n", "y") or not comma or (authzid and not authzid.startswith("a=")):
            raise AuthenticationFailedError("first message has no valid header or requests channel binding")
        fields = bare.split(",")
        if len(fields) < 2 or not fields[0].startswith("n=") or not fields[1].startswith("r=") or len(fields[1]) < 3:
            raise AuthenticationFailedError("first message lacks a name or a nonce")
        user = _decode_name(fields[0][2:])
        if authzid and _decode_name(authzid[2:]) != user:
            raise AuthenticationFailedError("authorization id differs from the user", user)
        self._asked = _ClientFirst(f"{header_flag},{authzid},", bare, user, fields[1][2:])
        return user

    def server_first(self, credential: Credential) -> bytes:
        assert self._asked is not None
        self._credential = credential
        salt = base64.b64encode(credential.salt).decode()
        self._server_first = f"r={self._asked.nonce}{self._nonce},s={salt},i={credential.iterations}"
        return self._server_first.encode()

    def server_final(self, message: bytes) -> bytes:
        asked, credential = self._asked, self._credential
        assert asked is not None and credential is not None
        text = _decode_text(message)
        without_proof, _, proof_text = text.rpartition(",p=")
        fields = without_proof.split(",")
        if len(fields) < 2 or not fields[0].startswith("c=") or not fields[1].startswith("r="):
            raise AuthenticationFailedError("final message lacks a field", asked.user)
        if _decode_base64(fields[0][2:], asked.user) != asked.header.encode():
            raise AuthenticationFailedError("final message has another header than the first", asked.user)
        if not hmac.compare_digest(fields[1][2:].encode(), f"{asked.nonce}{self._nonce}".encode()):
            raise AuthenticationFailedError("final message has another nonce", asked.user)
        name = _HASHES[self.mechanism]
        authenticated = f"{asked.bare},{self._server_first},{without_proof}".encode()
        signature = hmac.digest(credential.stored_key, authenticated, name)
        proof = _decode_base64(proof_text, asked.user)
        if len(proof) != len(signature):
            raise AuthenticationFailedError("proof has the wrong size", asked.user)
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        if not hmac.compare_digest(hashlib.new(name, client_key).digest(), credential.stored_key):
            raise AuthenticationFailedError("wrong password or unknown user", asked.user)
        return b"v=" + base64.b64encode(hmac.digest(credential.server_key, authenticated, name))


def _decode_text(message: bytes) -> str:
    try:
        text = message.decode()
    except UnicodeDecodeError as error:
        raise AuthenticationFailedError("message is not UTF-8") from error
    if "\x00" in text:
        raise AuthenticationFailedError("message contains a null character")
    return text


def _decode_name(text: str) -> str:
    """Decode a SCRAM name. Raises AuthenticationFailedError if `,` or `=` is not escaped as RFC 5802 requires."""
    plain = text.replace("=2C", ",").replace("=3D", "=")
    if not plain or plain.replace("=", "=3D").replace(",", "=2C") != text:
        raise AuthenticationFailedError("name is empty or not escaped as RFC 5802 requires")
    return plain


def _decode_base64(text: str, user: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise AuthenticationFailedError("field is not base64", user) from error
