"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from joserfc import jwt
from joserfc.jwk import OctKey

from support.kafka.harness import FakeBroker, RealBroker
from support.kafka.raw import RawClient, code
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.listeners import OauthSection, TlsSection
from tidemill.kafka.net.listener_security import ListenerSecurity
from tidemill.security.acls import AclRule, Operation, Pattern, Permission, Resource
from tidemill.security.oauth_tokens import TokenVerifier
from tidemill.security.principals import principal_rules
from tidemill.security.sasl import MECHANISMS, Authenticator
from tidemill.security.scram import NAMES, derive_credential
from tidemill.security.tls import ServerCertificates
from tidemill.security.users import Users

DAY = datetime.timedelta(days=1)


class Authority:
    def __init__(self, directory: Path, name: str = "Test CA") -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(
            self._name, self._key.public_key(), 1, x509.BasicConstraints(ca=True, path_length=None)
        )
        self.certificate = directory / "ca.pem"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(
        self, name: x509.Name, key: ec.EllipticCurvePublicKey, days: int, *extensions: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + days * DAY)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self._key, hashes.SHA256())

    def issue(
        self, label: str, subject: list[tuple[x509.ObjectIdentifier, str]], *, days: int = 1, host: str = ""
    ) -> tuple[str, str]:
        """Paths of certificate and key, for 127.0.0.1 and localhost as well, or for this host alone."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(kind, value) for kind, value in subject])
        local = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        hosts = x509.SubjectAlternativeName([x509.DNSName(host)] if host else local)
        certificate = self._sign(name, key.public_key(), days, hosts)
        paths = self._directory / f"{label}.pem", self._directory / f"{label}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return str(paths[0]), str(paths[1])

    def server(self, label: str = "server", host: str = "") -> tuple[str, str]:
        return self.issue(label, [(NameOID.COMMON_NAME, host or "localhost")], host=host)

    def client(self, name: str, *, days: int = 1) -> tuple[str, str]:
        subject = [
            (NameOID.COUNTRY_NAME, "DE"),
            (NameOID.ORGANIZATION_NAME, "Harbour, Ltd"),
            (NameOID.COMMON_NAME, name),
        ]
        return self.issue(name, subject, days=days)

    def tls(self, client_auth: str = "none", min_version: str = "1.2") -> TlsSection:
        ca = str(self.certificate) if client_auth != "none" else ""
        certificate, key = self.server()
        return TlsSection.model_validate(
            {"certificate": certificate, "key": key, "client_ca": ca, "client_auth": client_auth,
             "min_version": min_version}
        )  # fmt: skip

    def gate(self, client_auth: str = "none", *rules: str, min_version: str = "1.2") -> ListenerSecurity:
        return ListenerSecurity(
            ServerCertificates(self.tls(client_auth, min_version)), principal_rules(rules or ("DEFAULT",))
        )


def trusting(authority: Authority, certificate: tuple[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


SECRET = "a secret of thirty-two bytes or more"

PASSWORD = "s3cret, with = and ,"


def token(user: str, lives_s: float = 3600.0) -> str:
    claims = {"sub": user, "exp": int(time.time() + lives_s)}
    return str(jwt.encode({"alg": "HS256"}, claims, OctKey.import_key(SECRET)))


def gate(
    authority: Authority | None = None, mechanisms: tuple[str, ...] = MECHANISMS, **more: Any
) -> Callable[..., ListenerSecurity]:
    tokens = TokenVerifier(OauthSection(secret=SECRET), SystemClock())

    def made(users: Users) -> ListenerSecurity:
        return ListenerSecurity(
            authority.gate().tls if authority is not None else None,
            authenticator=Authenticator(users, Rand(), tokens),
            mechanisms=mechanisms,
            **more,
        )

    return made


def add(broker: RealBroker | FakeBroker, user: str, password: str = PASSWORD) -> None:
    for mechanism in NAMES:
        broker.portal.call(broker.users.put(derive_credential(user, mechanism, password, b"salt" * 6)))


def confluent(
    broker: RealBroker, authority: Authority | None, mechanism: str, password: str = PASSWORD
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "bootstrap.servers": broker.address,
        "security.protocol": "sasl_ssl" if authority else "sasl_plaintext",
        "sasl.mechanism": mechanism,
    }
    if authority:
        config["ssl.ca.location"] = str(authority.certificate)
    if mechanism == "OAUTHBEARER":
        return {**config, "oauth_cb": lambda _: (token("alice"), time.time() + 3600)}
    return {**config, "sasl.username": "alice", "sasl.password": password}


def plainly(user: str = "alice", password: str = PASSWORD, authzid: str = "") -> bytes:
    return f"{authzid}\x00{user}\x00{password}".encode()


def as_user(broker: FakeBroker, user: str) -> RawClient:
    client = RawClient(broker.port)
    name, message = b"PLAIN", plainly(user)
    client.ask(17, 1, struct.pack(">h", len(name)) + name)
    assert code(client.ask(36, 1, struct.pack(">i", len(message)) + message)) == 0
    return client


def allow(
    broker: FakeBroker | RealBroker,
    user: str,
    operation: Operation,
    resource: Resource,
    name: str,
    pattern: Pattern = Pattern.LITERAL,
    permission: Permission = Permission.ALLOW,
    host: str = "*",
) -> Callable[[], None]:
    assert broker.rulebook is not None
    found = AclRule(int(resource), int(pattern), name, f"User:{user}", host, int(operation), int(permission))
    broker.portal.call(broker.rulebook.add([found]))
    return lambda: broker.portal.call(broker.rulebook.delete([found]))  # type: ignore[union-attr]
