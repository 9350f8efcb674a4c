"""TLS of a server: the SSL context for new connections, reloaded when its files change.

A connection keeps the context it began with. If changed files cannot be loaded, the previous context stays in use.

Sessions are never resumed, so a client's certificate is checked at every connection.
"""

from __future__ import annotations

import os
import ssl
from typing import Final

from prometheus_client import Gauge

from tidemill.base.config.listeners import TlsSection
from tidemill.base.errors import InvalidError

_EXPIRES: Final = Gauge(
    "tidemill_tls_certificate_expires", "When the server's certificate expires, Unix seconds", ("file",)
)
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_CLIENTS: Final = {"none": ssl.CERT_NONE, "requested": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}

FileStamps = tuple[tuple[int, int, int], ...]


class ServerCertificates:
    """Server certificates and the SSL context made from them. Call `load` first, then `reload_if_changed` every few
    seconds, in a thread."""

    def __init__(self, settings: TlsSection) -> None:
        self._settings = settings
        self._seen: FileStamps = ()
        self._context: ssl.SSLContext | None = None

    @property
    def context(self) -> ssl.SSLContext:
        assert self._context is not None
        return self._context

    def load(self) -> None:
        """Load the files. Raises InvalidError with the configuration key and the reason; the former context stays in
        use."""
        seen = self._read_file_stamps()
        self._context, self._seen = _load_context(self._settings), seen

    def reload_if_changed(self) -> bool:
        """Reload the files if one of them changed; return whether one did. Raises InvalidError as `load` does."""
        if self._read_file_stamps() == self._seen:
            return False
        self.load()
        return True

    def _read_file_stamps(self) -> FileStamps:
        settings = self._settings
        named = {"certificate": settings.certificate, "key": settings.key, "client_ca": settings.client_ca}
        seen = []
        for key, path in named.items():
            if path:
                try:
                    found = os.stat(path)
                except OSError as error:
                    raise InvalidError(
                        f"cannot read a TLS file: key=tls.{key} path={path} error={error.strerror}.",
                        fix=f"Name a readable PEM file as tls.{key}.",
                    ) from error
                seen.append((found.st_mtime_ns, found.st_ino, found.st_size))
        return tuple(seen)


def _load_context(settings: TlsSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[settings.min_version]
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.num_tickets = 0
    try:
        # An empty password, so that OpenSSL does not prompt for one on the terminal.
        context.load_cert_chain(settings.certificate, settings.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise InvalidError(
            f"cannot use the certificate and key: certificate={settings.certificate} key={settings.key}"
            f" error={_reason_of_error(error)}.",
            fix="Set tls.certificate and tls.key to matching PEM files; the key must not have a password.",
        ) from error
    if settings.client_auth != "none":
        if not settings.client_ca:
            raise InvalidError(
                f"client certificates need a signing CA: tls.client_auth={settings.client_auth}.",
                fix="Set tls.client_ca to a PEM file.",
            )
        try:
            context.load_verify_locations(settings.client_ca)
        except (OSError, ValueError) as error:
            raise InvalidError(
                f"cannot read the CA of client certificates: tls.client_ca={settings.client_ca}"
                f" error={_reason_of_error(error)}.",
                fix="Set tls.client_ca to a PEM file.",
            ) from error
    context.verify_mode = _CLIENTS[settings.client_auth]
    _EXPIRES.labels(settings.certificate).set(_expires_s(settings.certificate))
    return context


def _reason_of_error(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _expires_s(path: str) -> float:
    from cryptography import x509

    with open(path, "rb") as file:
        return x509.load_pem_x509_certificate(file.read()).not_valid_after_utc.timestamp()


def subject_of(certificate: bytes) -> str:
    """Return the distinguished name of a DER certificate in RFC 4514 notation: `CN=alice,O=Harbour`."""
    from cryptography import x509

    return x509.load_der_x509_certificate(certificate).subject.rfc4514_string()
