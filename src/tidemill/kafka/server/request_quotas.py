"""Quotas of the requests of one connection: what a request is charged, and how long its client is muted (KIP-219).

    Produce        bytes of the request, when it arrives
    Fetch          bytes of the answer
    any request    loop time (KIP-124): the steps of its coroutine count, its waiting does not

Invariant (throttling): a client that exceeded its quota is answered immediately and then muted for the time that the
answer states: no request of the connection begins and nothing is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from prometheus_client import Counter

from tidemill.base.clock import Clock
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Reply, Request
from tidemill.kafka.net.listener_security import ClientIdentity
from tidemill.kafka.schema.codec_compiler import throttle_offset
from tidemill.kafka.schema.fetch import set_throttle
from tidemill.kafka.schema.produce import set_throttle as set_produce_throttle
from tidemill.security import quotas
from tidemill.security.principals import USER

PRODUCE = 0
FETCH = 1
_THROTTLED = Counter("tidemill_kafka_throttled_seconds", "Time for which clients were muted", ("quota",))

T = TypeVar("T")


class Metered(Generic[T]):
    """Awaitable that runs `work` and measures it. Tasks and threads that it uses are not counted."""

    def __init__(self, work: Coroutine[Any, Any, T], clock: Clock) -> None:
        self._work = work
        self._clock = clock
        self.spent_s = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        clock, step, given = self._clock, self._work.send, None
        while True:
            began_s = clock.monotonic_s()
            try:
                wanted = step(given)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self.spent_s += clock.monotonic_s() - began_s
            step, given = self._work.send, None
            try:
                yield wanted
            except BaseException as error:
                step, given = self._work.throw, error


class ClientThrottle:
    """Charges the requests of one connection and mutes its client. `on_unmute` is called at the end of a mute, unless
    the connection `is_closed`."""

    def __init__(
        self,
        context: Context,
        visitor: ClientIdentity,
        is_closed: Callable[[], bool],
        on_unmute: Callable[[], None],
    ) -> None:
        self._context = context
        self._visitor = visitor
        self._is_closed = is_closed
        self._on_unmute = on_unmute
        self.muted = False
        self._muted_until_s = 0.0

    def charge(self, request: Request, name: str, amount: float) -> int:
        """Charge a quota and return the milliseconds for which the client is muted from now on."""
        user, now_s = self._visitor.principal.removeprefix(USER), self._context.clock.monotonic_s()
        throttle_ms = self._context.quotas.limits.record_usage(name, user, request.client_id, amount, now_s)
        if throttle_ms:
            _THROTTLED.labels(name).inc(throttle_ms / 1000)
            self._muted_until_s = max(self._muted_until_s, now_s + throttle_ms / 1000)
            if not self.muted:
                self.muted = True
                asyncio.get_running_loop().call_later(throttle_ms / 1000, self._unmute)
        return throttle_ms

    def write_throttle(self, request: Request, reply: Reply) -> None:
        """Charge the answer and the loop time of a request, and write its throttle time into the answer."""
        throttle_ms, limits = request.throttle_ms, self._context.quotas.limits
        if request.key == FETCH and not limits.is_empty:
            throttle_ms = self.charge(request, quotas.CONSUME, sum(map(len, reply)))
        if request.spent_s and self._visitor.known:
            throttle_ms = max(throttle_ms, self.charge(request, quotas.REQUEST, 100 * request.spent_s))
        if not throttle_ms or not request.answered:
            return
        if request.key == PRODUCE:
            set_produce_throttle(reply, request.version, throttle_ms)
        elif request.key == FETCH:
            set_throttle(reply, throttle_ms)
        elif (at := throttle_offset(request.key, request.version)) >= 0:
            set_throttle(reply, throttle_ms, at)

    def _unmute(self) -> None:
        left_s = self._muted_until_s - self._context.clock.monotonic_s()
        if not self.muted or self._is_closed():
            return
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._unmute)
            return
        self.muted = False
        self._on_unmute()
