"""How far a copy is, and what it costs meanwhile: rows, rate, what is left, and the WAL that its slot keeps."""

from __future__ import annotations

from tidemill.base.clock import Clock
from tidemill.base.limits import MIB
from tidemill.base.lsn import Lsn
from tidemill.metastore.catalogue import SetAside


class Steps:
    """The work of a set-up or a copy before its rows and behind them: how much is done, and what is done just now."""

    def __init__(self) -> None:
        self.count = 0
        self.doing = ""
        self._furthest = ("", -1)

    def step(self, what: str, number: int, of: int) -> None:
        """The `number`th of so many tables begins. A table that is tried again is no progress."""
        if what != self._furthest[0] or number > self._furthest[1]:
            self._furthest = what, number
            self.count += 1
        self.doing = f"{what}: {number} of {of} tables"

    def phase(self, what: str) -> None:
        """A piece of work begins that is not counted by tables."""
        self._furthest = what, -1
        self.count += 1
        self.doing = what

    def end(self) -> None:
        self.doing, self._furthest = "", ("", -1)


class SnapshotProgress:
    """Rows copied so far, rows expected (the planner's estimate, or what the chunks that are done lead to), rows per
    second since the start. `chunks_done` of `chunks`: of all its tables (chunks.py).

    `held_by`: whom the copy waits for just now, should it stand; `blocked`: the session whose lock is in its way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._ended_s: float | None = None
        self.steps = Steps()
        self.rows = 0
        self.estimate = 0
        self.chunks = 0
        self.chunks_done = 0
        self.table = ""
        self.cause = ""
        """Why tables are copied though they were captured before."""
        self.held_by = ""
        self.blocked = ""
        self.done = False
        self.aside: SetAside | None = None
        """Of the table that is copied."""
        self._appends = False
        self._earlier = 0
        self._retained_bytes = 0
        self._headroom_bytes: int | None = None

    def expect(self, rows: int, chunks: int, chunks_done: int) -> None:
        """A table that is cut into chunks, of which so many, with `rows` rows, were copied by an earlier session."""
        self.rows += rows
        self._earlier += rows
        self.chunks += chunks
        self.chunks_done += chunks_done

    def saw_wal(self, retained_bytes: int, headroom_bytes: int | None) -> None:
        """Of the slot; None = no limit."""
        self._retained_bytes, self._headroom_bytes = retained_bytes, headroom_bytes

    def append(self, table: str, held_by: str) -> None:
        """It is copied whole, by now or by an earlier session: what was set aside of it follows."""
        self.table, self.held_by, self._appends = table, held_by, True

    @property
    def moved(self) -> int:
        """What a mark moves with: rows, and records that are appended behind them."""
        return self.rows + (self.aside.appended if self.aside is not None else 0)

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
        aside = self.aside
        if self._appends and aside is not None:
            return f"appending what was set aside of {self.table}: {aside.appended} of {aside.records} records"
        parts = [
            f"copying {self.table}: {self.rows} of about {self.expected} rows",
            f"{self.rows_per_s:.0f} rows/s",
            *([f"about {left_s} s left"] if left_s is not None else []),
            f"{self.chunks_done} of {self.chunks} chunks",
        ]
        if aside is not None:
            parts.append(f"{aside.records} changes ({aside.bytes // MIB} MiB) set aside")
        if aside is not None and aside.until_lsn:
            parts.append(f"WAL is kept since {Lsn(aside.until_lsn)}")
        if self._retained_bytes >= MIB:
            limit = "" if self._headroom_bytes is None else f" and may keep {self._headroom_bytes // MIB} more"
            parts.append(f"the slot keeps {self._retained_bytes // MIB} MiB of WAL{limit}")
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
        """None = it is done, or nothing tells."""
        left, rate = self.expected - self.rows, self.rows_per_s
        return int(left / rate) if not self.done and left > 0 and rate >= 1 else None
