"""What a pipeline says of itself, once a second: marks, figures; and compaction of its shards in between.

pipeline:<name>   position = least upper of its tables, held by that shard
shard:<table>     position = upper, target = one past the newest time its inputs have, held by the input
                  that it waits for, or by nobody when the work is its own
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from tidemill.base.errors import TidemillError, Unavailable, Unknown
from tidemill.base.limits import MARK_PUBLISH_INTERVAL_S
from tidemill.base.marks import Tracker, argmin
from tidemill.consensus.board import Board
from tidemill.shards.compaction import compact_once

if TYPE_CHECKING:
    from tidemill.spark.runner import Runner
    from tidemill.spark.table import TableWriter

COMPACT_EVERY_S = 5.0
"""One merge of one shard at most this often: compaction must never compete with commits for the two cores."""
BUDGET_MS = 15_000
"""A table standing still below its target for longer is stuck. A driver's restart takes most of it."""

log = structlog.get_logger()


class Reporter:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._tracker = Tracker()
        self._board = Board(runner.stores.consensus, runner.stores.rand)
        self._process = f"pipeline:{runner.settings.name}" + (
            f":{runner.settings.instance}" if runner.settings.instance else ""
        )
        self._compacted_s = runner.stores.clock.monotonic_s()
        self._next = 0

    def run(self) -> None:
        """Until the pipeline ends; publishes once more then."""
        runner = self._runner
        while True:
            ended = runner.ending.wait(MARK_PUBLISH_INTERVAL_S)
            try:
                self._mark()
                report = self._tracker.report(self._process, runner.stores.clock.now_ms(), self.facts())
                runner.portal.call(self._board.publish(report), 5)
                if not ended:
                    self._compact()
            except (TidemillError, TimeoutError) as error:
                # Whoever is not heard of shows as blind; that is no reason to stop the work.
                log.warning("marks not published", error=str(error))
            if ended:
                return

    # marks ------------------------------------------------------------------------------------------
    def _mark(self) -> None:
        runner, uppers, targets = self._runner, {}, {}
        for feed in runner.feeds:
            upstream = feed.source.replace("/", ":", 1)
            if feed.sink is None:
                for name in feed.tables:
                    uppers[name], targets[name] = 0, 1
                    self._shard(name, 0, 1, feed.waits_for, feed.reason)
                continue
            target = feed.sink.latest()
            for table in feed.sink.tables:
                uppers[table.name], targets[table.name] = table.upper, target
                self._shard(table.name, table.upper, target, "" if table.upper < target else upstream, feed.sink.error)
        for derivation in runner.derivations:
            name = derivation.table.name
            uppers[name], targets[name] = derivation.upper, max(derivation.target, 1)
            self._shard(name, derivation.upper, max(derivation.target, 1), derivation.waits_for, derivation.error)
        if uppers:
            slowest, upper = argmin(uppers)
            self._set(f"pipeline:{runner.settings.name}", upper, targets[slowest], f"shard:{slowest}", self._phase())

    def _phase(self) -> str:
        return "" if self._runner.session_ready.is_set() else "Spark is starting"

    def _shard(self, name: str, upper: int, target: int, held_by: str, reason: str) -> None:
        self._set(f"shard:{name}", upper, target, held_by, reason)

    def _set(self, name: str, position: int, target: int, held_by: str, reason: str) -> None:
        now_ms = self._runner.stores.clock.now_ms()
        self._tracker.set(
            name, position, target, now_ms=now_ms, held_by=held_by, reason=reason, budget_ms=BUDGET_MS, unit="ms"
        )

    # facts ------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, object]:
        """commit_to_shard_ms, bound_to_shard_ms: {count, p50, p99, max};
        tables: {name: {won, lost, rows, dropped, merges, recomputed?}}."""
        runner = self._runner
        tables: dict[str, dict[str, int]] = {}
        for table in runner.tables():
            tables[table.name] = {
                "won": table.won,
                "lost": table.lost,
                "rows": table.rows,
                "dropped": table.operator.dropped,
                "merges": table.operator.mirror.merges,
            }
        for derivation in runner.derivations:
            if derivation.writer is not None:
                tables[derivation.table.name]["recomputed"] = derivation.recomputed
        spark = runner.spark if runner.session_ready.is_set() else None
        return {
            "commit_to_shard_ms": runner.latency.summary(),
            "bound_to_shard_ms": runner.bound_latency.summary(),
            "tables": tables,
            "dead_letters": runner.dead_letters.total if runner.dead_letters is not None else 0,
            "spark": spark.version if spark is not None else "",
        }

    # compaction -------------------------------------------------------------------------------------
    def _compact(self) -> None:
        clock = self._runner.stores.clock
        tables = self._runner.tables()
        if not tables or clock.monotonic_s() - self._compacted_s < COMPACT_EVERY_S:
            return
        for _ in tables:
            table = tables[self._next % len(tables)]
            self._next += 1
            if self._merge(table):
                break
        self._compacted_s = clock.monotonic_s()

    def _merge(self, table: TableWriter) -> bool:
        runner, s = self._runner, self._runner.stores
        try:
            done = runner.portal.call(compact_once(table.shard, s.objects, s.rand, cpu=s.cpu))
        except (Unavailable, Unknown):
            return False
        except TidemillError as error:
            log.error("compaction failed", shard=table.name, error=str(error))
            return False
        return done is not None
