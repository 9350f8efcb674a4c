"""One computation for all requests: an answer is computed on request, at most once per interval.

Concurrent requests wait for one computation and get its result. Nothing runs between requests. An answer that took long
stays valid longer, so that expensive answers use a limited share of the node. An error is shared like an answer: not
every page queries a store that does not answer.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from functools import partial

import orjson

from tidemill.base.clock import Clock
from tidemill.base.errors import TidemillError

REST_FACTOR = 9.0
"""An answer is valid for at least this many times as long as it took: a tenth of the time is spent on it at most."""
VALID_S_MAX = 30.0
SHARED_NAMES_MAX = 64
GZIP_BYTES_MIN = 4_096
GZIP_LEVEL = 1


class SharedAnswer:
    """JSON body of one answer, plain and compressed. Raises what `compute` raises."""

    def __init__(self, compute: Callable[[], Awaitable[object]], clock: Clock, valid_s: float = 1.0) -> None:
        self._compute = compute
        self._clock = clock
        self._valid_s = valid_s
        self._lock = asyncio.Lock()
        self._until_s = float("-inf")
        self._body = self._compressed = b""
        self._error: TidemillError | None = None

    async def body(self, *, compressed: bool) -> bytes:
        """Return the JSON of the answer, compressed by gzip if asked and worth it (see `is_compressed`)."""
        async with self._lock:
            began_s = self._clock.monotonic_s()
            if began_s >= self._until_s:
                self._error = None
                try:
                    self._body = orjson.dumps(await self._compute(), default=str)
                except TidemillError as error:
                    self._error = error
                self._compressed = b""
                ended_s = self._clock.monotonic_s()
                valid_s = (
                    max(self._valid_s, REST_FACTOR * (ended_s - began_s)) if self._error is None else self._valid_s
                )
                self._until_s = ended_s + min(valid_s, VALID_S_MAX)
            if self._error is not None:
                raise self._error
            if not compressed or len(self._body) < GZIP_BYTES_MIN:
                return self._body
            if not self._compressed:
                self._compressed = gzip.compress(self._body, GZIP_LEVEL, mtime=0)
            return self._compressed


class SharedAnswers:
    """Answers by name, for the names that were requested most recently: clients choose the names."""

    def __init__(
        self,
        compute: Callable[[str], Awaitable[object]],
        clock: Clock,
        valid_s: float = 1.0,
        names_max: int = SHARED_NAMES_MAX,
    ) -> None:
        self._compute = compute
        self._clock = clock
        self._valid_s = valid_s
        self._names_max = names_max
        self._answers: dict[str, SharedAnswer] = {}  # least recently requested first

    async def body(self, name: str) -> bytes:
        """Return the JSON of one answer. Raises what `compute` raises."""
        answer = self._answers.pop(name, None)
        if answer is None:
            answer = SharedAnswer(partial(self._compute, name), self._clock, self._valid_s)
        self._answers[name] = answer
        if len(self._answers) > self._names_max:
            del self._answers[next(iter(self._answers))]
        return await answer.body(compressed=False)


def is_compressed(body: bytes) -> bool:
    """Return whether a body of `SharedAnswer` is compressed: JSON never begins like gzip."""
    return body.startswith(b"\x1f\x8b")
