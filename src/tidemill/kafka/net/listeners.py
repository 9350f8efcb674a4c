"""Listening sockets by name, each with its own security and its own advertised address (KIP-103).

Invariant: a client that connected through a listener sees, for every node, the address of that node's listener of the
same name. A node without such a listener is invisible to the client: the partitions that this node leads have no leader
that the client could reach.
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
"""Name of the listener of node.kafka, which every node has."""

_BACKLOG = 512


class Listener(msgspec.Struct, frozen=True):
    """Configuration of one listener.

    `advertised_host` and `advertised_port` are sent to clients; "" and 0 mean the bound address. `key` is the
    configuration key of the address.
    """

    name: str
    host: str
    port: int
    advertised_host: str = ""
    advertised_port: int = 0
    gate: ListenerSecurity = msgspec.field(default_factory=ListenerSecurity)
    key: str = "node.kafka"

    def bind(self) -> socket.socket:
        """Return a bound, listening socket.

        Raises InvalidError, with the configuration key, if the address cannot be bound.
        """
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
            what = "Kafka port is in use" if taken else "Kafka address cannot be bound"
            raise InvalidError(
                f"{what}: host={self.host} port={self.port} error={error.strerror}.",
                fix=f"Set {self.key} to a free host:port in tidemill.toml, or stop the process that uses it.",
            ) from error
        return found


class AdvertisedListener(msgspec.Struct, frozen=True):
    """Listener of this node as DescribeConfigs reports it; `security` is a Kafka protocol name."""

    name: str
    bound: str
    advertised: str
    security: str
