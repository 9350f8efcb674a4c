"""Addresses as configuration, command line and URLs write them: `host:port`, `[IPv6]:port` (RFC 3986); URL paths."""

from __future__ import annotations

import re
import socket
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import unquote

PORT_MAX = 65535
_MAPPED = "::ffff:"


class Address(NamedTuple):
    """A host and a port. `host` has no brackets, as sockets, certificates and Kafka's metadata require."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address. Raises ValueError with the correct notation."""
        host, _, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        bare = host[1:-1] if bracketed else host
        if not bare or not port.isascii() or not port.isdigit() or int(port) > PORT_MAX:
            raise ValueError("write it as host:port, e.g. 127.0.0.1:8600 or [::1]:8600")
        if bracketed != (":" in bare) or "[" in bare or "]" in bare:
            raise ValueError("write an IPv6 address in brackets, e.g. [::1]:8600")
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"{bracket_ipv6(self.host)}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def is_wildcard(self) -> bool:
        """True for a listening address to which no client can connect."""
        try:
            return ip_address(self.host).is_unspecified
        except ValueError:
            return False

    @property
    def reachable(self) -> Address:
        """Return an address to which a client on this machine can connect: loopback for a wildcard."""
        loopback = "::1" if self.family == socket.AF_INET6 else "127.0.0.1"
        return Address(loopback, self.port) if self.is_wildcard else self

    def advertised(self, own_host: str) -> Address:
        """Return the address to which clients of this bound address are sent: `own_host`, if one is configured, else
        the bound host, or for a wildcard the name of this machine if it resolves. May wait for DNS."""
        host = strip_brackets(own_host)
        if not host and self.is_wildcard:
            host = _machine_host(self.family)
        return Address(host or self.host, self.port)

    @property
    def is_loopback(self) -> bool:
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def _machine_host(family: socket.AddressFamily) -> str:
    """Return the name of this machine if other machines may know it and it resolves to an address that a wildcard of
    `family` accepts, else ""."""
    name = socket.gethostname()
    if name.partition(".")[0] == "localhost":
        return ""
    try:  # a socket of [::] accepts IPv4, too
        socket.getaddrinfo(name, None, family=family if family == socket.AF_INET else socket.AF_UNSPEC)
    except (OSError, UnicodeError):
        return ""
    return name


def bracket_ipv6(host: str) -> str:
    """Return the host as written in a URL."""
    return f"[{host}]" if ":" in host else host


def strip_brackets(host: str) -> str:
    """Return a host without brackets, if it has any."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


_SECRET_PARAMETER = re.compile(r"(?i)\b(password|sslpassword)(\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&]+)")


def without_credentials(url: str) -> str:
    """Return a URL, or a list of parameters, as messages may show it: without user and password, which precede an `@`.

    A password may contain characters that should have been quoted: after `user:` everything up to the last `@` is left
    out, even if `user:` may be `host:`. So is a scheme without `://`.
    """
    url = _SECRET_PARAMETER.sub(r"\1\2***", url)
    scheme, mark, rest = url.partition("://")
    if not mark:
        before, _, after = url.rpartition("@")
        return after if ":" in before else url
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority or ":" in authority:
        rest = rest.rpartition("@")[2]
    return scheme + mark + rest


def canonical_host(host: str) -> str:
    """Return the canonical address of a peer.

    A socket that listens for IPv4 and IPv6 reports an IPv4 peer as ::ffff:10.0.0.5 (RFC 4291, 2.5.5.2), any other
    socket as 10.0.0.5. The latter form is returned; other addresses are unchanged.
    """
    if host[: len(_MAPPED)].lower() != _MAPPED:
        return host
    try:
        mapped = IPv6Address(host).ipv4_mapped
    except ValueError:
        return host
    return str(mapped) if mapped is not None else host


def split_url_path(raw_path: bytes) -> list[str]:
    """Return the parts of a URL's path, each decoded separately, because a name may contain a slash. Pure.

    Code that authorizes a request and code that serves it split its path with this function, so both see one name.
    """
    return [unquote(part) for part in raw_path.decode("latin-1").partition("?")[0].strip("/").split("/")]
