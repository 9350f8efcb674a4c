"""The flow of data through a cluster, as a graph of five columns: sources, topics, pipelines, tables, live clients.

    capture:shop ─► its topics ─┐                      ┌─► table orders ─┐
                                ├─► pipeline shop ─────┤                 ├─► live clients
    producers ───► topic:clicks ┘                      └─► table clicks ─┘

An edge has the freshness of what it delivers: how many ms its end is behind its beginning. A column shows at most
COLUMN_MAX nodes, the worst ones; one node stands for all others, with the delay of the slowest. So the size of the
graph does not grow with the cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tidemill.base.status.freshness import SHARD
from tidemill.base.status.status import (
    NODE,
    DerivedStatus,
    StageState,
    StatusReport,
    derive_process,
    lag_of,
    severity_of,
)
from tidemill.console.views.sentences import describe_name, describe_state

if TYPE_CHECKING:
    from tidemill.metastore.rows.catalogue import PipelineRow

COLUMNS = ("sources", "topics", "pipelines", "tables", "clients")
COLUMN_MAX = 12
PRODUCERS = "producers"
SHARED_TOPICS = "topics"
"""Status of all topics at their target, where a node has too many for one status each."""
SHAPES_OF_TABLES = "shapes:shards"
EMPTY, UNUSED = "empty", "unused"
"""States of topics without a status."""
_SENTENCES = {
    EMPTY: "The topic has no records yet.",
    UNUSED: "No client has written to or read the topic since its nodes started.",
}


@dataclass
class Catalogued:
    """Contents of the catalogue: stream topic → partitions, capture → number of tables, and pipelines.

    `unwritten` topics never had a record. `unused` ones have, but no node has used them since its start.
    """

    topics: Mapping[str, int] = field(default_factory=dict)
    captures: Mapping[str, int] = field(default_factory=dict)
    pipelines: Sequence[PipelineRow] = ()
    unwritten: Collection[str] = ()
    unused: Collection[str] = ()


def unreported_topics(reports: Sequence[StatusReport], topics: Iterable[str], now_ms: int) -> list[str]:
    """Return the topics that no live node reports, though one could: no client has used them since it started."""
    nodes = [report for report in reports if report.process.startswith(NODE)]
    reported = {mark.name for report in nodes for mark in report.marks}
    if SHARED_TOPICS in reported or all(derive_process(node, now_ms).state is StageState.BLIND for node in nodes):
        return []
    return [topic for topic in topics if f"topic:{topic}" not in reported]


def behind_ms(derived: DerivedStatus) -> int | None:
    """Return how far a stage is behind its input in ms; None if no time is known yet.

    A stage in ms states it. Of any other one that is not at its target, its input has waited since it last advanced.
    """
    if derived.state is StageState.BLIND:
        return derived.report_age_ms
    if derived.state is StageState.IDLE:
        return 0
    return lag_of(derived.mark) if derived.mark.unit == "ms" else derived.standing_ms


def flow_graph(
    marks: Mapping[str, DerivedStatus], catalogued: Catalogued, reports: Iterable[StatusReport]
) -> dict[str, Any]:
    """Return {"columns": [{"name", "nodes", "more"}], "edges": [{"from", "to", "state", "behind_ms"}]}."""
    return _Flow(marks, catalogued).build(reports)


def table_places(
    marks: Mapping[str, DerivedStatus], pipelines: Iterable[PipelineRow], only: str = ""
) -> list[dict[str, Any]]:
    """Return every table that a pipeline maintains or a process reports: its input, its pipeline and its delay.

    With `only`, return at most the row of that table.
    """
    rows = {
        table: (row.name, ", ".join(row.derived[table]) if table in row.derived else fed_by)
        for row in pipelines
        for table, fed_by in row.tables.items()
        if only in ("", table)
    }
    reported = {
        name.removeprefix(SHARD)
        for name in marks
        if name.startswith(SHARD) and "@" not in name and only in ("", name.removeprefix(SHARD))
    }
    found = []
    for table in sorted({*rows, *reported}):
        derived = marks.get(SHARD + table)
        pipeline, fed_by = rows.get(table, ("", ""))
        found.append({"table": table, "pipeline": pipeline, "input": fed_by, **_place(derived)})
    return found


def _place(derived: DerivedStatus | None) -> dict[str, Any]:
    if derived is None:
        return {"state": "", "behind_ms": None, "held_by": "", "reason": "No process reports this table.", "upper": 0}
    mark = derived.mark
    return {
        "state": str(derived.state),
        "behind_ms": behind_ms(derived),
        "held_by": describe_name(derived.blocker) if derived.blocker else "",
        "reason": mark.reason,
        "upper": mark.position if mark.unit == "ms" else 0,
    }


class _Flow:
    def __init__(self, marks: Mapping[str, DerivedStatus], catalogued: Catalogued) -> None:
        self._marks = marks
        self._catalogued = catalogued
        self._nodes: dict[str, dict[str, _Node]] = {column: {} for column in COLUMNS}
        self._edges: dict[tuple[str, str], _Delay] = {}
        self._delays: dict[str, _Delay] = {}
        """Delay of each status that was looked up."""

    def build(self, reports: Iterable[StatusReport]) -> dict[str, Any]:
        self._add_captures()
        self._add_topics()
        self._add_pipelines()
        self._add_clients(reports)
        columns, stands_for = [], dict[str, str]()
        for column in COLUMNS:
            shown, more = _fold(self._nodes[column])
            stands_for |= {name: f"more:{column}" for name in self._nodes[column] if name not in shown}
            columns.append({"name": column, "nodes": [node.row() for node in shown.values()], "more": more})
        edges: dict[tuple[str, str], _Delay] = {}
        for (begin, end), delay in self._edges.items():
            key = stands_for.get(begin, begin), stands_for.get(end, end)
            edges[key] = max(edges.get(key, delay), delay)
        rows = [{"from": begin, "to": end, **delay.row()} for (begin, end), delay in edges.items()]
        return {"columns": columns, "edges": rows}

    def _add_captures(self) -> None:
        reported = {
            name.removeprefix("capture:") for name in self._marks if name.startswith("capture:") and "/" not in name
        }
        for capture in sorted({*self._catalogued.captures, *(name for name in reported if "@" not in name)}):
            tables = self._catalogued.captures.get(capture, 0)
            self._add("sources", f"capture:{capture}", capture, "database")
            self._add("topics", f"capture:{capture}/topics", capture, _count(tables, "captured table"))
            self._connect(f"capture:{capture}", f"capture:{capture}/topics", f"capture:{capture}/topics")

    def _add_topics(self) -> None:
        if self._catalogued.topics:
            self._add("sources", PRODUCERS, "producers", "Kafka", status="")
        for topic, partitions in self._catalogued.topics.items():
            name = f"topic:{topic}"
            # A node with many topics has one status for all topics that are at their target.
            status = name if name in self._marks else SHARED_TOPICS
            rest = EMPTY if topic in self._catalogued.unwritten else UNUSED if topic in self._catalogued.unused else ""
            self._add("topics", name, topic, _count(partitions, "partition"), status=status, rest=rest)
            self._connect(PRODUCERS, name, status)

    def _add_pipelines(self) -> None:
        for row in self._catalogued.pipelines:
            pipeline = f"pipeline:{row.name}"
            self._add("pipelines", pipeline, row.name, _count(len(row.tables), "table"))
            for table, fed_by in row.tables.items():
                name = SHARD + table
                self._add("tables", name, table, _input_note(table, row))
                self._connect(pipeline, name, name)
                source = _topic_node(fed_by)
                if source in self._nodes["topics"]:
                    self._connect(source, pipeline, name)

    def _add_clients(self, reports: Iterable[StatusReport]) -> None:
        count = 0
        for report in reports:
            shapes = report.facts.get("shapes")
            count += int(shapes.get("shapes", 0)) if isinstance(shapes, dict) else 0
        names = [name for name in self._marks if name == "shapes" or name.startswith("shapes:")]
        worst = max((self._marks[name] for name in names), key=severity_of, default=None)
        status = worst.mark.name if worst is not None else ""
        self._add("clients", "clients", "live clients", _count(count, "shape"), status=status)
        for name in names:
            kind = name.partition(":")[2]
            capture = f"capture:{kind}"
            if capture in self._nodes["sources"]:
                self._connect(f"{capture}/topics", "clients", name)
        if SHAPES_OF_TABLES in self._marks:
            for table in self._nodes["tables"]:
                self._connect(table, "clients", SHAPES_OF_TABLES)

    def _add(self, column: str, name: str, title: str, note: str, status: str | None = None, rest: str = "") -> None:
        delay = self._delay(name if status is None else status)
        rest = str(StageState.IDLE) if status == "" else rest
        self._nodes[column][name] = _Node(name, title, note, delay, rest)

    def _connect(self, begin: str, end: str, status: str) -> None:
        delay = self._delay(status)
        self._edges[begin, end] = max(self._edges.get((begin, end), delay), delay)

    def _delay(self, status: str) -> _Delay:
        found = self._delays.get(status)
        if found is None:
            found = self._delays[status] = _Delay.of(self._marks.get(status))
        return found


class _Delay(NamedTuple):
    """Delay of one status, ordered from none to the worst. `behind_ms` None: unknown, which sorts like 0."""

    severity: int
    late_ms: int
    order: int
    behind_ms: int | None
    derived: DerivedStatus | None

    @classmethod
    def of(cls, derived: DerivedStatus | None) -> _Delay:
        if derived is None:
            return cls(-1, 0, -1, None, None)
        late_ms = behind_ms(derived)
        return cls(severity_of(derived)[0], late_ms or 0, id(derived), late_ms, derived)

    @property
    def state(self) -> str:
        return "" if self.derived is None else str(self.derived.state)

    def row(self) -> dict[str, Any]:
        return {"state": self.state, "behind_ms": self.behind_ms}


class _Node(NamedTuple):
    """Box of the graph. `rest` is its state while no process reports it: of something outside, or without work."""

    name: str
    title: str
    note: str
    delay: _Delay
    rest: str

    def row(self) -> dict[str, Any]:
        derived = self.delay.derived
        return {
            "name": self.name,
            "title": self.title,
            "note": self.note,
            "state": self.delay.state or self.rest,
            "behind_ms": self.delay.behind_ms,
            "sentence": describe_state(derived) if derived is not None else _SENTENCES.get(self.rest, ""),
        }


def _fold(nodes: Mapping[str, _Node]) -> tuple[dict[str, _Node], dict[str, Any] | None]:
    """Return the shown nodes in their order, and the row that stands for the others."""
    if len(nodes) <= COLUMN_MAX:
        return dict(nodes), None
    worst_first = sorted(nodes, key=lambda name: nodes[name].delay[:2], reverse=True)
    chosen = set(worst_first[: COLUMN_MAX - 1])
    others = [nodes[name].delay for name in worst_first[COLUMN_MAX - 1 :]]
    late_ms = max(delay.late_ms for delay in others)
    shown = {name: node for name, node in nodes.items() if name in chosen}
    return shown, {"count": len(others), "state": others[0].state, "behind_ms": late_ms}


def _topic_node(fed_by: str) -> str:
    """Return the node that feeds a table: `capture:<name>:<table>` is one of the capture's topics."""
    kind, _, rest = fed_by.partition(":")
    return f"capture:{rest.partition(':')[0]}/topics" if kind == "capture" else fed_by


def _input_note(table: str, row: PipelineRow) -> str:
    if table in row.derived:
        return f"derived from {', '.join(row.derived[table])}"
    kind, _, rest = row.tables[table].partition(":")
    return rest.partition(":")[2] if kind == "capture" else f"{kind} {rest}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
