"""Where the endpoint listens: sockets by name, each with its own gate and with what its clients are told (KIP-103).

LI1  A client that came by a listener is told of every node the address of the listener of that name. A node without
     one is none to it: what that node leads has no leader that this client could reach.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

import msgspec

from tidemill.base.address import Address
from tidemill.base.errors import InvalidError
from tidemill.kafka.net.listener_security import ListenerSecurity

DEFAULT: Final = "default"
"""The listener of node.kafka, which every node has."""

_BACKLOG = 512


class Listener(msgspec.Struct, frozen=True):
    """advertised_host and advertised_port: what clients are told; "" and 0 are the bound ones. `key`: where the
    configuration sets its address."""

    name: str
    host: str
    port: int
    advertised_host: str = ""
    advertised_port: int = 0
    gate: ListenerSecurity = msgspec.field(default_factory=ListenerSecurity)
    key: str = "node.kafka"

    def bind(self) -> socket.socket:
        """Raises InvalidError, with the key to change."""
        bound = Address(self.host, self.port)
        found = socket.socket(bound.family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.setblocking(False)
            found.bind(bound)
            found.listen(_BACKLOG)
        except OSError as error:
            found.close()
            taken = error.errno == errno.EADDRINUSE
            what = "Kafka port is taken" if taken else "Kafka address cannot be bound"
            raise InvalidError(
                f"{what}: host={self.host} port={self.port} error={error.strerror}.",
                fix=f"Set {self.key} to a free host:port in tidemill.toml, or stop the process that holds it.",
            ) from error
        return found


class Advertised(msgspec.Struct, frozen=True):
    """A listener of this node as DescribeConfigs shows it; `security` as Kafka names protocols."""

    name: str
    bound: str
    told: str
    security: str
