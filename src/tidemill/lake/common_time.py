"""The time of a publication: one for all tables of a capture, so that they can be read together. Pure.

A table is left out of the common time while its upper is not above the since of another: no time exists at which both
can be read. It is published at its own time, like a derived table and a table of a topic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.metastore.rows.catalogue import PipelineRow, source_of
from tidemill.shards.state.state import ShardState


def common_sources(pipelines: Sequence[PipelineRow]) -> dict[str, str]:
    """Return the source of bindings of each table that is published at the common time of a capture."""
    fed = {table: fed_by for row in pipelines for table, fed_by in row.tables.items()}
    return {table: source_of(fed_by) for table, fed_by in fed.items() if fed_by.startswith("capture:")}


def publication_times(states: Sequence[ShardState], sources: Mapping[str, str]) -> dict[str, int]:
    """Return the time of each table by its name. A table without any time yet is absent."""
    groups: dict[str, list[ShardState]] = {}
    times = {}
    for state in states:
        if not state.upper:
            continue
        if state.name in sources:
            groups.setdefault(sources[state.name], []).append(state)
        times[state.name] = state.upper - 1
    for members in groups.values():
        members.sort(key=lambda state: state.upper)
        while members[0].upper <= max(state.since for state in members):
            del members[0]  # ends with a single table at the latest, since since < upper
        times |= {state.name: members[0].upper - 1 for state in members}
    return times
