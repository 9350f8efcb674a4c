"""`python -m demo.clicks`: a click stream through confluent-kafka until SIGTERM.

1 % of the clicks are sent twice with the same click_id, and 0.1 % of the records are not JSON. The process prints one
JSON line per second and one at the end, with the number of records that the broker acknowledged.
"""

from __future__ import annotations

import argparse
import json
import signal
from typing import Any

from demo.shop import CUSTOMERS, PRODUCTS
from tidemill.base.clock import Clock, Rand, SystemClock

DUPLICATES_PER_1000 = 10
MALFORMED_PER_1000 = 1
FLUSH_TIMEOUT_S = 60.0


class Clicks:
    def __init__(self, producer: Any, topic: str, rate: float, rand: Rand, clock: Clock) -> None:
        self._producer = producer
        self._topic = topic
        self._rate = rate
        self._rand = rand
        self._clock = clock
        self._stopping = False
        self.produced = 0
        self.malformed = 0
        self.failed = 0

    def stop(self, *_: object) -> None:
        self._stopping = True

    def run(self) -> int:
        """Produce until stopped, then flush. Return the number of unacknowledged records."""
        started_s = self._clock.monotonic_s()
        printed_s = started_s
        sent = 0
        while not self._stopping:
            now_s = self._clock.monotonic_s()
            while sent < (now_s - started_s) * self._rate:
                sent += self._click()
            self._producer.poll(0.005)
            if now_s - printed_s >= 1:
                printed_s += 1
                self._print()
        left = int(self._producer.flush(FLUSH_TIMEOUT_S))
        self._print()
        return left

    def _click(self) -> int:
        draw = self._rand.below(1000)
        if draw < MALFORMED_PER_1000:
            return self._send(b"", b'{"click_id": broken', malformed=True)
        click_id = self._rand.nonce()
        value = json.dumps(
            {
                "click_id": click_id,
                "product_id": 1 + self._rand.below(PRODUCTS),
                "customer_id": 1 + self._rand.below(CUSTOMERS),
                "at_ms": self._clock.now_ms(),
            }
        ).encode()
        sent = self._send(click_id.encode(), value)
        if draw < MALFORMED_PER_1000 + DUPLICATES_PER_1000:
            sent += self._send(click_id.encode(), value)
        return sent

    def _send(self, key: bytes, value: bytes, *, malformed: bool = False) -> int:
        def acknowledged(error: object, _: object) -> None:
            if error is not None:
                self.failed += 1
                return
            self.produced += 1
            self.malformed += malformed

        while True:
            try:
                self._producer.produce(self._topic, value, key or None, on_delivery=acknowledged)
                return 1
            except BufferError:  # the local queue is full: wait for acknowledgements
                self._producer.poll(0.1)

    def _print(self) -> None:
        print(json.dumps({"produced": self.produced, "malformed": self.malformed, "failed": self.failed}), flush=True)


def main() -> int:
    from confluent_kafka import Producer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", required=True)
    parser.add_argument("--topic", default="clicks")
    parser.add_argument("--rate", type=float, default=2000)
    parser.add_argument("--seed", type=int, default=2)
    options = parser.parse_args()
    producer = Producer(
        {
            "bootstrap.servers": options.brokers,
            "enable.idempotence": True,
            "linger.ms": 20,
            "compression.type": "lz4",
            "message.timeout.ms": 300_000,
            "queue.buffering.max.messages": 1_000_000,
            "log_level": 2,
        }
    )
    clicks = Clicks(producer, options.topic, options.rate, Rand(options.seed), SystemClock())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, clicks.stop)
    return 1 if clicks.run() else 0


if __name__ == "__main__":
    raise SystemExit(main())
