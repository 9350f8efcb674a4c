"""What a pipeline says of itself, once a second: marks and figures.

pipeline:<name>           position = least upper of its tables, held by that shard
shard:<table>             position = upper, target = one past the newest time its inputs have, held by the input
                          that it waits for, or by nobody when the work is its own
pipeline:<name>:<part>    there while a feed's query or the session fails (`spark`, `capture/…`, `topic/…`)

Failures are told by whoever supervises the unit (keep_thread); here they only travel. A process goes on from what
its predecessor said last: a table is not younger, nor its failure, because the driver is new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import structlog

from tidemill.base.limits import MARK_PUBLISH_INTERVAL_S
from tidemill.base.marks import argmin
from tidemill.base.memory import resident_bytes
from tidemill.base.tasks import is_fault, sentence
from tidemill.consensus.board import Board
from tidemill.spark.steps import STEP_BYTES
from tidemill.spark.unit import TableUnit

if TYPE_CHECKING:
    from tidemill.spark.derived import Derivation
    from tidemill.spark.runner import Runner

PATIENCE_MS = 120_000
"""Opening, hydrating and Spark's start count as progress for this long, and no longer."""
RECENT_MS = 60_000
"""What stood longer ago than this is not held against a new process: everything was down."""

SLOW_ROUNDS = 4
"""A derived table is stuck when a round takes this many times what the last one took."""
OTHERS_BUDGET_MS = 3_600_000
"""A table that waits for somebody who has a mark is not stuck before this: the other one is."""
WORK_BUDGET_MS = 15_000
"""A table that does not fail stands still for a driver's restart, or a slow step, before it is stuck."""

log = structlog.get_logger()


class Reporter:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._tracker = runner.tracker
        self._board = Board(runner.stores.consensus, runner.stores.rand)
        self._process = f"pipeline:{runner.settings.name}" + (
            f":{runner.settings.instance}" if runner.settings.instance else ""
        )
        self._began_ms = runner.stores.clock.now_ms()

    def run(self) -> None:
        """Until the pipeline ends; publishes once more then."""
        runner = self._runner
        while True:
            ended = runner.ending.wait(MARK_PUBLISH_INTERVAL_S)
            try:
                self._mark()
                report = self._tracker.report(self._process, runner.stores.clock.now_ms(), self.facts())
                runner.portal.call(self._board.publish(report), 5)
            except BaseException as error:
                if not is_fault(error):
                    raise
                # Whoever is not heard of shows as blind; that is no reason to stop the work.
                log.warning("marks not published", error=sentence(error))
            if ended:
                return

    def adopt(self) -> None:
        """Before any unit starts. Raises as consensus does: nothing else goes on without it either."""
        now_ms = self._runner.stores.clock.now_ms()
        for report in self._runner.portal.call(self._board.reports()):
            if report.process == self._process:
                recent = now_ms - report.at_ms < RECENT_MS
                marks = tuple(mark for mark in report.marks if recent or mark.error)
                self._tracker.adopt(msgspec.structs.replace(report, marks=marks))

    # marks ------------------------------------------------------------------------------------------
    def _mark(self) -> None:
        runner = self._runner
        places: dict[str, tuple[int, int]] = {}
        for feed in runner.feeds:
            target = feed.sink.latest() if feed.sink is not None else 0
            for unit in feed.units:
                places[unit.name] = self._unit(
                    unit, target, feed.source.replace("/", ":", 1), feed.sink.error if feed.sink is not None else ""
                )
        for name in runner.pipeline.derived_tables:
            places[name] = self._derived(name, runner.derivations.get(name))
        slowest, upper = argmin({name: place[0] for name, place in places.items()})
        starting, behind = not runner.session_ready.is_set(), self._tracker.mark(f"shard:{slowest}")
        assert behind is not None
        self._set(
            f"pipeline:{runner.settings.name}",
            upper,
            max(place[1] for place in places.values()) if starting else places[slowest][1],
            f"shard:{slowest}",
            "Spark is starting" if starting else "",
            self._patience() if starting else behind.progress,
            work_ms=behind.budget_ms,
        )

    def _unit(self, unit: TableUnit, target: int, source: str, trouble: str) -> tuple[int, int]:
        if unit.writer is None or unit.reason:
            # Whether a first snapshot stands still is for the capture's mark to say, to which `why` walks.
            work_ms = OTHERS_BUDGET_MS if unit.waits and unit.holder_tells else 0
            return self._opening(unit.name, unit.waits_for, unit.reason, unit.waits, unit.upstream, work_ms)
        upper, progress = unit.writer.upper, unit.writer.progress
        held_by = "" if upper < target else source
        reason = trouble or progress.sentence()
        self._set(f"shard:{unit.name}", upper, target, held_by, reason, progress.read, unit.upstream)
        return upper, target

    def _derived(self, name: str, found: Derivation | None) -> tuple[int, int]:
        if found is None:
            return self._opening(name, "", "Spark is starting", False)
        if not found.recomputed and not found.error and found.writer is None:
            return self._opening(name, found.waits_for, "opening", False)
        upper, target = found.upper, max(found.target, 1)
        inputs = found.table.inputs
        # A slow function is at work for as long as it takes; its first round has Spark's first plan to wait for.
        work_ms = int((SLOW_ROUNDS * found.took_s + found.table.every_s) * 1000)
        progress = 0 if found.recomputed else self._patience()
        up = f"shard:{inputs[0]}"
        self._set(f"shard:{name}", upper, target, found.waits_for, found.error, progress, up, work_ms)
        return upper, target

    def _opening(
        self, name: str, held_by: str, reason: str, waits: bool, upstream: str = "", work_ms: int = 0
    ) -> tuple[int, int]:
        """A table that is not open stands where it stood; its own opening is progress, waiting for others is not."""
        old = self._tracker.mark(f"shard:{name}")
        upper, target = (old.position, max(old.target, old.position + 1)) if old is not None else (0, 1)
        self._set(f"shard:{name}", upper, target, held_by, reason, 0 if waits else self._patience(), upstream, work_ms)
        return upper, target

    def _patience(self) -> int:
        now_ms = self._runner.stores.clock.now_ms()
        return min(now_ms - self._began_ms, PATIENCE_MS) // 1000

    def _set(
        self,
        name: str,
        position: int,
        target: int,
        held_by: str,
        reason: str,
        progress: int = 0,
        upstream: str = "",
        work_ms: int = 0,
    ) -> None:
        budget_ms = self._runner.settings.budget_ms
        self._tracker.set(
            name,
            position,
            target,
            now_ms=self._runner.stores.clock.now_ms(),
            held_by=held_by,
            reason=reason,
            # What fails is stuck past the freshness budget; what works may take its time, a restart most of it.
            budget_ms=budget_ms if self._tracker.failure(name) is not None else max(budget_ms, WORK_BUDGET_MS, work_ms),
            unit="ms",
            progress=progress,
            upstream=upstream,
        )

    def _memory(self) -> dict[str, tuple[int, int]]:
        """{share: (bytes, limit; 0 = none)}, as nodes tell theirs. Decoded, a step is some times its stored bytes."""
        feeds = [feed.sink for feed in self._runner.feeds if feed.sink is not None]
        return {
            "resident": (resident_bytes(), 0),
            "steps": (sum(sink.taken_bytes for sink in feeds), 2 * STEP_BYTES * max(1, len(feeds))),
            "mirrors": (sum(table.operator.mirror.held_bytes for table in self._runner.tables()), 0),
        }

    # facts ------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, object]:
        """memory: {share: (bytes, limit)}; commit_to_shard_ms, bound_to_shard_ms: {count, p50, p99, max};
        tables: {name: {won, lost, rows, dropped, merges, read, to_go, eta_s?, recomputed?}}."""
        runner = self._runner
        tables: dict[str, dict[str, int]] = {}
        for table in runner.tables():
            progress = table.progress
            tables[table.name] = {
                "won": table.won,
                "lost": table.lost,
                "rows": table.rows,
                "dropped": table.operator.dropped,
                "merges": table.operator.mirror.merges,
                "read": progress.read,
                "to_go": progress.to_go,
            } | ({"eta_s": int(progress.eta_s)} if progress.eta_s is not None else {})
        for name, derivation in runner.derivations.items():
            if name in tables:
                tables[name]["recomputed"] = derivation.recomputed
        spark = runner.spark if runner.session_ready.is_set() else None
        return {
            "commit_to_shard_ms": runner.latency.summary(),
            "bound_to_shard_ms": runner.bound_latency.summary(),
            "tables": tables,
            "memory": self._memory(),
            "dead_letters": runner.dead_letters.total,
            "spark": spark.version if spark is not None else "",
        }
