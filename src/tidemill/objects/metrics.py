"""Metrics of the package, declared once with their meaning. `store` is local, memory, s3, gs or az."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from prometheus_client import Counter, Histogram

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError

T = TypeVar("T")

Operation = Literal["put", "get", "get_ranges", "head", "list", "delete"]
OPERATIONS: tuple[Operation, ...] = ("put", "get", "get_ranges", "head", "list", "delete")

REQUESTS = Counter(
    "tidemill_objects_requests_total",
    "Calls that ended, by operation and outcome (ok, or the kind of error in lower case).",
    ("store", "operation", "outcome"),
)
BYTES = Counter(
    "tidemill_objects_bytes_total",
    "Payload bytes written by successful puts and returned by successful reads.",
    ("store", "operation"),
)
RETRIES = Counter(
    "tidemill_objects_retries_total",
    "Attempts after the first, by operation.",
    ("store", "operation"),
)
RESOLVED = Counter(
    "tidemill_objects_resolved_total",
    "Puts whose acknowledgement was lost, by what reading back showed (ours, other, absent).",
    ("store", "found"),
)
SECONDS = Histogram(
    "tidemill_objects_seconds",
    "Duration of a call including its retries and its wait for a free slot.",
    ("store", "operation"),
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
)

ALL: tuple[Counter | Histogram, ...] = (REQUESTS, BYTES, RETRIES, RESOLVED, SECONDS)


class OperationMeter:
    """Resolved metric children of one operation: looking them up by label costs more than a local read."""

    def __init__(self, store: str, operation: Operation, clock: Clock) -> None:
        self._store = store
        self._operation = operation
        self._clock = clock
        self.retries = RETRIES.labels(store, operation)
        self._bytes = BYTES.labels(store, operation)
        self._seconds = SECONDS.labels(store, operation)
        self._ok = REQUESTS.labels(store, operation, "ok")

    async def measure(self, call: Callable[[], Awaitable[T]], size: Callable[[T], int] | None = None) -> T:
        """Make a call and record its duration and outcome. `size`: bytes of its payload, from its result."""
        started_s = self._clock.monotonic_s()
        outcome = "ok"
        try:
            found = await call()
            if size is not None:
                self._bytes.inc(size(found))
            return found
        except TidemillError as error:
            outcome = error.kind
            raise
        except BaseException:
            outcome = "cancelled"
            raise
        finally:
            self.count_outcome(outcome)
            self._seconds.observe(max(0.0, self._clock.monotonic_s() - started_s))

    def count_outcome(self, outcome: str) -> None:
        child = self._ok if outcome == "ok" else REQUESTS.labels(self._store, self._operation, outcome)
        child.inc()
