"""`tidemill.spark.run`: a pipeline in the Spark session of the caller, such as a notebook, `spark-submit`, or a job.

    run(spark, build) ─► build(p), checks, the lease of (pipeline, instance)   in the caller's thread: errors are raised
                      └► runner (a daemon thread)                              until stop(), or the end of the session
                      └► guard (a daemon thread)                               renews the lease, watches the session

The pipeline uses a separate session of the caller's Spark application (`newSession`), so the caller's settings and
temporary views neither change nor matter. It has no streaming query: the feeds advance the tables without it. It never
stops the application, cancels its jobs, or installs signal handlers.

Invariant (any number of writers): identical drivers, runs and killed processes leave tables exact, because every append
is a compare-and-append. The lease only prevents that two sessions do the same work by mistake: the second one is
refused, and a run that lost its lease ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tidemill.base.config.sections import NAME, NOT_A_NAME
from tidemill.base.errors import InvalidError
from tidemill.base.status.logging import configure_logs
from tidemill.base.status.status import this_process
from tidemill.spark.definition import Pipeline
from tidemill.spark.pipeline.pipeline_run import PipelineRun
from tidemill.spark.pipeline.run_lease import RunLease
from tidemill.spark.pipeline.runner import PipelineRunner
from tidemill.spark.session.java import cache_dir
from tidemill.spark.session.opener import SessionOpener
from tidemill.spark.session.requirements import check_pipeline_session
from tidemill.spark.settings import DriverSettings, StoreUrls, find_cluster
from tidemill.spark.source import registered_urls

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Build = Callable[[Pipeline], object]
INSTANCE = "session"

log = structlog.get_logger()

_running: dict[tuple[str, str, StoreUrls], PipelineRun] = {}
_starting = threading.Lock()
_exit_hook = threading.Event()
"""Set once `stop_all` is called at the end of the interpreter."""


def run(
    spark: SparkSession,
    build: Build,
    *,
    name: str = "",
    instance: str = INSTANCE,
    config: str = "",
    objects: str = "",
    consensus: str = "",
    scratch: str | Path | None = None,
) -> PipelineRun:
    """Run the pipeline that `build(p)` declares in this session, and return immediately.

    `name`: the pipeline's; by default that of the function, or of its file if the function is called `build`.
    `instance`: distinguishes runs of one pipeline: a second one of the same instance is refused. `config`, `objects`,
    `consensus`: the cluster, chosen as by `read`. `scratch`: directory of the mirrors, which are caches.

    Raises InvalidError if a declaration is wrong, the session lacks something, or the pipeline runs already;
    UnavailableError if consensus does not answer; and what `build` raises.
    """
    if not structlog.is_configured():
        configure_logs("warning")
    pipeline = Pipeline(name or _name_of(build))
    for one in (pipeline.name, instance):
        if not NAME.match(one):
            raise InvalidError(f"bad name: {NOT_A_NAME.format(one)}.", fix="Set name=… or instance=….")
    build(pipeline)
    pipeline.check()
    check_pipeline_session(spark)
    urls = find_cluster(objects, consensus, config, registered_urls(spark))
    master = spark.sparkContext.master
    directory = Path(scratch) if scratch is not None else _default_scratch(urls, pipeline.name, instance)
    settings = DriverSettings(
        pipeline.name, Path(), urls, master, directory.absolute(), instance=instance, dead_letters_ms=0
    )
    key = (pipeline.name, instance, urls)
    with _starting:
        if key in _running:
            raise _already_runs(settings, "this process")
        pid, host = this_process()
        lease = RunLease(urls, pipeline.name, instance, f"{spark.sparkContext.applicationId} pid {pid} on {host}")
        try:
            if (holder := lease.acquire()) is not None:
                raise _already_runs(settings, holder)
            stopping = threading.Event()
            opener = SessionOpener(settings, shared=True, spark=spark, of_caller=True)
            found = PipelineRun(spark, PipelineRunner(settings, stopping, opener, pipeline), stopping, lease)
        except BaseException:
            lease.close()
            raise
        if not _exit_hook.is_set():
            # Before Python ends its pools of threads, which a run needs to stop; hooks of `atexit` are called later.
            getattr(threading, "_register_atexit", atexit.register)(stop_all)
            _exit_hook.set()
        _running[key] = found
        found.start_threads(partial(_running.pop, key, None))
    return found


def stop_all() -> None:
    """Stop all runs of this process, as the end of a program without `stop` does."""
    for found in list(_running.values()):
        try:
            found.stop()
        except TimeoutError as error:
            log.warning("run not stopped", error=str(error))


def _already_runs(settings: DriverSettings, holder: str) -> InvalidError:
    return InvalidError(
        f"the pipeline runs already: pipeline={settings.name} instance={settings.instance} by={holder}.",
        fix="Stop that run (.stop() of the value that run() returned), or run this one with another instance=NAME.",
    )


def _name_of(build: Build) -> str:
    """Return the name of the function, or of its file if it is called `build`."""
    name = getattr(build, "__name__", "")
    if name != "build":
        return name.lower()
    file = Path(sys.modules["__main__"].__dict__.get("__file__") or "")
    code = getattr(build, "__code__", None)
    if code is not None and Path(code.co_filename).suffix == ".py" and "ipykernel" not in code.co_filename:
        file = Path(code.co_filename)
    if not file.stem or "ipykernel" in str(file):
        raise InvalidError("the pipeline has no name.", fix="Set name=NAME, or name the function as the pipeline.")
    return file.stem.lower()


def _default_scratch(urls: StoreUrls, name: str, instance: str) -> Path:
    """Return a directory of this user, cluster, pipeline and instance."""
    cluster = zlib.crc32(f"{urls.objects} {urls.consensus}".encode())
    return cache_dir(os.environ) / "sessions" / f"{cluster:08x}" / f"{name}-{instance}"
