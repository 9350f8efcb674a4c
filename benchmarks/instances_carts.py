"""`python benchmarks/instances_carts.py`: a keyed topic whose rows change and go, until SIGTERM.

2,000 carts; each record is one cart's new contents, one in twenty its end, one in a thousand malformed. Prints counts
as the demo's clicks do.
"""

from __future__ import annotations

import argparse
import json
import signal

import paths  # noqa: F401
from demo.clicks import MALFORMED_PER_1000, Clicks
from demo.shop import PRODUCTS
from tidemill.base.clock import Rand, SystemClock

CARTS = 2_000
ENDED_PER_1000 = 50


class Carts(Clicks):
    def _click(self) -> int:
        draw = self._rand.below(1000)
        cart_id = f"cart-{self._rand.below(CARTS)}"
        if draw < MALFORMED_PER_1000:
            return self._send(cart_id.encode(), b'{"cart_id": broken', malformed=True)
        if draw < MALFORMED_PER_1000 + ENDED_PER_1000:
            return self._send(cart_id.encode(), None)  # type: ignore[arg-type]
        contents = {
            "cart_id": cart_id,
            "product_id": 1 + self._rand.below(PRODUCTS),
            "pieces": 1 + self._rand.below(9),
        }
        return self._send(cart_id.encode(), json.dumps(contents).encode())


def main() -> int:
    from confluent_kafka import Producer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    producer = Producer(
        {
            "bootstrap.servers": options.brokers,
            "enable.idempotence": True,
            "linger.ms": 20,
            "message.timeout.ms": 300_000,
            "log_level": 2,
        }
    )
    carts = Carts(producer, "carts", options.rate, Rand(options.seed), SystemClock())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, carts.stop)
    return 1 if carts.run() else 0


if __name__ == "__main__":
    raise SystemExit(main())
