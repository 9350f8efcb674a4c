"""`tidemill why NAME`: the chain from a table or a stage to its source, and what blocks it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tidemill.base.config.config import Config
from tidemill.base.limits import FRESHNESS_BUDGET_MS
from tidemill.base.status.freshness import Verdict, resolve_status_name, verdict_of
from tidemill.base.status.status import DerivedStatus, lag_of, lag_text, severity_of, status_row
from tidemill.cli.cluster.status import Watch, read_stage_statuses, warn_if_all_silent, watch_screen
from tidemill.cli.context import (
    EXIT_STUCK,
    OPEN_TIMEOUT_S,
    ConfigOption,
    OpenConsensus,
    open_consensus_only,
    open_stores_of,
)
from tidemill.cli.output.output import TABLE, Output
from tidemill.console.views.stages import verdict_row

if TYPE_CHECKING:
    from tidemill.cli.context import OpenStores

Name = Annotated[
    str,
    typer.Argument(help="A stage, as shown by `tidemill status`, or a table. Default: the stage with the worst state."),
]


def why(name: Name = "", config: ConfigOption = None, watch: Watch = False, out: Output = TABLE) -> None:
    """Show how fresh a table is and what blocks it. Exit 0 fresh, 1 lagging, 3 stuck: the worst up to its source."""
    if watch:
        watch_screen(config, lambda opened, stack: _Explainer(name, opened, stack, out, watched=True).explain)
    with open_consensus_only(config, OPEN_TIMEOUT_S) as opened, ExitStack() as stack:
        raise SystemExit(_Explainer(name, opened, stack, out).explain())


class _Explainer:
    """Verdict on one name. The stores are opened when a name is no stage, and stay open until `stack` closes."""

    def __init__(
        self, name: str, opened: OpenConsensus, stack: ExitStack, out: Output, *, watched: bool = False
    ) -> None:
        self._name = name
        self._watched = watched
        self._opened = opened
        self._stack = stack
        self._out = out
        self._stores: OpenStores | None = None

    def explain(self) -> int:
        """Print the verdict, and return its exit code."""
        marks = read_stage_statuses(self._opened)
        name, note = self._name, ""
        try:
            start = resolve_status_name(marks, name) if name else max(marks, key=lambda n: severity_of(marks[n]))
        except KeyError:
            start, note = self._find_captured_table(marks)
        found = verdict_of(marks, start)
        silent = any(derived.report_age_ms > FRESHNESS_BUDGET_MS for derived in found.chain)
        holder = find_lock_intruder(self._opened.config) if silent else ""
        if holder:
            found = msgspec.structs.replace(found, root=holder)
        exit_code = EXIT_STUCK if holder else found.exit_code
        if self._out.is_text:
            print("\n".join([*([note] if note else []), *format_verdict(found, exit_code)]))
        else:
            rows = [status_row(derived) for derived in found.chain]
            self._out.rows(rows, value=verdict_row(found, exit_code, note))
        if not self._watched:
            warn_if_all_silent(marks)
        return exit_code

    def _find_captured_table(self, marks: Mapping[str, DerivedStatus]) -> tuple[str, str]:
        """Return the stage of a captured table, and a note. Raises MissingError."""
        from tidemill.console.captured_names import captured_table_stage
        from tidemill.metastore.catalogue import PipelineRow

        if self._stores is None:
            self._stores = self._stack.enter_context(open_stores_of(self._opened))
        call, catalogue = self._stores.portal.call, self._stores.catalogue
        tables, pipelines = call(catalogue.all_tables()), call(catalogue.list(PipelineRow))
        return captured_table_stage(marks, tables, pipelines, self._name)


def find_lock_intruder(config: Config) -> str:
    """Return the process that locks SQLite's file when the whole cluster is silent: no process could report it."""
    from tidemill.consensus.factory import sqlite_path_of_url
    from tidemill.consensus.sqlite.lock_holders import foreign_lock_holders

    file = sqlite_path_of_url(config.consensus_url)
    found = foreign_lock_holders(file) if file is not None else []
    return f"{found[0]}, which locks {file}" if found else ""


def format_verdict(found: Verdict, exit_code: int) -> list[str]:
    """Return the output lines: one per stage from the table to its source, then the blocker of the worst stage."""
    out = [
        ("  " * depth) + ("← " if depth else "") + format_stage(derived) for depth, derived in enumerate(found.chain)
    ]
    if exit_code:
        age_s = found.worst.standing_ms / 1000
        out.append(f"blocked by {found.root}: {found.worst.mark.name} is {found.worst.state} for {age_s:.1f} s")
    return out


def format_stage(derived: DerivedStatus) -> str:
    mark = derived.mark
    place = "delay unknown" if lag_of(mark) is None else f"{lag_text(mark)} behind"
    tries = f" (try {mark.tries})" if mark.tries > 1 else ""
    holder = f", blocked by {derived.blocker}" if derived.blocker else ""
    reason = f": {mark.reason}{tries}" if mark.reason else ""
    return f"{mark.name}  {derived.state} for {derived.standing_ms / 1000:.1f} s, {place}{holder}{reason}"
