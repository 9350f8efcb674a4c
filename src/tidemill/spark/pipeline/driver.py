"""`python -m tidemill.spark.pipeline.driver`: run one pipeline in a process, or several in one (shared_driver.py).
`tidemill up` supervises the process.

    open stores ─┬─ if Spark is used: start the JVM (a thread) ────────┐
                 └─ wait for each feed → open shards → hydrate mirrors ┴→ if Spark is used: one streaming query for all
                                                                          feeds, one thread per derived table

Each feed's sink advances its tables independently of Spark, so rows appear, also after a crash, while the JVM still
starts. The scratch directory holds mirrors, which are a cache, and the checkpoint of the query, which every process
creates again.

Exit 0: stopped by SIGTERM or SIGINT, at a batch boundary. Exit 2: the pipeline (if it is the only one) or a URL is
invalid, reported in one sentence. Any other code: restart the process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import traceback
from functools import partial
from pathlib import Path

import pyarrow as pa
import structlog

from tidemill.base.errors import ClusterReplacedError, InvalidError, StoreRolledBackError
from tidemill.base.libraries import require
from tidemill.base.limits import DEAD_LETTERS_KEEP_MS, FRESHNESS_BUDGET_MS, PIPELINE_FRESHNESS_MS
from tidemill.base.runtime import file_descriptors
from tidemill.base.runtime.daemon_threads import exit_now
from tidemill.base.runtime.gc_tuning import install_gc_tuning
from tidemill.base.runtime.memory_budget import retain_freed_memory
from tidemill.base.status.logging import configure_logs
from tidemill.spark.settings import CONF_VARIABLE, CONSENSUS_VARIABLE, OBJECTS_VARIABLE, StoreUrls

log = structlog.get_logger()

EXIT_CONFIGURATION = 2
WITHOUT_SPARK = "Pipelines need it; captured tables and topics are served without it, over HTTP and Kafka."


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tidemill.spark.pipeline.driver", description="Run pipelines until SIGTERM.")
    for name, variable in (("objects", OBJECTS_VARIABLE), ("consensus", CONSENSUS_VARIABLE)):
        given = os.environ.get(variable, "")
        help_text = f"URL of {name}; without a password, else set it in {variable}"
        parser.add_argument(f"--{name}", default=given, required=not given, help=help_text)
    parser.add_argument("--domains", type=int, default=0, help="metastore.domains of the configuration")
    several = partial(parser.add_argument, action="append", required=True)
    several("--pipeline", type=Path, help="file with build(p)")
    several("--name", help="name of the pipeline")
    parser.add_argument("--master", default="local[*]", help="Spark master")
    several("--scratch", type=Path, help="directory for mirrors and Spark's files")
    help_text = (
        "with several pipelines, each with --pipeline, --name and --scratch: directory of the session that they share"
    )
    parser.add_argument("--session", type=Path, help=help_text)
    parser.add_argument("--instance", default="", help="distinguishes drivers of the same pipeline in their statuses")
    parser.add_argument("--driver-memory", default="1g")
    parser.add_argument("--budget-ms", type=int, default=FRESHNESS_BUDGET_MS, help="freshness.budget_s in ms")
    help_text = "retention.dead_letters_s in ms"
    parser.add_argument("--dead-letters-ms", type=int, default=DEAD_LETTERS_KEEP_MS, help=help_text)
    parser.add_argument(
        "--freshness-ms", action="append", type=int, help="freshness_s of each pipeline in ms: one for each --name"
    )
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="a Spark setting; repeatable")
    options = parser.parse_args(arguments)
    count = len(options.name)
    if {len(options.pipeline), len(options.scratch)} != {count} or (count > 1) != (options.session is not None):
        parser.error("give one --pipeline and --scratch for each --name, and --session only with several names")
    freshness_ms = options.freshness_ms or [PIPELINE_FRESHNESS_MS] * count
    if len(freshness_ms) != count:
        parser.error("give one --freshness-ms for each --name, or none")
    configure_logs()
    file_descriptors.raise_limit()
    # Pages that were released between two steps and faulted in again took a quarter of a driver's time. Arrow's own
    # pool releases them in any configuration.
    pa.set_memory_pool(pa.system_memory_pool())
    retain_freed_memory()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())

    from tidemill.spark.pipeline.runner import PipelineRunner
    from tidemill.spark.pipeline.shared_driver import SharedDriver
    from tidemill.spark.settings import DriverSettings

    install_gc_tuning()
    conf = _spark_settings(options.conf)

    def settings(name: str, file: Path, scratch: Path, freshness_ms: int = PIPELINE_FRESHNESS_MS) -> DriverSettings:
        return DriverSettings(
            name=name,
            file=file,
            urls=StoreUrls(options.objects, options.consensus),
            domains=options.domains,
            master=options.master,
            scratch=scratch.absolute(),
            instance=options.instance,
            driver_memory=options.driver_memory,
            conf=conf,
            budget_ms=options.budget_ms,
            freshness_ms=freshness_ms,
            dead_letters_ms=options.dead_letters_ms,
        )

    try:
        require("pyspark", WITHOUT_SPARK)
    except InvalidError as error:
        print(str(error), file=sys.stderr, flush=True)
        return EXIT_CONFIGURATION
    each = zip(options.name, options.pipeline, options.scratch, freshness_ms, strict=True)
    pipelines = [settings(*one) for one in each]
    try:
        if options.session is None:
            PipelineRunner(pipelines[0], stopping).run()
        else:
            SharedDriver(pipelines, settings(options.session.name, Path(), options.session), stopping).run()
    except (InvalidError, ClusterReplacedError) as error:
        print(str(error), file=sys.stderr, flush=True)
        return EXIT_CONFIGURATION
    except StoreRolledBackError as error:
        print(str(error), file=sys.stderr, flush=True)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _spark_settings(pairs: list[str]) -> dict[str, str]:
    """Merge the settings of the environment and of the arguments. Raises SystemExit 2 as argparse does for one without
    `=`."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        print(f"not a Spark setting: conf={wrong[0]!r}. Write KEY=VALUE.", file=sys.stderr)
        raise SystemExit(EXIT_CONFIGURATION)
    conf: dict[str, str] = json.loads(os.environ.get(CONF_VARIABLE) or "{}")
    return conf | dict(pair.split("=", 1) for pair in pairs)


if __name__ == "__main__":
    exit_now(main())  # durable work is complete, and Spark's shutdown hooks would only add seconds
