"""Compare the rows of clients and the folded topics with SELECT while the writers are paused.

A difference that may still be in progress is checked again until a deadline. A client that shows different rows
although it claims to be up to date is a failure without a retry. Each finding is a sentence with the table, the clause
and the rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oracle_large
from oracle_follower import Follower, View
from oracle_history import History, Row, Shown
from oracle_shards import PIPELINE, UNTIL_S, found_of, shard_of, unlike, wanted_of
from oracle_stock import StockClient, quoted_array
from oracle_tables import Table
from oracle_topics import alike, read_topic, table_of, twice
from psycopg import DataError, ProgrammingError

from support.waiting import slowness
from tidemill.base.errors import TidemillError
from tidemill.capture.delivery.deferrable_keys import WAITING_BYTES
from tidemill.capture.naming import table_name
from tidemill.metastore.catalogue import CaptureTableRow

SETTLE_S = 45.0
COPIED_S = 180.0
"""Limit where every table may have to be copied again after a kill of the node."""
CONFIRM_S = 5.0
"""Limit for confirming the last commit to PostgreSQL once it is durable, that is, once a consumer reads it, on an idle
machine. Shapes must have evaluated it, too."""
EXAMPLES = 3
LEDGER = "public.ledger"
Mark = tuple[int, str]
"""A row of the ledger: (n, what). A promoted standby may give a lost row's `n` to another."""


@dataclass
class Shape:
    """A shape, its selection, and the clients that follow it."""

    table: Table
    where: str
    columns: list[str]
    """Selected columns; () = all."""
    breaks: int = 0
    """Number of columns of its table that had been renamed or dropped when it was created."""
    clients: list[Follower | StockClient] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Return whether its clause or columns may belong to an outdated description of the table."""
        return self.table.gone or self.table.breaks > self.breaks

    def __str__(self) -> str:
        return f"{self.table.sql_name} where={self.where!r} columns={self.columns or 'all'}"


@dataclass
class Source:
    """Inputs of the judge. `rows` is the capture's catalogue by table, `select` runs a statement."""

    capture: str
    brokers: str
    select: Callable[[str], list[tuple[Any, ...]]]
    rows: Callable[[], Mapping[str, CaptureTableRow]]
    marks: Callable[[], Mapping[str, Mapping[str, Any]]]
    confirmed_lsn: Callable[[], int]
    shards: Path | None = None
    """The cluster's configuration file, if a pipeline keeps the first tables."""


class Judge:
    def __init__(self, source: Source, history: History) -> None:
        self._source = source
        self._history = history
        self._lsn_of: dict[int, int] = {}
        self._bounded: set[int] = set()
        """Transactions whose ledger row was copied: `_lsn_of` is only an upper bound of their commit."""
        self._last_lsn = 0
        self.settle_s = SETTLE_S
        self._moved: dict[Follower | StockClient, int] = {}
        self.counts: Counter[str] = Counter()
        self.settled_s: list[dict[str, float]] = []
        """Durations of each pause: how long each kind of result took to be correct."""

    def judge(self, mark: Mark, tables: Sequence[Table], shapes: Sequence[Shape], large: Sequence[Shape] = ()) -> None:
        """Judge the world. `mark`: the ledger's last row; `large`: shapes over that table. Raises AssertionError with
        all findings."""
        began_s = time.monotonic()
        took_s = {"ledger": self._until(lambda: self._ledger(mark))}
        last_lsn = self._last_lsn
        took_s["confirmed"] = self._until(lambda: self._confirmed(last_lsn), CONFIRM_S * slowness())
        took_s["states"] = self._until(lambda: self._states(tables))
        took_s["shapes"] = self._until(lambda: [found for s in [*shapes, *large] for found in self._shape(s, last_lsn)])
        took_s["topics"] = self._until(lambda: [found for table in tables for found in self._topic(table)])
        if large:
            took_s["large"] = self._until(self._large)
        if self._source.shards is not None:
            took_s["shards"] = self._until(lambda: self._shards(tables), UNTIL_S)
        took_s["marks"] = self._until(self._marks)
        took_s["all"] = round(time.monotonic() - began_s, 1)
        self.settled_s.append(took_s)
        problems = [found for shape in shapes for found in self._never_shown(shape)]
        assert not problems, "\n".join(problems)
        self.counts["pauses"] += 1
        self._moved, self.settle_s = {}, SETTLE_S

    def captured(self, mark: Mark) -> None:
        """Wait until the mark and all earlier commits are captured."""
        self._until(lambda: self._ledger(mark))

    def moved(self, shapes: Sequence[Shape], cut_lsn: int) -> None:
        """Note a failover of the database: until the next judgement, every client that holds rows must start over.
        Commits above `cut_lsn` are lost, and their xids are reused."""
        self._lsn_of = {xid: lsn for xid, lsn in self._lsn_of.items() if lsn <= cut_lsn}
        self._bounded &= self._lsn_of.keys()
        self._moved = dict(self.held(shapes))
        self.settle_s = COPIED_S

    @staticmethod
    def held(shapes: Sequence[Shape]) -> list[tuple[Follower | StockClient, int]]:
        """Return each client that holds a shape, and the number of times that it started over."""
        views = [(client, client.view()) for s in shapes if not s.over for client in s.clients]
        return [(client, view.refetches) for client, view in views if view.complete and not view.refused]

    def _until(self, problems: Callable[[], list[str]], settle_s: float = 0.0) -> float:
        began_s, settle_s = time.monotonic(), settle_s or self.settle_s
        deadline = began_s + settle_s
        while found := problems():
            assert time.monotonic() < deadline, f"not within {settle_s:.0f} s:\n" + "\n".join(found)
            time.sleep(0.2)
        return round(time.monotonic() - began_s, 1)

    # the capture -----------------------------------------------------------------------------------
    def _ledger(self, mark: Mark) -> list[str]:
        """Compare the ledger's topic with its table, and learn the commit LSN of each transaction."""
        row = self._source.rows().get(LEDGER)
        if row is None or not row.is_streaming:
            return [f"{LEDGER} does not flow: {row}"]
        records = read_topic(self._source.brokers, row.topic)
        if self._source.rows().get(LEDGER) != row:
            return [f"{LEDGER} was copied again, or described, while its topic was read"]
        if not any(r.value is not None and (int(r.value["n"]), r.value["what"]) == mark for r in records):
            return [f"the topic of {LEDGER} has not the row {mark}"]
        # Not before: until its copy is made, the topic has transactions that a failover lost, whose xids others have.
        copied_lsn = row.snapshot.lsn if row.snapshot is not None else 0
        for record in records:
            if record.value is not None:  # of what was copied again since, its commit is known from before
                xid = int(record.value["xid"])
                if xid not in self._lsn_of and not record.place[0]:
                    self._bounded.add(xid)
                self._lsn_of.setdefault(xid, record.place[0] or copied_lsn)
        self._last_lsn = max((r.place[0] for r in records), default=0)
        wrong = [f"a place stands twice in the topic of {LEDGER}: {record}" for record in twice(records)]
        assert not wrong, wrong
        return []

    def _confirmed(self, last_lsn: int) -> list[str]:
        confirmed = self._source.confirmed_lsn()
        return [] if confirmed > last_lsn else [f"confirmed_flush_lsn is {confirmed}, the last commit at {last_lsn}"]

    def _states(self, tables: Sequence[Table]) -> list[str]:
        rows, problems = self._source.rows(), []
        for table in tables:
            row = rows.get(table_name(table.schema, table.name))
            if table.gone:
                if row is not None and row.state != "dropped":
                    problems.append(f"{table.sql_name} is gone, and {row.state}")
            elif row is None:
                problems.append(f"{table.sql_name} is not known to the capture")
            elif table.listed and row.state in ("refused", "parked") and f"publication={table.listed}" in row.reason:
                self.counts[f"{row.state} beside a column list"] += 1
            elif row.state == "parked" and not row.recopy and table.may_be_paused(row.reason):
                self.counts["parked"] += 1
            elif row.is_streaming and {c.name for c in row.columns} != set(table.names):
                problems.append(f"{table.sql_name} has columns {table.names}, captured {[c.name for c in row.columns]}")
            elif not row.is_streaming or row.recopy or table.listed:
                problems.append(
                    f"{table.sql_name} is {row.state}, copied={row.snapshot is not None}, changes={table.changed}:"
                    f" {row.reason}"
                )
        return problems

    def _marks(self) -> list[str]:
        """Return the marks that are stuck without a permitted reason. Permitted are a table with an error, its shard,
        the shard of a table whose new copy differs, and the pipeline that such a shard holds."""
        marks = self._source.marks()
        waiting = {name for name, mark in marks.items() if _waits_for_a_person(name, mark)}
        for name, mark in marks.items():
            table = marks.get(mark["upstream"], {}) if name.startswith("shard:") else {}
            if mark["upstream"].startswith("table:") and table.get("state") == "stuck" and table.get("error"):
                waiting.add(name)
        return [
            f"mark {name} is stuck: {mark}"
            for name, mark in marks.items()
            if mark["state"] == "stuck"
            and not (name.startswith("table:") and mark.get("error"))
            and name not in waiting
            and not (name == f"pipeline:{PIPELINE}" and mark["held_by"] in waiting)
        ]

    # topics ----------------------------------------------------------------------------------------
    def _topic(self, table: Table) -> list[str]:
        row = None if table.gone else self._source.rows()[table_name(table.schema, table.name)]
        if row is None:
            return []
        paused = row.state == "parked"
        if table.listed and row.state == "refused":
            return []
        if not row.is_streaming and not paused:
            return [f"{table.sql_name} is {row.state}"]
        records = read_topic(self._source.brokers, row.topic)
        if paused:
            records = [record for record in records if record.place[0] < row.paused_lsn]
        if again := twice(records):
            return [f"a place stands twice in the topic of {table.sql_name}: {again[0]}"]
        found = table_of(row, records, table.key)
        if paused and any(
            version.xid in self._bounded and self._lsn_of.get(version.xid, 0) >= row.paused_lsn
            for version in self._history.of[table.number]
        ):
            self.counts["topics that ended before the ledger was copied"] += 1  # which commits they hold is not known
            return []
        if paused:
            lsn_of = {version.xid: self._lsn_of.get(version.xid, 0) for version in self._history.of[table.number]}
            wanted = self._history.state(table.number, table.key, lsn_of, row.paused_lsn)
            wanted = {key: {n: v for n, v in r.items() if n not in table.again} for key, r in wanted.items()}
        else:
            rows = [dict(zip(table.names, values, strict=True)) for values in self._source.select(table.select())]
            wanted = {tuple(r[name] for name in table.key): r for r in rows}
        kinds = {c.name: c.type_name for c in row.columns}
        what = f"the topic of {table.sql_name}" + (f" parked at {row.paused_lsn}: {row.reason}" if paused else "")
        if paused and table.deferrable:
            later = [v for v in self._history.of[table.number] if lsn_of[v.xid] >= row.paused_lsn]
            for key in [key for key in found if different("", {key: wanted.get(key)}, {key: found[key]}, kinds)]:
                rows = [v.new for v in later if v.new is not None and _key_in(table, v.new) == key]
                same = [r for r in rows if not different("", {key: r}, {key: found[key]}, kinds)]
                if same:  # the database answered with the row that a transaction behind the pause left there
                    wanted[key] = same[0]
                    self.counts["rows of after the pause"] += 1
            emptied = any(v.op == "T" for v in later)
            left = {_key_in(table, v.old) for v in later if v.old is not None}
            for key in [key for key in wanted if key not in found and (emptied or key in left)]:
                del wanted[key]  # it answered that a transaction behind the pause left no row there
                self.counts["rows that left after the pause"] += 1
        problems = different(what, wanted, found, kinds)
        self.counts["topics"] += not problems
        return [f"{problem} changes={table.changed}" for problem in problems]

    def _large(self) -> list[str]:
        row = self._source.rows()[table_name(oracle_large.TABLE.schema, oracle_large.TABLE.name)]
        if not row.is_streaming or row.recopy:
            return [f"{row.table} is {row.state}: {row.reason}"]
        rows = self._source.select(oracle_large.TABLE.select())
        found = oracle_large.differing(self._source.brokers, row.topic, rows)
        if self._source.rows().get(row.table) != row:
            return [f"{row.table} was copied again while its topic was read"]
        self.counts["large topics"] += not found
        return found

    # shards ----------------------------------------------------------------------------------------
    def _shards(self, tables: Sequence[Table]) -> list[str]:
        """Compare the shards of streaming tables. The shard of a table that changed again after its acceptance reports
        that and waits."""
        rows, marks = self._source.rows(), self._source.marks()
        waiting = {name for name, mark in marks.items() if _waits_for_a_person(name, mark)}
        self.counts["shards waiting"] += len(waiting)
        return [
            found
            for table in tables
            if table.kept and not (table.gone or table.broken or table.listed or f"shard:{shard_of(table)}" in waiting)
            if (row := rows.get(table_name(table.schema, table.name))) is not None and row.is_streaming
            for found in self._shard(table)
        ]

    def _shard(self, table: Table) -> list[str]:
        assert self._source.shards is not None
        wanted = wanted_of(table, self._source.select(table.select()))
        try:
            found = found_of(self._source.shards, table)
        except (TidemillError, KeyError) as error:
            return [f"shard {shard_of(table)} of {table.sql_name} cannot be read yet: {error}"]
        wrong = unlike(wanted, found)
        self.counts["shards"] += not wrong
        said = f"shard {shard_of(table)} of {table.sql_name}, changes={table.changed}: (key, wanted, found)"
        return [f"{said} {wrong[:EXAMPLES]}"] if wrong else []

    # shapes ----------------------------------------------------------------------------------------
    def _shape(self, shape: Shape, last_lsn: int) -> list[str]:
        table = shape.table
        row = self._source.rows().get(table_name(table.schema, table.name))
        if not table.gone and row is not None and row.is_streaming and shape.over:
            return []
        problems: list[str] = []
        names = shape.columns or table.names
        wanted = self._wanted(shape) if not table.gone and row is not None else None
        if row is None or wanted is None:
            return [
                f"{client.name} is not told that {shape} is over: {_said(view)}"
                for client, view in [(client, client.view()) for client in shape.clients]
                if not view.refused and (view.rows or view.complete)
            ]
        for client in shape.clients:
            view = client.view()
            if not row.is_streaming and ((shape.over and view.refused) or not (view.complete or view.rows)):
                continue  # its shape has ended; one without the changed columns continues, and is exact
            found = self._held(client, view, names, table)
            said = f"{client.name} of {shape}, changes={table.changed}, {_said(view)}"
            if view.refetches <= self._moved.get(client, -1):
                problems.append(f"{said}: the database failed over, and it is not told to start over")
                continue
            if found is None:
                other = next(row for row in view.rows.values() if row.keys() != set(names))
                problems.append(f"{said}: its rows have not the columns {names}: {other}")
                continue
            expected = {self._as_held(client, values, names, table) for values in wanted}
            if view.complete and expected == found:
                self.counts["views"] += 1
                continue
            lacks, extra = [*(expected - found)][:EXAMPLES], [*(found - expected)][:EXAMPLES]
            problem = f"{said}: lacks {lacks} shows too many {extra}"
            if view.complete and view.seen_lsn >= last_lsn and not table.changed:
                raise AssertionError(f"though it has seen {view.seen_lsn} of {last_lsn}: {problem}")
            problems.append(problem)
        return problems

    def _wanted(self, shape: Shape) -> dict[Shown, bool] | None:
        """Return the rows that it must show. None: the shape must end, because it selects all columns of an outdated
        description or because some of its columns are missing."""
        names = shape.columns or shape.table.names
        if shape.over and not (shape.columns and {*names} <= {*shape.table.names}):
            return None
        try:
            return {values: True for values in self._source.select(shape.table.select(names, shape.where))}
        except (ProgrammingError, DataError):  # a column of the clause is gone, or has another type
            if not shape.over:
                raise
            return None

    @staticmethod
    def _held(client: Any, view: View, names: Sequence[str], table: Table) -> set[Shown] | None:
        if any(row.keys() != set(names) for row in view.rows.values()):
            return None
        return {tuple(row[name] for name in names) for row in view.rows.values()}

    @staticmethod
    def _as_held(client: Any, values: Shown, names: Sequence[str], table: Table) -> Shown:
        if not isinstance(client, StockClient):
            return values
        return tuple(
            quoted_array(value) if value is not None and table.column(name).kind.endswith("[]") else value
            for name, value in zip(names, values, strict=True)
        )

    def _never_shown(self, shape: Shape) -> list[str]:
        """Return rows of clients that PostgreSQL never had, and keys that left without a delete or a change."""
        table, problems = shape.table, []
        for client in shape.clients:
            if isinstance(client, StockClient):
                continue
            rows, written = self._history.shown(table.number, client.columns)
            wrong: list[Any] = [
                shown
                for shown in client.shown
                if shown[1] not in rows or (shown[0] is not None and shown not in written)
            ]
            small = [x for x in client.took_over if self._history.size_bytes(table.number, x) < WAITING_BYTES // 4]
            if small:  # docs/guides/shapes.md; a message also has the old row
                problems.append(
                    f"{client.name} of {shape} was shown two rows of one key in a small transaction: {small}"
                )
            left = self._history.gone(table.number, table.key)
            wrong += [key for key in client.left if key not in left]
            if wrong:
                problems.append(f"{client.name} of {shape} showed what never was: {wrong[:EXAMPLES]}")
            self.counts["rows shown"] += len(client.shown)
        return problems


def _waits_for_a_person(name: str, mark: Mapping[str, Any]) -> bool:
    """Return whether a shard waits for an operator: the copy of its table has another description, or the table was
    dropped."""
    said = ("with another schema", "captured database has no such table")
    return name.startswith("shard:") and bool(mark.get("parked")) and any(each in mark["error"] for each in said)


def different(
    what: str, wanted: Mapping[Shown, Row], found: Mapping[Shown, Row], kinds: Mapping[str, str]
) -> list[str]:
    problems = []
    for key in wanted.keys() | found.keys():
        a, b = wanted.get(key), found.get(key)
        names = [] if a is None or b is None else [n for n in b if n in a and not alike(kinds[n], a[n], b[n])]
        if a is None or b is None or names:
            shown = f"{a} / {b}" if a is None or b is None else str({n: (a[n], b[n]) for n in names})
            problems.append(f"{what}: key {key}: wanted/found {shown}")
    return problems[:EXAMPLES]


def _key_in(table: Table, row: Row) -> Shown:
    return tuple(row.get(name) for name in table.key)


def _said(view: View) -> str:
    return f"complete={view.complete} seen={view.seen_lsn} refetches={view.refetches} refused={view.refused!r}"
