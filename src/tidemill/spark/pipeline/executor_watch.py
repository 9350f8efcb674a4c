"""While a cluster has no executor left, nobody waits for one: what was given to it is computed by the driver.

A Spark job without an executor waits for ever. Its step is not lost when it is cancelled: who asked for it computes it
inline (distributed_step.py), and a derived table tries again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.spark.ingest.pipeline_context import PipelineContext

if TYPE_CHECKING:
    from pyspark import SparkContext

LOOK_S = 1.0
PATIENCE_S = 5.0
"""A cluster may put another executor in a lost one's place meanwhile."""


def mark_of(host: PipelineContext) -> str:
    return f"pipeline:{host.settings.name}:executors"


def keep_work_going(host: PipelineContext) -> None:
    """Until the pipeline ends; waits for Spark's context first. Told under `mark_of` while there is no executor.

    Where Spark itself asks for executors when they are needed (dynamic allocation), none is no trouble, and not ours.
    """
    while host.spark is None:
        if host.ending.wait(LOOK_S):
            return
    if host.spark.sparkContext.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return
    context, clock, mark = host.spark.sparkContext, host.stores.clock, mark_of(host)
    seen_s = clock.monotonic_s()
    while not host.ending.wait(LOOK_S):
        if executor_count(context):
            seen_s = clock.monotonic_s()
            host.tracker.heal(mark)
        elif clock.monotonic_s() - seen_s > PATIENCE_S:
            if host.tracker.failure(mark) is None:
                why = f"no executor is left: the driver computes everything: master={context.master}."
                host.tracker.fail(mark, why, now_ms=clock.now_ms(), held_by=context.master)
            context.cancelAllJobs()


def executor_count(context: SparkContext) -> int:
    """Without the driver, which Spark counts with them."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1
