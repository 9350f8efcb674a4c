"""When the next L0 object begins: group commit by those who are likely to be in the group. Pure: time is passed in.

An object, its place in the logs and the acknowledgements cost about the same for one batch as for many, and an
idempotent producer sends a partition's next batch only when the last one was acknowledged. So:

G1  Lines (a producer in a partition) that are about to be answered, or were a moment ago, and have no batch here are
    waited for, while most of them do come back within it: the batches of all of them share an object. A moment is what
    two typical uploads take, for to wait longer costs more than to share saves; it begins with the answer, however
    long a busy disk lets that wait for the logs. No batch waits longer than GATHER_MOST_S for others.
G2  While uploads run, the next one starts after a fraction of a typical upload's time, so that several are spread
    evenly over it, but not within SPREAD_LEAST_S: where uploads are that short, their end is waited for.
G3  GATHER_BYTES wait for nobody (G1), a full object for nothing at all. `linger_s` replaces all this by a timer.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from tidemill.base.limits import MIB
from tidemill.topics.config.settings import TopicSettings

GATHER_LEAST_S = 0.002
GATHER_MOST_S = 0.01
"""The least: an append to the logs, an answer and the client's next batch take a millisecond or two on one machine."""

SPREAD_LEAST_S = 0.002
GATHER_BYTES = MIB
"""Of such a group the part of each batch in what an object costs is small enough."""

GATHER_LINES = 64
"""Of so many that were answered together none is waited for: they make a group whoever comes."""

PLACING_MOST_S = 1.0
"""Who is not answered for so long after an upload waits for something else than the logs' next commit."""

_MOST = 0.5
_SMOOTHING = 0.2
_SMOOTHING_LINES = 0.1


class GroupCommitPolicy:
    def __init__(self, settings: TopicSettings) -> None:
        self._settings = settings
        self._placing: dict[Hashable, float] = {}
        """Line → until when its answer is expected; its batch was uploaded and goes to the log."""
        self._awaited: dict[Hashable, float] = {}
        """Line → until when it is waited for, the first to be given up first: it was answered."""
        self._come_back = 1.0
        """The part of lines, lately, that came back in their moment."""
        self._typical_upload_s = 0.0
        self._last_start_s = 0.0

    def came(self, now_s: float, line: Hashable) -> None:
        """A batch of `line` waits for its object."""
        placing_s, awaited_s = self._placing.pop(line, None), self._awaited.pop(line, None)
        until_s = awaited_s or placing_s
        if until_s is not None:
            self._saw(now_s < until_s)

    def started(self, now_s: float) -> None:
        self._last_start_s = now_s

    def ended(self, now_s: float, took_s: float, placing: Collection[Hashable]) -> None:
        """An upload of `took_s` ended; batches of these lines go to the logs now, and no other of theirs waits. Each is
        told of again, to `answered`."""
        self._typical_upload_s += _SMOOTHING * (took_s - self._typical_upload_s)
        self._give_up(now_s)
        for line in placing:
            self._awaited.pop(line, None)
            self._placing.pop(line, None)
            self._placing[line] = now_s + PLACING_MOST_S

    def answered(self, now_s: float, line: Hashable) -> bool:
        """A batch of `line` ended. True when it is waited for from now on: what waits may wait less long."""
        if self._placing.pop(line, None) is None:
            return False
        self._give_up(now_s)
        self._awaited[line] = now_s + min(max(2 * self._typical_upload_s, GATHER_LEAST_S), GATHER_MOST_S)
        return True

    def delay_s(self, now_s: float, *, waiting_bytes: int, first_s: float, uploads: int) -> float:
        """How long until the next object begins, if nothing more comes: of batches of so many bytes, the first of them
        staged at `first_s`, while so many uploads run. 0 = now."""
        settings = self._settings
        if waiting_bytes >= settings.object_bytes:
            return 0.0
        if settings.linger_s > 0:
            return max(0.0, first_s + settings.linger_s - now_s)
        until_s = now_s
        if uploads:
            spread_s = self._typical_upload_s / settings.uploads_in_flight
            until_s = self._last_start_s + max(spread_s, SPREAD_LEAST_S)
        if (self._awaited or self._placing) and waiting_bytes < GATHER_BYTES and self._come_back > _MOST:
            self._give_up(now_s)
            last_s = next(reversed((self._placing or self._awaited).values()), now_s)
            until_s = max(until_s, min(last_s, first_s + GATHER_MOST_S))
        return max(0.0, until_s - now_s)

    def _give_up(self, now_s: float) -> None:
        for waited_for in (self._placing, self._awaited):
            while waited_for:
                line = next(iter(waited_for))
                if waited_for[line] > now_s:
                    break
                del waited_for[line]
                self._saw(False)

    def _saw(self, came_back: bool) -> None:
        self._come_back += _SMOOTHING_LINES * (came_back - self._come_back)
