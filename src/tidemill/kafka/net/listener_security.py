"""Security of a listener, and the identity of a client that connects through it.

    plaintext        every client, as User:ANONYMOUS
    ssl              clients that complete TLS; with a certificate, as the principal by `principals.principal_rules`
    sasl_plaintext   clients that authenticate by one of the listener's mechanisms
    sasl_ssl         the same within TLS; the principal is the mechanism's, not the certificate's

Invariant (little before authentication): until a connection is authenticated, its frames are small, its time is short,
and it may only call OPEN_APIS.

Invariant (stable principal): re-authentication (KIP-368) must yield the same principal, by the same mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidemill.kafka.net.tls_socket import TlsSocket
from tidemill.security.principals import ANONYMOUS, PrincipalOf, principal_rules
from tidemill.security.sasl import Authenticator, AuthFailureThrottle, SaslExchange
from tidemill.security.tls import ServerCertificates, subject_of

SASL_HANDSHAKE: Final = 17
API_VERSIONS: Final = 18
SASL_AUTHENTICATE: Final = 36
OPEN_APIS: Final = frozenset({SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE})
UNAUTHENTICATED_REQUEST_BYTES: Final = 128 << 10
"""Largest request of a connection that is not authenticated yet."""


class ConnectionRejectedError(ConnectionError):
    """A connection that must not continue: it is closed, with one log line."""


class ListenerSecurity:
    """Security of one listener. `tls` None means clear text; without `mechanisms` no SASL is required.

    session_lifetime_s   how long a SASL authentication is valid; 0 = as long as the connection, or as the token
    """

    def __init__(
        self,
        tls: ServerCertificates | None = None,
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
        self.failures = AuthFailureThrottle()

    @property
    def protocol(self) -> str:
        """Name of the security protocol in Kafka's terms."""
        within = "SSL" if self.tls is not None else "PLAINTEXT"
        return f"SASL_{within}" if self.mechanisms else within

    def identify(self, host: str) -> ClientIdentity:
        return ClientIdentity(self, host, known=self.tls is None and not self.mechanisms)

    def set_certificate_principal(self, visitor: ClientIdentity, sock: TlsSocket) -> None:
        """Set the principal after the TLS handshake of `identify`.

        Raises ConnectionRejectedError if no rule names the certificate's subject.
        """
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
    """Identity of the client of one connection. `known`: it is authenticated and may call every API.

    mechanism   chosen by the last SaslHandshake; `proved_by` is the mechanism that authenticated the client
    exchange    the running SASL exchange, if any
    raw         after SaslHandshake version 0 each message is a frame without a header (KIP-152)
    expires_s   monotonic time at which the authentication expires; 0 = never
    rejected    why to close the connection after its answer is sent; "" = already logged; None = do not close
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
        self.exchange: SaslExchange | None = None
        self.raw = False
        self.expires_s = 0.0
        self.rejected: str | None = None

    def rejection_reason(self, key: int, now_s: float) -> str:
        """Return why a request of this API must not be read now, or ""."""
        if key in OPEN_APIS:
            return ""
        if not self.known:
            return f"request before authentication: key={key}."
        if self.expires_s and now_s >= self.expires_s:
            return "request after the authentication expired."
        return ""
