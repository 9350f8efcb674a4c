"""How a listener lets connections in, and who came in through it.

    plaintext        everybody, as User:ANONYMOUS
    ssl              who completes TLS; with a certificate as what `tls.principal_rules` make of its subject
    sasl_plaintext   who proves it by one of the listener's mechanisms
    sasl_ssl         the same within TLS; the mechanism's principal counts, not the certificate's

G1  Until a connection is known, its frames are small, its time is short, and it asks for OPEN_APIS only.
G2  Who proves anew (KIP-368) must be whom the connection was before, by the same mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidemill.kafka.net.tls_socket import TlsSocket
from tidemill.security.auth_throttle import Failures
from tidemill.security.principals import ANONYMOUS, PrincipalOf, principal_rules
from tidemill.security.sasl import Authenticator, Exchange
from tidemill.security.tls import Certificates, subject_of

SASL_HANDSHAKE: Final = 17
API_VERSIONS: Final = 18
SASL_AUTHENTICATE: Final = 36
OPEN_APIS: Final = frozenset({SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE})
UNKNOWN_REQUEST_BYTES: Final = 128 << 10
"""Of a request before its connection is known."""


class ConnectionRejectedError(ConnectionError):
    """A connection that is not to be: closed, and told in one line."""


class ListenerSecurity:
    """One listener's. `tls` None = in clear text; without `mechanisms` nothing is asked by SASL.

    session_lifetime_s   how long a proof by SASL holds; 0 = as long as the connection, or as the token
    """

    def __init__(
        self,
        tls: Certificates | None = None,
        principal_of: PrincipalOf | None = None,
        *,
        authenticator: Authenticator | None = None,
        mechanisms: Sequence[str] = (),
        session_lifetime_s: float = 0.0,
    ) -> None:
        self.tls = tls
        self.principal_of = principal_of or principal_rules(["DEFAULT"])
        self.authenticator = authenticator
        self.mechanisms = tuple(mechanisms)
        self.session_lifetime_s = session_lifetime_s
        self.failures = Failures()

    @property
    def protocol(self) -> str:
        """As Kafka names it."""
        within = "SSL" if self.tls is not None else "PLAINTEXT"
        return f"SASL_{within}" if self.mechanisms else within

    def visitor(self, host: str) -> ClientIdentity:
        return ClientIdentity(self, host, known=self.tls is None and not self.mechanisms)

    def secured(self, visitor: ClientIdentity, sock: TlsSocket) -> None:
        """The handshake of `visitor` has ended. Raises ConnectionRejectedError for a certificate that no rule names."""
        certificate = sock.certificate()
        if certificate is not None and not self.mechanisms:
            name = subject_of(certificate)
            principal = self.principal_of(name)
            if principal is None:
                raise ConnectionRejectedError(
                    f"no rule of tls.principal_rules names the client's certificate: subject={name!r}"
                )
            visitor.principal = principal
        visitor.known = not self.mechanisms


class ClientIdentity:
    """Who is at the other end of one connection. `known`: it may ask for anything that exists.

    mechanism   what SaslHandshake chose last; `proved_by` what it was known by
    exchange    under way, if any
    raw         after SaslHandshake version 0 messages come in frames of their own, without a header (KIP-152)
    expires_s   by the monotonic clock, when its proof ends; 0 = never
    rejected    why it is to be closed once its answer is sent; "" = that is told already; None = it is not
    """

    __slots__ = (
        "exchange",
        "expires_s",
        "gate",
        "host",
        "known",
        "mechanism",
        "principal",
        "proved_by",
        "raw",
        "rejected",
    )

    def __init__(self, gate: ListenerSecurity, host: str, *, known: bool) -> None:
        self.gate = gate
        self.host = host
        self.known = known
        self.principal = ANONYMOUS
        self.mechanism = ""
        self.proved_by = ""
        self.exchange: Exchange | None = None
        self.raw = False
        self.expires_s = 0.0
        self.rejected: str | None = None

    def forbids(self, key: int, now_s: float) -> str:
        """Why a request of this API is not even looked at now, or ""."""
        if key in OPEN_APIS:
            return ""
        if not self.known:
            return f"a request before authentication: key={key}."
        if self.expires_s and now_s >= self.expires_s:
            return "a request after the proof of who this is has expired."
        return ""
