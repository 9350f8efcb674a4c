"""Group commit: decide when the next L0 object begins, so that batches that are likely to arrive can share it.

Pure: time is passed in.

An object, its place in the logs and the acknowledgements cost about the same for one batch as for many, and an
idempotent producer sends a partition's next batch only after the previous one was acknowledged. The rules:

- Gather: wait briefly for lines (a producer in a partition) whose previous batch is about to be answered, or was just
  answered, and that have no batch here, as long as most of them return within the wait. Their batches then share an
  object. The wait is two typical uploads, since a longer one costs more than sharing saves. It begins with the answer,
  however long a busy disk delays that. No batch waits longer than GATHER_MAX_S for others.
- Spread: while uploads run, the next one starts after a fraction of a typical upload's time, so that several are spread
  evenly over it, but not within SPREAD_MIN_S. If uploads are that short, wait for their end.
- Size: a group of GATHER_BYTES does not gather, and a full object does not wait at all. `linger_s` replaces gathering
  and spreading by a timer; a full object does not wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from tidemill.base.limits import MIB
from tidemill.topics.config.settings import TopicSettings

GATHER_MIN_S = 0.002
GATHER_MAX_S = 0.01
"""Minimum of the wait: an append to the logs, an answer and the client's next batch take 1 to 2 ms on one machine."""

SPREAD_MIN_S = 0.002
GATHER_BYTES = MIB
"""Group size from which each batch's share of an object's cost is small enough."""

GATHER_LINES = 64
"""Number of lines from which no wait is useful: those that return anyway make a group."""

PLACING_MAX_S = 1.0
"""Maximum wait for an answer after an upload. A later answer waits for something else than the next commit of the
logs."""

_RETURN_SHARE_MIN = 0.5
_SMOOTHING = 0.2
_SMOOTHING_LINES = 0.1


class GroupCommitPolicy:
    def __init__(self, settings: TopicSettings) -> None:
        self._settings = settings
        self._placing: dict[Hashable, float] = {}
        """Line to the deadline for its answer; its batch was uploaded and is being appended to the log."""
        self._awaited: dict[Hashable, float] = {}
        """Line to the deadline for its next batch, earliest deadline first; it was answered."""
        self._come_back = 1.0
        """Moving average of the share of lines that returned within their wait."""
        self._typical_upload_s = 0.0
        self._last_start_s = 0.0

    def batch_arrived(self, now_s: float, line: Hashable) -> None:
        """Record that a batch of `line` waits for its object."""
        placing_s, awaited_s = self._placing.pop(line, None), self._awaited.pop(line, None)
        until_s = awaited_s or placing_s
        if until_s is not None:
            self._update_return_share(now_s < until_s)

    def upload_started(self, now_s: float) -> None:
        self._last_start_s = now_s

    def upload_ended(self, now_s: float, took_s: float, placing: Collection[Hashable]) -> None:
        """Record the end of an upload that took `took_s`; batches of the lines in `placing` now go to the logs.

        No other batch of these lines may be waiting. Each of them is reported again, to `batch_answered`.
        """
        self._typical_upload_s += _SMOOTHING * (took_s - self._typical_upload_s)
        self._expire_waits(now_s)
        for line in placing:
            self._awaited.pop(line, None)
            self._placing.pop(line, None)
            self._placing[line] = now_s + PLACING_MAX_S

    def batch_answered(self, now_s: float, line: Hashable) -> bool:
        """Record that a batch of `line` ended.

        Return True if the line's next batch is awaited from now on, which may shorten the current wait.
        """
        if self._placing.pop(line, None) is None:
            return False
        self._expire_waits(now_s)
        self._awaited[line] = now_s + min(max(2 * self._typical_upload_s, GATHER_MIN_S), GATHER_MAX_S)
        return True

    def delay_s(self, now_s: float, *, waiting_bytes: int, first_s: float, uploads: int) -> float:
        """Return how long to wait for the next object if no more batches arrive; 0 = now.

        `waiting_bytes` are pending, the first batch was staged at `first_s`, and `uploads` are in flight.
        """
        settings = self._settings
        if waiting_bytes >= settings.object_bytes:
            return 0.0
        if settings.linger_s > 0:
            return max(0.0, first_s + settings.linger_s - now_s)
        until_s = now_s
        if uploads:
            spread_s = self._typical_upload_s / settings.uploads_in_flight
            until_s = self._last_start_s + max(spread_s, SPREAD_MIN_S)
        if (self._awaited or self._placing) and waiting_bytes < GATHER_BYTES and self._come_back > _RETURN_SHARE_MIN:
            self._expire_waits(now_s)
            last_s = next(reversed((self._placing or self._awaited).values()), now_s)
            until_s = max(until_s, min(last_s, first_s + GATHER_MAX_S))
        return max(0.0, until_s - now_s)

    def _expire_waits(self, now_s: float) -> None:
        for waited_for in (self._placing, self._awaited):
            while waited_for:
                line = next(iter(waited_for))
                if waited_for[line] > now_s:
                    break
                del waited_for[line]
                self._update_return_share(False)

    def _update_return_share(self, came_back: bool) -> None:
        self._come_back += _SMOOTHING_LINES * (came_back - self._come_back)
