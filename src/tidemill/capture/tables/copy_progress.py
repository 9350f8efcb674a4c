"""Progress and cost of a copy: rows, rate, what is left, the WAL that its slot retains, and attempts to resume it."""

from __future__ import annotations

from tidemill.base.clock import Clock
from tidemill.base.limits import MIB
from tidemill.base.lsn import Lsn
from tidemill.metastore.catalogue import CaptureTableRow, SideTopicState

MAX_FRUITLESS_ATTEMPTS = 10
"""Limit of attempts to resume an interrupted copy without completing another chunk. Then its WAL is released."""


class SetUpSteps:
    """The work of a set-up or a copy before and after its rows: how much is done, and the current step."""

    def __init__(self) -> None:
        self.count = 0
        self.doing = ""
        self._furthest = ("", -1)

    def begin_table_step(self, what: str, number: int, of: int) -> None:
        """Begin the `number`th of `of` tables. A table that is retried is no progress."""
        if what != self._furthest[0] or number > self._furthest[1]:
            self._furthest = what, number
            self.count += 1
        self.doing = f"{what}: {number} of {of} tables"

    def begin_phase(self, what: str) -> None:
        """Begin a step that is not counted by tables."""
        self._furthest = what, -1
        self.count += 1
        self.doing = what

    def end(self) -> None:
        self.doing, self._furthest = "", ("", -1)


class SnapshotProgress:
    """Rows copied so far, rows expected (the planner's estimate, or an extrapolation of the completed chunks), and rows
    per second since the start. `chunks_done` and `chunks` count the chunks of all tables of the copy (chunks.py).

    `held_by`: what the copy currently waits for, if it is stalled. `blocked`: the session whose lock blocks it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._ended_s: float | None = None
        self.steps = SetUpSteps()
        self.rows = 0
        self.estimate = 0
        self.chunks = 0
        self.chunks_done = 0
        self.table = ""
        self.cause = ""
        """Reason for the copy of tables that were captured before."""
        self.held_by = ""
        self.blocked = ""
        self.done = False
        self.side_topic: SideTopicState | None = None
        """The side topic of the table that is being copied."""
        self._appends = False
        self._earlier = 0
        self._retained_bytes = 0
        self._headroom_bytes: int | None = None

    def add_table(self, rows: int, chunks: int, chunks_done: int) -> None:
        """Add a table that is cut into chunks, of which an earlier session copied `chunks_done` chunks with `rows`
        rows.
        """
        self.rows += rows
        self._earlier += rows
        self.chunks += chunks
        self.chunks_done += chunks_done

    def record_wal(self, retained_bytes: int, headroom_bytes: int | None) -> None:
        """Note the WAL that the slot retains, and how much more it may retain; None = no limit."""
        self._retained_bytes, self._headroom_bytes = retained_bytes, headroom_bytes

    def append(self, table: str, held_by: str) -> None:
        """Note that this or an earlier session has copied the table completely, and that its side topic is being
        appended.
        """
        self.table, self.held_by, self._appends = table, held_by, True

    @property
    def moved(self) -> int:
        """Position of the stage status: rows, and records that are appended after them."""
        return self.rows + (self.side_topic.appended if self.side_topic is not None else 0)

    def finish(self) -> None:
        self.done = True
        self._ended_s = self._clock.monotonic_s()

    @property
    def sentence(self) -> str:
        return f"{self._sentence}; {self.cause}" if self.cause else self._sentence

    @property
    def _sentence(self) -> str:
        if self.blocked:
            return f"the copy waits for another session: {self.blocked}"
        if self.steps.doing:
            return self.steps.doing
        if not self.table:
            return "waits to be copied"
        left_s = self.left_s
        side_topic = self.side_topic
        if self._appends and side_topic is not None:
            return f"appending the side topic of {self.table}: {side_topic.appended} of {side_topic.records} records"
        parts = [
            f"copying {self.table}: {self.rows} of about {self.expected} rows",
            f"{self.rows_per_s:.0f} rows/s",
            *([f"about {left_s} s left"] if left_s is not None else []),
            f"{self.chunks_done} of {self.chunks} chunks",
        ]
        if side_topic is not None:
            parts.append(f"{side_topic.records} changes ({side_topic.bytes // MIB} MiB) in the side topic")
        if side_topic is not None and side_topic.until_lsn:
            parts.append(f"WAL is retained since {Lsn(side_topic.until_lsn)}")
        if self._retained_bytes >= MIB:
            limit = "" if self._headroom_bytes is None else f" and may retain {self._headroom_bytes // MIB} more"
            parts.append(f"the slot retains {self._retained_bytes // MIB} MiB of WAL{limit}")
        return ", ".join(parts)

    @property
    def rows_per_s(self) -> float:
        end_s = self._ended_s if self._ended_s is not None else self._clock.monotonic_s()
        return (self.rows - self._earlier) / max(end_s - self._started_s, 1e-3)

    @property
    def expected(self) -> int:
        if self.done:
            return self.rows
        led_to = self.rows * self.chunks // self.chunks_done if self.chunks_done and not self.estimate else 0
        return max(self.rows, self.estimate, led_to)

    @property
    def left_s(self) -> int | None:
        """Estimated seconds until the end; None = it is done, or there is no estimate."""
        left, rate = self.expected - self.rows, self.rows_per_s
        return int(left / rate) if not self.done and left > 0 and rate >= 1 else None


class CopyAttempts:
    """Attempts to resume interrupted copies. The count of a table restarts with each chunk and each new copy."""

    def __init__(self) -> None:
        self._fruitless: dict[str, tuple[str, int, int]] = {}
        """Table → topic of the copy, what was done at the last attempt (chunks, and records appended after them), and
        the number of attempts since.
        """

    def count(self, row: CaptureTableRow) -> bool:
        """Count an attempt to resume the table's copy, and return whether another one is allowed."""
        if row.copy is None:
            return False
        topic_id, done, tries = self._fruitless.get(row.table, ("", 0, 0))
        now = row.copy.done + (row.side_topic.appended if row.side_topic is not None else 0)
        tries = tries + 1 if (topic_id, done) == (row.copy.topic_id, now) else 1
        self._fruitless[row.table] = (row.copy.topic_id, now, tries)
        return tries < MAX_FRUITLESS_ATTEMPTS
