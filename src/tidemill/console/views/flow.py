"""The flow of data through a cluster, as a graph of five columns: sources, topics, pipelines, tables, live clients.

    capture:shop ─► its topics ─┐                      ┌─► table orders ─┐
                                ├─► pipeline shop ─────┤                 ├─► live clients
    producers ───► topic:clicks ┘                      └─► table clicks ─┘

An edge has the freshness of what it delivers: how many ms its end is behind its beginning. A column shows at most
COLUMN_MAX nodes, the worst ones; one node stands for all others, with the delay of the slowest. So the size of the
graph does not grow with the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidemill.base.status.freshness import SHARD
from tidemill.base.status.status import DerivedStatus, StageState, StatusReport, lag_of, severity_of
from tidemill.console.views.sentences import describe_name, describe_state

if TYPE_CHECKING:
    from tidemill.metastore.rows.catalogue import PipelineRow

COLUMNS = ("sources", "topics", "pipelines", "tables", "clients")
COLUMN_MAX = 12
PRODUCERS = "producers"
SHAPES_OF_TABLES = "shapes:shards"


@dataclass
class Catalogued:
    """Contents of the catalogue: stream topic → partitions, capture → number of tables, and pipelines."""

    topics: Mapping[str, int] = field(default_factory=dict)
    captures: Mapping[str, int] = field(default_factory=dict)
    pipelines: Sequence[PipelineRow] = ()


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


def table_places(marks: Mapping[str, DerivedStatus], pipelines: Iterable[PipelineRow]) -> list[dict[str, Any]]:
    """Return every table that a pipeline maintains or a process reports: its input, its pipeline and its delay."""
    rows = {
        table: (row.name, ", ".join(row.derived[table]) if table in row.derived else fed_by)
        for row in pipelines
        for table, fed_by in row.tables.items()
    }
    reported = {name.removeprefix(SHARD) for name in marks if name.startswith(SHARD) and "@" not in name}
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
        "held_by": describe_name(mark.held_by) if mark.held_by else "",
        "reason": mark.reason,
        "upper": mark.position if mark.unit == "ms" else 0,
    }


class _Flow:
    def __init__(self, marks: Mapping[str, DerivedStatus], catalogued: Catalogued) -> None:
        self._marks = marks
        self._catalogued = catalogued
        self._nodes: dict[str, dict[str, dict[str, Any]]] = {column: {} for column in COLUMNS}
        self._edges: dict[tuple[str, str], DerivedStatus | None] = {}

    def build(self, reports: Iterable[StatusReport]) -> dict[str, Any]:
        self._add_captures()
        self._add_topics()
        self._add_pipelines()
        self._add_clients(reports)
        columns, stands_for = [], dict[str, str]()
        for column in COLUMNS:
            shown, more = _fold(self._nodes[column])
            stands_for |= {name: f"more:{column}" for name in self._nodes[column] if name not in shown}
            columns.append({"name": column, "nodes": [node for _, node in shown.items()], "more": more})
        edges: dict[tuple[str, str], DerivedStatus | None] = {}
        for (begin, end), derived in self._edges.items():
            key = stands_for.get(begin, begin), stands_for.get(end, end)
            edges[key] = _worse(edges.get(key), derived)
        return {"columns": columns, "edges": [_edge_row(*key, derived) for key, derived in edges.items()]}

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
            # A node with many topics has one status for those that are at their target.
            status = name if name in self._marks else "topics"
            self._add("topics", name, topic, _count(partitions, "partition"), status=status)
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

    def _add(self, column: str, name: str, title: str, note: str, status: str | None = None) -> None:
        derived = self._marks.get(name if status is None else status)
        self._nodes[column][name] = {
            "name": name,
            "title": title,
            "note": note,
            "state": "idle" if status == "" else str(derived.state) if derived is not None else "",
            "behind_ms": behind_ms(derived) if derived is not None else None,
            "sentence": describe_state(derived) if derived is not None else "",
            "severity": severity_of(derived) if derived is not None else (0, 0),
        }

    def _connect(self, begin: str, end: str, status: str) -> None:
        derived = self._marks.get(status)
        self._edges[begin, end] = _worse(self._edges.get((begin, end)), derived)


def _fold(nodes: Mapping[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Return the shown nodes in their order, and the row that stands for the others."""
    chosen = set(nodes)
    if len(nodes) > COLUMN_MAX:
        by_severity = sorted(nodes, key=lambda name: nodes[name]["severity"], reverse=True)
        chosen = set(by_severity[: COLUMN_MAX - 1])
    shown = {name: {k: v for k, v in nodes[name].items() if k != "severity"} for name in nodes if name in chosen}
    others = [node for name, node in nodes.items() if name not in chosen]
    if not others:
        return shown, None
    worst = max(others, key=lambda node: node["severity"])
    late = max((node["behind_ms"] or 0 for node in others), default=0)
    return shown, {"count": len(others), "state": worst["state"], "behind_ms": late}


def _worse(one: DerivedStatus | None, other: DerivedStatus | None) -> DerivedStatus | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda derived: (severity_of(derived)[0], behind_ms(derived) or 0))


def _edge_row(begin: str, end: str, derived: DerivedStatus | None) -> dict[str, Any]:
    return {
        "from": begin,
        "to": end,
        "state": str(derived.state) if derived is not None else "",
        "behind_ms": behind_ms(derived) if derived is not None else None,
    }


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
