"""Watch of executors: when a cluster has no executor left, cancel the Spark jobs, and the driver computes their steps.

A Spark job without an executor waits indefinitely. A cancelled step is not lost: the feed computes it inline
(distributed_step.py), and a derived table retries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.spark.ingest.pipeline_context import PipelineContext

if TYPE_CHECKING:
    from pyspark import SparkContext

CHECK_S = 1.0
REPLACEMENT_WAIT_S = 5.0
"""Time in which a cluster may replace a lost executor."""


def status_name(host: PipelineContext) -> str:
    return f"pipeline:{host.settings.name}:executors"


def watch_executors(host: PipelineContext) -> None:
    """Watch until the pipeline ends, once Spark's context exists. While no executor is left, report it under
    `status_name`.

    If Spark itself requests executors on demand (dynamic allocation), having none is normal, and nothing is watched.
    """
    while host.spark is None:
        if host.ending.wait(CHECK_S):
            return
    if host.spark.sparkContext.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return
    context, clock, mark = host.spark.sparkContext, host.stores.clock, status_name(host)
    seen_s = clock.monotonic_s()
    while not host.ending.wait(CHECK_S):
        if executor_count(context):
            seen_s = clock.monotonic_s()
            host.tracker.clear_failure(mark)
        elif clock.monotonic_s() - seen_s > REPLACEMENT_WAIT_S:
            if host.tracker.failure(mark) is None:
                why = f"no executor is left: the driver computes everything: master={context.master}."
                host.tracker.fail(mark, why, now_ms=clock.now_ms(), held_by=context.master)
            context.cancelAllJobs()


def executor_count(context: SparkContext) -> int:
    """Return the number of executors, without the driver, which Spark includes."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1
