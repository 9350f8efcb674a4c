"""Status report of a pipeline, published once a second: stage statuses and figures.

pipeline:<name>           position = least upper of its tables, blocked by that shard
pipeline:<name>:table/<table>   present while the pipeline may not maintain it (table_ownership.py); the owner of its
                                shard reports the shard
shard:<table>             position = upper, target = end of the newest time of its inputs, blocked by the input that it
                          waits for, or by nothing while it has work to do itself
pipeline:<name>:<part>    present while the session, the streaming query or a feed fails (`spark`, `query`,
                          `capture/…`, `topic/…`), or while the bindings of a feed cannot be read (`…:bindings`), which
                          then blocks its tables
objects, consensus, metastore    the stores that this process uses, by its own experience

The supervision of each unit reports failures (run_unit_thread); this module only publishes them. A process continues
from its predecessor's last report: a new driver does not make a table's position or failure look younger. Each
stage status is computed independently: one that raises fails with that error, one that blocks is not waited for, and
the others are published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import structlog

from tidemill.base.limits import STATUS_PUBLISH_INTERVAL_S
from tidemill.base.runtime.memory_budget import IdleDetector, release_freed_memory, resident_bytes
from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.base.status.histogram import SINCE_BOUND, Histogram, merge_histograms
from tidemill.base.status.status import NOTICE_BUDGET_MS, argmin, times_ahead_reason
from tidemill.consensus.status.board import StatusBoard
from tidemill.objects.retrying import RetryingObjects
from tidemill.spark.derived.function_result import OMITTED
from tidemill.spark.ingest.dead_letters import DEAD_RUN_TEXT
from tidemill.spark.ingest.pipeline_context import executors_status_name
from tidemill.spark.ingest.step_planner import STEP_BYTES
from tidemill.spark.ingest.table_unit import TableUnit

if TYPE_CHECKING:
    from tidemill.spark.derived.derivation import Derivation
    from tidemill.spark.derived.history import History
    from tidemill.spark.ingest.feed import Feed
    from tidemill.spark.pipeline.runner import PipelineRunner


STARTUP_PROGRESS_MS = 120_000
"""Time for which opening, hydrating and Spark's start count as progress."""
BINDINGS_TIMEOUT_S = 2.0
"""Timeout of a read of bindings, which is then reported as unanswered; far below the age at which a report is blind."""
GATHERING_S_MIN = 1.0
"""A table that waits shorter for its next step is not reported as waiting for it."""
NOT_COMPUTED = "its status cannot be computed: "
IDLE_BEFORE_TRIM_S = 30.0
"""Idle time without a record after which a driver returns freed memory to the system."""
ADOPT_MAX_AGE_MS = 60_000
"""Age beyond which a standstill in an old report does not count against a new process: everything was down."""

SLOW_ROUNDS = 4
"""A derived table is stuck when a round takes this many times the duration of the last one."""
BLOCKED_BUDGET_MS = 3_600_000
"""Budget of a table whose blocker has a stage status: until then the blocker is stuck, not the table."""
WORK_BUDGET_MS = 15_000
"""Budget of a table that does not fail: it may pause for a driver's restart, or a slow step, before it is stuck."""

TableProgress = tuple[int, int]
"""(position, target) of a table."""

log = structlog.get_logger()


class FeedProgress(msgspec.Struct, frozen=True):
    """Progress of a feed: the end of its newest binding (None = bindings cannot be read, so no table of it is at its
    target), the blocker of its tables, and the reason. `fails`: the feed itself is the blocker."""

    newest: int | None
    holder: str
    trouble: str
    fails: bool = False


class HasTrouble(Protocol):
    def trouble(self) -> str: ...


class StatusReporter:
    def __init__(self, runner: PipelineRunner) -> None:
        self._runner = runner
        self._tracker = runner.tracker
        self._board = StatusBoard(runner.stores.consensus, runner.stores.rand)
        self._process = runner.settings.process
        self._began_ms = runner.stores.clock.now_ms()
        self._rest = IdleDetector(IDLE_BEFORE_TRIM_S)
        self._dead_before: dict[str, str] = {}
        self._started: set[str] = set()
        """Tables that were attached at some time in this process."""

    def run(self) -> None:
        """Publish until the pipeline ends, and once again then."""
        runner = self._runner
        while True:
            ended = runner.ending.wait(STATUS_PUBLISH_INTERVAL_S)
            try:
                self._update_statuses()
                report = self._tracker.report(self._process, runner.stores.clock.now_ms(), self._facts())
                runner.portal.call(self._board.publish(report), 5)
            except BaseException as error:
                if not is_fault(error):
                    raise
                # A process that publishes nothing shows as blind; that is no reason to stop its work.
                log.warning("statuses not published", error=error_sentence(error))
            if ended:
                return
            try:
                if self._rest.has_become_idle(self._work_count(), runner.stores.clock.monotonic_s()):
                    release_freed_memory()
            except BaseException as error:
                if not is_fault(error):
                    raise
                log.warning("freed memory not returned to the system", error=error_sentence(error))

    def adopt(self) -> None:
        """Adopt the predecessor's last report. Called before any unit starts. Raises as consensus: nothing works
        without it."""
        now_ms = self._runner.stores.clock.now_ms()
        for report in self._runner.portal.call(self._board.reports()):
            if report.process == self._process:
                recent = now_ms - report.at_ms < ADOPT_MAX_AGE_MS
                marks = tuple(mark for mark in report.marks if recent or mark.error)
                self._tracker.adopt_last_report(msgspec.structs.replace(report, marks=marks))
                self._dead_before = {mark.name: mark.error for mark in marks if mark.error.startswith(DEAD_RUN_TEXT)}

    # stage statuses --------------------------------------------------------------------------------
    def _update_statuses(self) -> None:
        runner = self._runner
        self._update_one("objects", partial(self._update_store, "objects", runner.stores.objects))
        self._update_one("consensus", partial(self._update_store, "consensus", runner.stores.consensus))
        self._update_one("metastore", partial(self._update_store, "metastore", runner.stores.metastore))
        places: dict[str, TableProgress] = {}
        refused = runner.claims.refused.keys()
        units = [unit for feed in runner.feeds for unit in feed.units if unit.name not in refused]
        seated = {unit.name for unit in units if unit.seated}
        self._started |= seated
        for feed, seen in zip(runner.feeds, self._read_feeds(runner.feeds), strict=True):
            for unit in feed.units:
                if unit.name not in refused:
                    self._update_table(places, unit.name, partial(self._update_unit, unit, seen))
        for name in sorted(runner.pipeline.derived_tables.keys() - refused):
            self._update_table(places, name, partial(self._update_derived, name, runner.derivations.get(name)))
        for name in sorted(runner.pipeline.histories.keys() - refused):
            self._update_table(places, name, partial(self._update_history, name, runner.histories.get(name)))
        if not places:
            self._set_status(
                f"pipeline:{runner.settings.name}",
                (0, 1),
                runner.refusal_status_name(min(refused)),
                "it may maintain no table",
            )
            return
        slowest, upper = argmin({name: place[0] for name, place in places.items()})
        waiting = f"waiting: {len(seated)} of {len(units)} inputs are started" if len(seated) < len(units) else ""
        starting, behind = not runner.session_ready.is_set(), self._tracker.mark(f"shard:{slowest}")
        # Repeated opening counts as a table's progress; once it has failed the pipeline has none until it passes.
        failing = self._tracker.failure(f"shard:{slowest}") is not None
        progress = behind.progress if behind is not None and not failing else 0
        if starting:
            progress = self._startup_progress()
        elif waiting and not failing:
            progress += len(self._started)
        self._set_status(
            f"pipeline:{runner.settings.name}",
            (upper, max(place[1] for place in places.values()) if starting else places[slowest][1]),
            f"shard:{slowest}",
            "; ".join(part for part in ("Spark is starting" if starting else "", waiting) if part),
            progress,
            work_ms=behind.budget_ms if behind is not None else 0,
        )

    def _update_store(self, name: str, store: HasTrouble) -> None:
        notice = store.recent_fault() if isinstance(store, RetryingObjects) else ""
        self._tracker.set_foundation(name, store.trouble(), now_ms=self._runner.stores.clock.now_ms(), notice=notice)

    def _read_feeds(self, feeds: Sequence[Feed]) -> list[FeedProgress]:
        """Return the progress of each feed; all bindings are read concurrently, within BINDINGS_TIMEOUT_S."""

        async def newest(feed: Feed) -> int:
            async with asyncio.timeout(BINDINGS_TIMEOUT_S):
                return await feed.sink.fetch_newest_time() if feed.sink is not None else 0

        async def run() -> list[int | BaseException]:
            return await asyncio.gather(*(newest(feed) for feed in feeds), return_exceptions=True)

        out: list[FeedProgress] = []
        for feed, found in zip(feeds, self._runner.portal.call(run()), strict=True):
            if isinstance(found, int):
                self._tracker.clear_failure(feed.bindings_mark)
                error = feed.sink.error if feed.sink is not None else ""
                failure = self._tracker.failure(feed.mark)
                if failure is not None:
                    out.append(FeedProgress(found, feed.mark, failure.error, fails=True))
                else:
                    out.append(FeedProgress(found, feed.source.replace("/", ":", 1), error))
                continue
            why = (
                f"no answer for {BINDINGS_TIMEOUT_S:g} s" if isinstance(found, TimeoutError) else error_sentence(found)
            )
            why = f"bindings cannot be read: source={feed.source} error={why}"
            self._tracker.fail(feed.bindings_mark, why, now_ms=self._runner.stores.clock.now_ms())
            out.append(FeedProgress(None, feed.bindings_mark, why, fails=True))
        return out

    def _update_table(self, places: dict[str, TableProgress], name: str, compute: Callable[[], TableProgress]) -> None:
        mark = f"shard:{name}"

        def run() -> None:
            places[name] = compute() if self._runner.claims.looked.is_set() else self._update_unclaimed(name)

        if not self._update_one(mark, run):
            old = self._tracker.mark(mark)
            places[name] = (old.position, max(old.target, old.position + 1)) if old is not None else (0, 1)

    def _update_one(self, mark: str, tell: Callable[[], None]) -> bool:
        """Compute one stage status. An exception fails only that status, until it can be computed again."""
        try:
            tell()
        except BaseException as error:
            if not is_fault(error):
                raise
            self._tracker.fail(mark, NOT_COMPUTED + error_sentence(error), now_ms=self._runner.stores.clock.now_ms())
            return False
        failure = self._tracker.failure(mark)
        if failure is not None and failure.error.startswith(NOT_COMPUTED):
            self._tracker.clear_failure(mark)
        return True

    def _update_unit(self, unit: TableUnit, seen: FeedProgress) -> TableProgress:
        if unit.writer is None or unit.reason:
            # The capture's status, which `why` follows, reports whether a first snapshot is stuck.
            work_ms = BLOCKED_BUDGET_MS if unit.waits and unit.holder_tells else 0
            if unit.waits and unit.input_absent:
                work_ms = NOTICE_BUDGET_MS
            return self._update_opening(unit.name, unit.waits_for, unit.reason, unit.waits, unit.upstream, work_ms)
        upper, progress = unit.writer.upper, unit.writer.progress
        target = upper + 1 if seen.newest is None else seen.newest
        held_by = "" if upper < target and not seen.fails else seen.holder
        gathering_s = self._runner.settings.freshness_ms / 1000 if upper < target else 0.0
        gathers = f"gathers records for {gathering_s:g} s (freshness_s)" if gathering_s >= GATHERING_S_MIN else ""
        reason = seen.trouble or progress.sentence() or gathers
        mark = f"shard:{unit.name}"
        self._set_status(mark, (upper, target), held_by, reason, progress.read, unit.upstream)
        if progress.read:
            self._dead_before.pop(mark, None)  # the predecessor's finding is obsolete: records were read since
        dead = unit.writer.dead_run.sentence(unit.writer.operator.mirror.empty) or self._dead_before.get(mark, "")
        failure = self._tracker.failure(mark)
        is_dead_run = failure is not None and bool(dead) and failure.error.startswith(DEAD_RUN_TEXT)
        if seen.newest is not None and unit.seated and 0 < target <= upper and not is_dead_run:
            self._tracker.clear_failure(mark)  # it failed at its present position, where nothing is left to do
        self._report_data_errors(mark, dead, DEAD_RUN_TEXT)
        return upper, target

    def _report_data_errors(self, mark: str, said: str, kind: str) -> None:
        """Fail a unit that works but cannot process all its data, unless it fails with something else. `kind` is the
        prefix of the sentence."""
        failure = self._tracker.failure(mark)
        if failure is not None and (not failure.error.startswith(kind) or failure.error == said):
            return
        self._tracker.clear_failure(mark)
        if said:
            self._tracker.fail(mark, said, now_ms=self._runner.stores.clock.now_ms(), of_data=True)

    def _update_unclaimed(self, name: str) -> TableProgress:
        """Return the place of a table while the catalogue has not confirmed that the pipeline may maintain it."""
        catalogue = f"pipeline:{self._runner.settings.name}:catalogue"
        failing = self._tracker.failure(catalogue) is not None
        return self._update_opening(name, catalogue if failing else "", "opening", failing)

    def _update_history(self, name: str, found: History | None) -> TableProgress:
        if found is None or (not found.recomputed and not found.error and found.writer is None):
            return self._update_opening(name, found.waits_for if found is not None else "", "opening", False)
        return self._update_from_inputs(name, found)

    def _update_derived(self, name: str, found: Derivation | None) -> TableProgress:
        if found is None:
            # Blocked by the session that cannot start, or by its executors, whose environment is checked.
            marks = (f"pipeline:{self._runner.settings.name}:spark", executors_status_name(self._runner.settings.name))
            failing = next((mark for mark in marks if self._tracker.failure(mark) is not None), "")
            return self._update_opening(name, failing, "Spark is starting", bool(failing))
        if not found.recomputed and not found.error and found.writer is None:
            return self._update_opening(name, found.waits_for, "opening", False)
        return self._update_from_inputs(name, found)

    def _update_from_inputs(self, name: str, found: Derivation | History) -> TableProgress:
        upper, target = found.upper, max(found.target, 1)
        inputs = found.table.inputs
        # A slow function may run as long as it takes; its first round includes Spark's first plan.
        work_ms = int((SLOW_ROUNDS * found.took_s + found.table.every_s) * 1000)
        if found.waits:
            work_ms = BLOCKED_BUDGET_MS
        blocker = self._tracker.mark(found.waits_for) if found.writer is None else None
        if blocker is not None and blocker.budget_ms == NOTICE_BUDGET_MS:
            work_ms = NOTICE_BUDGET_MS  # its input waits for an input that does not exist yet
        progress = 0 if found.recomputed else self._startup_progress()
        up = f"shard:{inputs[0]}"
        self._set_status(f"shard:{name}", (upper, target), found.waits_for, found.error, progress, up, work_ms)
        self._report_data_errors(f"shard:{name}", found.omitted_rows_error, OMITTED)
        return upper, target

    def _update_opening(
        self, name: str, held_by: str, reason: str, waits: bool, upstream: str = "", work_ms: int = 0
    ) -> TableProgress:
        """Report a table that is not open at its last position; its own opening is progress, waiting for others is
        not."""
        old = self._tracker.mark(f"shard:{name}")
        upper, target = (old.position, max(old.target, old.position + 1)) if old is not None else (0, 1)
        self._set_status(
            f"shard:{name}",
            (upper, target),
            held_by,
            reason,
            0 if waits else self._startup_progress(),
            upstream,
            work_ms,
        )
        return upper, target

    def _startup_progress(self) -> int:
        """Return a number that grows with time during STARTUP_PROGRESS_MS, and with each table that starts, as progress
        of the others."""
        now_ms = self._runner.stores.clock.now_ms()
        return min(now_ms - self._began_ms, STARTUP_PROGRESS_MS) // 1000 + len(self._started)

    def _set_status(
        self,
        name: str,
        place: TableProgress,
        held_by: str,
        reason: str,
        progress: int = 0,
        upstream: str = "",
        work_ms: int = 0,
    ) -> None:
        budget_ms, now_ms = self._runner.tracker.budget_ms, self._runner.stores.clock.now_ms()
        self._tracker.set(
            name,
            *place,
            now_ms=now_ms,
            held_by=held_by,
            reason=reason or (times_ahead_reason(place[0], now_ms) if name.startswith("shard:") else ""),
            # A failing unit is stuck after the freshness budget; a working one may take longer, e.g. for a restart.
            budget_ms=budget_ms if self._tracker.failure(name) is not None else max(budget_ms, WORK_BUDGET_MS, work_ms),
            unit="ms",
            progress=progress,
            upstream=upstream,
        )

    def _work_count(self) -> int:
        """Return the records read and the rounds of derived tables; a table that is opened again restarts its count."""
        read = sum(table.progress.read for table in self._runner.tables())
        made = sum(found.recomputed for found in list(self._runner.derivations.values()))
        return read + made + sum(found.recomputed for found in list(self._runner.histories.values()))

    def _memory_usage(self) -> dict[str, tuple[int, int]]:
        """Return {share: (bytes, limit; 0 = none)}, as nodes report. A decoded step takes several times its stored
        bytes."""
        feeds = [feed.sink for feed in self._runner.feeds if feed.sink is not None]
        return {
            "resident": (resident_bytes(), 0),
            "steps": (sum(sink.steps.in_flight_bytes for sink in feeds), 3 * STEP_BYTES * max(1, len(feeds))),
            "mirrors": (
                sum(table.operator.mirror.held_bytes for table in self._runner.tables())
                + sum(history.held_bytes for history in list(self._runner.histories.values())),
                0,
            ),
        }

    def _facts(self) -> dict[str, object]:
        try:
            return self.facts()
        except Exception as error:
            return {"error": error_sentence(error)}

    # facts ------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, object]:
        """Return the figures of the report.

        memory: {share: (bytes, limit)}; commit_to_shard_ms, bound_to_shard_ms: {count, p50, p95, p99, max} of all
        sources; latency: {source: {stage: histogram}}, as `status --latency` shows them; tables: {name: {won, lost,
        rows, dropped, merges, read, to_go, violations?, sequence?, eta_s?, recomputed?, groups?, whole_because?}};
        violations: {expectation: records}; sequence: {late, revived: records}; groups: the number of groups of the last
        recomputation, −1 = all, with the reason in whole_because.
        """
        runner = self._runner
        tables: dict[str, dict[str, Any]] = {}
        for table in runner.tables():
            progress = table.progress
            found: dict[str, Any] = {
                "won": table.won,
                "lost": table.lost,
                "rows": table.rows,
                "dropped": table.operator.dropped,
                "merges": table.operator.mirror.merges,
                "read": progress.read,
                "to_go": progress.to_go,
            }
            if table.violations:
                found["violations"] = dict(table.violations)
            if table.tombstones is not None:
                found["sequence"] = {"late": table.late, "revived": table.revived}
            if progress.eta_s is not None:
                found["eta_s"] = int(progress.eta_s)
            tables[table.name] = found
        for name, history in runner.histories.items():
            tables[name] = {"won": history.won, "lost": history.lost, "rows": history.rows, "history": True}
        for name, derivation in runner.derivations.items():
            if name in tables:
                tables[name]["recomputed"] = derivation.recomputed
                tables[name]["groups"] = -1 if derivation.groups is None else derivation.groups
                tables[name]["whole_because"] = derivation.whole_because
        spark = runner.spark if runner.session_ready.is_set() else None
        stages = dict(runner.stages)
        total = merge_histograms(found.histograms() for found in stages.values())
        return {
            "commit_to_shard_ms": total.get("appended", Histogram()).summary(),
            "bound_to_shard_ms": total.get(SINCE_BOUND, Histogram()).summary(),
            "latency": {source: found.to_plain() for source, found in stages.items()},
            "tables": tables,
            "memory": self._memory_usage(),
            "dead_letters": runner.dead_letters.total,
            "dead_letters_expired": runner.dead_letters.expired,
            "spark": (spark.version if spark is not None else "") if runner.uses_spark else None,
            "master": runner.settings.master,
            "began_ms": self._began_ms,
        }
