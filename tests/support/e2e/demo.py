"""The demo as a process: its ports, and the tables that it must have."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from urllib.error import URLError
from urllib.request import urlopen

from support.waiting import eventually

TABLES = {"warehouse", "district", "customer", "stock", "orders", "order_line", "payment", "clicks",
          "conversion_by_product"}  # fmt: skip


def ports(count: int) -> tuple[str, str]:
    """Two addresses, each the first of `count` free ports. Below the ports that systems give to outgoing
    connections: one of those would take a port between this look and the listener's."""
    first = 20_000 + os.getpid() % 100 * 100
    for base in range(first, 32_000, 2 * count):
        with ExitStack() as held:
            try:
                for port in range(base, base + 2 * count):
                    probe = held.enter_context(socket.socket())
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return f"127.0.0.1:{base}", f"127.0.0.1:{base + count}"
    raise AssertionError("no free ports between 20000 and 32000")


def wait_until_ready(http: str) -> None:
    def is_ready() -> bool:
        try:
            with urlopen(f"http://{http}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    eventually(is_ready, "the node is ready", pause_s=0.1)
