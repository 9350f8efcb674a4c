"""Unfinished frames: thousands of connections announce a large request and send no more than a part of it.

    ./dev bench unfinished [--connections 5000] [--kilobytes 1024] [--seconds 20]

Method: a node as `tidemill up` starts it (directory and SQLite), with room for that many connections. Each announces a
frame of twice `--kilobytes` and sends `--kilobytes` of it as fast as the node takes it; no frame is completed, and no
connection is closed before the end. At the same time one idempotent producer sends 100 records of 1 KiB a second;
earlier records are read back at the end and compared. Printed: the connections that the node has open, the bytes of
requests that it counts (limit 192 MiB), the memory of its processes, and the acknowledgements. Holds when all
connections are open and the count stays within the limit and one frame; a count below what the unfinished frames must
hold is a fault as well.
"""

from __future__ import annotations

import argparse
import resource
import selectors
import socket
import struct
import threading
import time
import urllib.request

from kafka_broker import Broker, running
from kafka_load import ack_latencies_ms, machine, percentile, producer, read, send, verify
from tidemill.base.limits import MIB
from tidemill.kafka.settings import KafkaSettings

RECORDS = 2_000
FILES = 3
"""Open files per connection: ours, and twice the node's, which reserves half of its limit for other uses."""


def gauge(broker: Broker, name: str) -> int:
    host, _, port = broker.address.rpartition(":")
    with urllib.request.urlopen(f"http://{host}:{int(port) + 1}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith(f"{name} "))


class Hostile:
    """The connections, fed from a thread of their own until `stop`."""

    def __init__(self, broker: Broker, count: int, size: int) -> None:
        host, _, port = broker.address.rpartition(":")
        self._selector = selectors.DefaultSelector()
        self._socks: list[socket.socket] = []
        """References to connections that have sent their part: without one, a connection would be closed and its
        frame abandoned.
        """
        self.sent = 0
        self.ended = 0
        for _ in range(count):
            sock = socket.create_connection((host, int(port)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)  # what the node does not take stays here
            sock.setblocking(False)
            sock.send(struct.pack(">i", 2 * size))
            self._socks.append(sock)
            self._selector.register(sock, selectors.EVENT_WRITE, [size])
        self._stopping = False
        self._thread = threading.Thread(target=self._feed)
        self._thread.start()

    def _feed(self) -> None:
        piece = bytes(16 << 10)
        while not self._stopping:
            for key, _ in self._selector.select(0.2):
                left = key.data
                try:
                    count = key.fileobj.send(piece[: left[0]])  # type: ignore[union-attr]
                except BlockingIOError:
                    continue
                except OSError:
                    self.ended += 1
                    self._selector.unregister(key.fileobj)
                    continue
                left[0] -= count
                self.sent += count
                if not left[0]:
                    self._selector.unregister(key.fileobj)

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        for sock in self._socks:
            sock.close()


def allow_files(count: int) -> None:
    """Raise the limit of open files for this process and its node. Raises ValueError if the hard limit is lower."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = FILES * count + 1_024
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, most) if most >= 0 else most))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=5_000)
    parser.add_argument("--kilobytes", type=int, default=1_024)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    room = args.connections + 100
    allow_files(room)
    more = {"kafka": {"connections_max": room, "connections_per_address_max": room}}
    with running(["directory"], more) as brokers:
        broker = brokers["directory"]
        send(producer(broker.address, 65_536), ["records"], RECORDS, 1_024)
        before_mb = broker.resident_mb()
        hostile = Hostile(broker, args.connections, args.kilobytes << 10)
        most, most_mb, open_most = 0, 0.0, 0
        latencies: list[float] = []
        until_s = time.monotonic() + args.seconds
        while time.monotonic() < until_s:
            latencies += ack_latencies_ms(broker.address, "beside", 1.0, 100, 1_024)
            most = max(most, gauge(broker, "tidemill_kafka_request_bytes"))
            most_mb = max(most_mb, broker.resident_mb())
            open_most = max(open_most, gauge(broker, "tidemill_kafka_connections"))
        verified = verify(read(broker.address, ["records"])[1], ["records"], RECORDS, 1_024)
        hostile.stop()
    limit = KafkaSettings().process_bytes_max
    latencies.sort()
    print(f"machine: {machine()}")
    print(
        f"connections: {args.connections:,}, open at once: {open_most:,}, ended by the node: {hostile.ended}, "
        f"sent: {hostile.sent / 1e6:.0f} MB"
    )
    print(f"counted of requests: at most {most / MIB:.1f} MiB of {limit / MIB:.0f}")
    print(f"memory of its processes: {before_mb:.0f} MB before, at most {most_mb:.0f}")
    print(f"acks beside them: p50 {percentile(latencies, 0.5):.1f} p99 {percentile(latencies, 0.99):.1f} ms")
    print(f"verified: {verified:,}")
    least = min(args.connections * (args.kilobytes << 10), limit // 2) // 2
    return int(open_most < args.connections or not least <= most <= limit + 2 * (args.kilobytes << 10))


if __name__ == "__main__":
    raise SystemExit(main())
