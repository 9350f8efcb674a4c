"""What a pipeline says of itself, once a second: marks and figures.

pipeline:<name>           position = least upper of its tables, held by that shard
pipeline:<name>:table/<table>   there while the pipeline may not keep it (table_ownership.py); its shard is another's to
                                tell
shard:<table>             position = upper, target = one past the newest time its inputs have, held by the input
                          that it waits for, or by nobody when the work is its own
pipeline:<name>:<part>    there while the session, the streaming query or a feed fails (`spark`, `query`, `capture/…`,
                          `topic/…`), or while the bindings of a feed cannot be read (`…:bindings`), by which its tables
                          are held then
objects, consensus, metastore    what this process stands on, by its own experience

Failures are told by whoever supervises the unit (keep_thread); here they only travel. A process goes on from what
its predecessor said last: a table is not younger, nor its failure, because the driver is new. Each mark is a unit of
its own: one that cannot be computed fails with why, and one that waits is not waited for; the others are told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog

from tidemill.base.limits import MARK_PUBLISH_INTERVAL_S
from tidemill.base.runtime.memory_budget import Rest, give_freed_memory_back, resident_bytes
from tidemill.base.runtime.tasks import is_fault, sentence
from tidemill.base.status.histogram import SINCE_BOUND, Histogram, merged
from tidemill.base.status.status import argmin
from tidemill.consensus.status.board import Board
from tidemill.objects.retrying import RetryingObjects
from tidemill.spark.derived.function_result import LEFT_OUT
from tidemill.spark.ingest.dead_letter_run import DEAD
from tidemill.spark.ingest.step_planner import STEP_BYTES
from tidemill.spark.ingest.table_unit import TableUnit
from tidemill.spark.pipeline.executor_watch import mark_of

if TYPE_CHECKING:
    from tidemill.spark.derived.derivation import Derivation
    from tidemill.spark.ingest.feed import Feed
    from tidemill.spark.pipeline.runner import Runner


PATIENCE_MS = 120_000
"""Opening, hydrating and Spark's start count as progress for this long, and no longer."""
LOOK_S = 2.0
"""A read of bindings that takes longer is told as one that gives no answer; far below a report's age when blind."""
CANNOT = "its mark cannot be computed: "
REST_S = 30.0
"""After so long without a record a driver gives the memory back that its steps left free."""
RECENT_MS = 60_000
"""What stood longer ago than this is not held against a new process: everything was down."""

SLOW_ROUNDS = 4
"""A derived table is stuck when a round takes this many times what the last one took."""
OTHERS_BUDGET_MS = 3_600_000
"""A table that waits for somebody who has a mark is not stuck before this: the other one is."""
WORK_BUDGET_MS = 15_000
"""A table that does not fail stands still for a driver's restart, or a slow step, before it is stuck."""

Place = tuple[int, int]
"""(position, target) of a table"""

log = structlog.get_logger()


class FeedProgress(msgspec.Struct, frozen=True):
    """A feed: one past its newest binding (None = bindings cannot be read, so no table of it is at its target), the
    holder of its tables, and the reason. `fails`: the feed itself is the holder."""

    newest: int | None
    holder: str
    trouble: str
    fails: bool = False


class Troubled(Protocol):
    def trouble(self) -> str: ...


class Reporter:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._tracker = runner.tracker
        self._board = Board(runner.stores.consensus, runner.stores.rand)
        self._process = runner.settings.process
        self._began_ms = runner.stores.clock.now_ms()
        self._rest = Rest(REST_S)
        self._dead_before: dict[str, str] = {}
        self._started: set[str] = set()
        """Tables that have been brought forward in this life."""

    def run(self) -> None:
        """Until the pipeline ends; publishes once more then."""
        runner = self._runner
        while True:
            ended = runner.ending.wait(MARK_PUBLISH_INTERVAL_S)
            try:
                self._mark()
                report = self._tracker.report(self._process, runner.stores.clock.now_ms(), self._facts())
                runner.portal.call(self._board.publish(report), 5)
            except BaseException as error:
                if not is_fault(error):
                    raise
                # Whoever is not heard of shows as blind; that is no reason to stop the work.
                log.warning("marks not published", error=sentence(error))
            if ended:
                return
            try:
                if self._rest.begins(self._worked(), runner.stores.clock.monotonic_s()):
                    give_freed_memory_back()
            except BaseException as error:
                if not is_fault(error):
                    raise
                log.warning("freed memory not given back", error=sentence(error))

    def adopt(self) -> None:
        """Before any unit starts. Raises as consensus does: nothing else goes on without it either."""
        now_ms = self._runner.stores.clock.now_ms()
        for report in self._runner.portal.call(self._board.reports()):
            if report.process == self._process:
                recent = now_ms - report.at_ms < RECENT_MS
                marks = tuple(mark for mark in report.marks if recent or mark.error)
                self._tracker.adopt(msgspec.structs.replace(report, marks=marks))
                self._dead_before = {mark.name: mark.error for mark in marks if mark.error.startswith(DEAD)}

    # marks ------------------------------------------------------------------------------------------
    def _mark(self) -> None:
        runner = self._runner
        self._each("objects", partial(self._works, "objects", runner.stores.objects))
        self._each("consensus", partial(self._works, "consensus", runner.stores.consensus))
        self._each("metastore", partial(self._works, "metastore", runner.stores.metastore))
        places: dict[str, Place] = {}
        refused = runner.claims.refused.keys()
        units = [unit for feed in runner.feeds for unit in feed.units if unit.name not in refused]
        seated = {unit.name for unit in units if unit.seated}
        self._started |= seated
        for feed, seen in zip(runner.feeds, self._look(runner.feeds), strict=True):
            for unit in feed.units:
                if unit.name not in refused:
                    self._table(places, unit.name, partial(self._unit, unit, seen))
        for name in sorted(runner.pipeline.derived_tables.keys() - refused):
            self._table(places, name, partial(self._derived, name, runner.derivations.get(name)))
        if not places:
            self._set(f"pipeline:{runner.settings.name}", 0, 1, runner.refusal(min(refused)), "it may keep no table")
            return
        slowest, upper = argmin({name: place[0] for name, place in places.items()})
        waiting = f"waiting: {len(seated)} of {len(units)} inputs are started" if len(seated) < len(units) else ""
        starting, behind = not runner.session_ready.is_set(), self._tracker.mark(f"shard:{slowest}")
        # Opening again and again is a table's progress; where it has failed the pipeline has none until it passes.
        failing = self._tracker.failure(f"shard:{slowest}") is not None
        self._set(
            f"pipeline:{runner.settings.name}",
            upper,
            max(place[1] for place in places.values()) if starting else places[slowest][1],
            f"shard:{slowest}",
            "; ".join(part for part in ("Spark is starting" if starting else "", waiting) if part),
            self._patience() if starting else behind.progress if behind is not None and not failing else 0,
            work_ms=behind.budget_ms if behind is not None else 0,
        )

    def _works(self, name: str, store: Troubled) -> None:
        notice = store.noticed() if isinstance(store, RetryingObjects) else ""
        self._tracker.works(name, store.trouble(), now_ms=self._runner.stores.clock.now_ms(), notice=notice)

    def _look(self, feeds: Sequence[Feed]) -> list[FeedProgress]:
        """Of each feed: all bindings at once, for LOOK_S at most."""

        async def newest(feed: Feed) -> int:
            async with asyncio.timeout(LOOK_S):
                return await feed.sink.newest() if feed.sink is not None else 0

        async def run() -> list[int | BaseException]:
            return await asyncio.gather(*(newest(feed) for feed in feeds), return_exceptions=True)

        out: list[FeedProgress] = []
        for feed, found in zip(feeds, self._runner.portal.call(run()), strict=True):
            if isinstance(found, int):
                self._tracker.heal(feed.bindings_mark)
                error = feed.sink.error if feed.sink is not None else ""
                failure = self._tracker.failure(feed.mark)
                if failure is not None:
                    out.append(FeedProgress(found, feed.mark, failure.error, fails=True))
                else:
                    out.append(FeedProgress(found, feed.source.replace("/", ":", 1), error))
                continue
            why = f"no answer for {LOOK_S:g} s" if isinstance(found, TimeoutError) else sentence(found)
            why = f"bindings cannot be read: source={feed.source} error={why}"
            self._tracker.fail(feed.bindings_mark, why, now_ms=self._runner.stores.clock.now_ms())
            out.append(FeedProgress(None, feed.bindings_mark, why, fails=True))
        return out

    def _table(self, places: dict[str, Place], name: str, compute: Callable[[], Place]) -> None:
        mark = f"shard:{name}"

        def run() -> None:
            places[name] = compute() if self._runner.claims.looked.is_set() else self._unclaimed(name)

        if not self._each(mark, run):
            old = self._tracker.mark(mark)
            places[name] = (old.position, max(old.target, old.position + 1)) if old is not None else (0, 1)

    def _each(self, mark: str, tell: Callable[[], None]) -> bool:
        """One mark's boundary: what computing it raises is that mark's failure, until it can be computed again."""
        try:
            tell()
        except BaseException as error:
            if not is_fault(error):
                raise
            self._tracker.fail(mark, CANNOT + sentence(error), now_ms=self._runner.stores.clock.now_ms())
            return False
        failure = self._tracker.failure(mark)
        if failure is not None and failure.error.startswith(CANNOT):
            self._tracker.heal(mark)
        return True

    def _unit(self, unit: TableUnit, seen: FeedProgress) -> Place:
        if unit.writer is None or unit.reason:
            # Whether a first snapshot stands still is for the capture's mark to say, to which `why` walks.
            work_ms = OTHERS_BUDGET_MS if unit.waits and unit.holder_tells else 0
            return self._opening(unit.name, unit.waits_for, unit.reason, unit.waits, unit.upstream, work_ms)
        upper, progress = unit.writer.upper, unit.writer.progress
        target = upper + 1 if seen.newest is None else seen.newest
        held_by = "" if upper < target and not seen.fails else seen.holder
        reason = seen.trouble or progress.sentence()
        mark = f"shard:{unit.name}"
        self._set(mark, upper, target, held_by, reason, progress.read, unit.upstream)
        if progress.read:
            self._dead_before.pop(mark, None)  # what this driver's predecessor knew: records came since
        dead = unit.writer.dead_run.sentence(unit.writer.operator.mirror.empty) or self._dead_before.get(mark, "")
        failure = self._tracker.failure(mark)
        told = failure is not None and bool(dead) and failure.error.startswith(DEAD)
        if seen.newest is not None and unit.seated and 0 < target <= upper and not told:
            self._tracker.heal(mark)  # it failed where it stands now, and nothing is left there to do
        self._flawed(mark, dead, DEAD)
        return upper, target

    def _flawed(self, mark: str, said: str, kind: str) -> None:
        """A unit that works, but not on everything it is given: it fails with that where it fails with nothing else.
        `kind` begins the sentence."""
        failure = self._tracker.failure(mark)
        if failure is not None and (not failure.error.startswith(kind) or failure.error == said):
            return
        self._tracker.heal(mark)
        if said:
            self._tracker.fail(mark, said, now_ms=self._runner.stores.clock.now_ms(), of_data=True)

    def _unclaimed(self, name: str) -> Place:
        """The catalogue has not said yet whether the pipeline may keep the table."""
        catalogue = f"pipeline:{self._runner.settings.name}:catalogue"
        failing = self._tracker.failure(catalogue) is not None
        return self._opening(name, catalogue if failing else "", "opening", failing)

    def _derived(self, name: str, found: Derivation | None) -> Place:
        if found is None:
            # The session that cannot start, or its executors, which are asked whether they can work.
            marks = (f"pipeline:{self._runner.settings.name}:spark", mark_of(self._runner))
            failing = next((mark for mark in marks if self._tracker.failure(mark) is not None), "")
            return self._opening(name, failing, "Spark is starting", bool(failing))
        if not found.recomputed and not found.error and found.writer is None:
            return self._opening(name, found.waits_for, "opening", False)
        upper, target = found.upper, max(found.target, 1)
        inputs = found.table.inputs
        # A slow function is at work for as long as it takes; its first round has Spark's first plan to wait for.
        work_ms = int((SLOW_ROUNDS * found.took_s + found.table.every_s) * 1000)
        if found.waits:
            work_ms = OTHERS_BUDGET_MS
        progress = 0 if found.recomputed else self._patience()
        up = f"shard:{inputs[0]}"
        self._set(f"shard:{name}", upper, target, found.waits_for, found.error, progress, up, work_ms)
        self._flawed(f"shard:{name}", found.left_out, LEFT_OUT)
        return upper, target

    def _opening(
        self, name: str, held_by: str, reason: str, waits: bool, upstream: str = "", work_ms: int = 0
    ) -> Place:
        """A table that is not open stands where it stood; its own opening is progress, waiting for others is not."""
        old = self._tracker.mark(f"shard:{name}")
        upper, target = (old.position, max(old.target, old.position + 1)) if old is not None else (0, 1)
        self._set(f"shard:{name}", upper, target, held_by, reason, 0 if waits else self._patience(), upstream, work_ms)
        return upper, target

    def _patience(self) -> int:
        """Time that passes is progress for so long; a table that starts is, for those that start after it."""
        now_ms = self._runner.stores.clock.now_ms()
        return min(now_ms - self._began_ms, PATIENCE_MS) // 1000 + len(self._started)

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

    def _worked(self) -> int:
        """Records read, and rounds of derived tables, in this life; of tables that opened anew they count anew."""
        read = sum(table.progress.read for table in self._runner.tables())
        return read + sum(found.recomputed for found in list(self._runner.derivations.values()))

    def _memory(self) -> dict[str, tuple[int, int]]:
        """{share: (bytes, limit; 0 = none)}, as nodes tell theirs. Decoded, a step is some times its stored bytes."""
        feeds = [feed.sink for feed in self._runner.feeds if feed.sink is not None]
        return {
            "resident": (resident_bytes(), 0),
            "steps": (sum(sink.taken_bytes for sink in feeds), 3 * STEP_BYTES * max(1, len(feeds))),
            "mirrors": (sum(table.operator.mirror.held_bytes for table in self._runner.tables()), 0),
        }

    def _facts(self) -> dict[str, object]:
        try:
            return self.facts()
        except Exception as error:
            return {"error": sentence(error)}

    # facts ------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, object]:
        """memory: {share: (bytes, limit)}; commit_to_shard_ms, bound_to_shard_ms: {count, p50, p95, p99, max} of all
        sources; latency: {source: {stage: histogram}}, as `status --latency` draws them;
        tables: {name: {won, lost, rows, dropped, merges, read, to_go, eta_s?, recomputed?, groups?,
        whole_because?}}; groups: how many the last recomputation had, −1 = all, and why."""
        runner = self._runner
        tables: dict[str, dict[str, int | str]] = {}
        for table in runner.tables():
            progress = table.progress
            found: dict[str, int | str] = {
                "won": table.won,
                "lost": table.lost,
                "rows": table.rows,
                "dropped": table.operator.dropped,
                "merges": table.operator.mirror.merges,
                "read": progress.read,
                "to_go": progress.to_go,
            }
            if progress.eta_s is not None:
                found["eta_s"] = int(progress.eta_s)
            tables[table.name] = found
        for name, derivation in runner.derivations.items():
            if name in tables:
                tables[name]["recomputed"] = derivation.recomputed
                tables[name]["groups"] = -1 if derivation.groups is None else derivation.groups
                tables[name]["whole_because"] = derivation.whole_because
        spark = runner.spark if runner.session_ready.is_set() else None
        stages = dict(runner.stages)
        total = merged(found.histograms() for found in stages.values())
        return {
            "commit_to_shard_ms": total.get("appended", Histogram()).summary(),
            "bound_to_shard_ms": total.get(SINCE_BOUND, Histogram()).summary(),
            "latency": {source: found.plain() for source, found in stages.items()},
            "tables": tables,
            "memory": self._memory(),
            "dead_letters": runner.dead_letters.total,
            "spark": spark.version if spark is not None else "",
            "master": runner.settings.master,
            "began_ms": self._began_ms,
        }
