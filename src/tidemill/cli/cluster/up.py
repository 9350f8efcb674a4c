"""`tidemill up`: one node and its pipelines as supervised processes, until Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial

from tidemill.base.clock import SystemClock
from tidemill.base.config.config import Config, exposed_servers, load
from tidemill.base.config.sections import CaptureSection
from tidemill.base.errors import ConflictError, TidemillError
from tidemill.base.libraries import require
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.tasks import error_sentence
from tidemill.cli.cluster.own_node import own_node_pid
from tidemill.cli.cluster.ready_block import ready_block
from tidemill.cli.context import ConfigOption
from tidemill.cli.run_supervised import InstancesOption, SparkOptions, run_supervised
from tidemill.node.supervise.processes import start_all, supervised_pipelines
from tidemill.node.supervise.supervisor import Supervisor


def up(config: ConfigOption = None, instances: InstancesOption = None, *, spark: SparkOptions) -> None:
    """Run a node (Kafka, HTTP, capture) and the drivers of its pipelines."""
    require("granian")
    loaded = load(config)
    loaded = spark.apply(loaded, loaded.pipeline, instances)
    _require_no_own_node(loaded)
    for key in exposed_servers(loaded):
        print(f"tidemill: WARNING: {key} is reachable from other machines without authentication.", file=sys.stderr)
    for trouble in _capture_problems(loaded):
        print(f"tidemill: WARNING: {trouble} The node keeps trying.", file=sys.stderr)
    print(f"tidemill: node {loaded.node.name}  http {loaded.node.http}  kafka {loaded.node.kafka}", file=sys.stderr)

    def start(supervisor: Supervisor, fail: Callable[[BaseException], None]) -> None:
        start_all(loaded, SystemClock(), fail, supervisor=supervisor)

    ready = partial(ready_block, loaded, str(config or ""))
    run_supervised(loaded, loaded.node.name, start, pipelines=supervised_pipelines(loaded), ready=ready)


def _require_no_own_node(config: Config) -> None:
    """Raise ConflictError if this node runs already. A second one could not listen, but would first start drivers under
    the names of the running drivers."""
    pid = own_node_pid(config)
    if pid:
        raise ConflictError(
            f"this node is running already: node={config.node.name} http={config.node.http} pid={pid}.",
            fix="See it with `tidemill status`. For a second node set node.name, node.http and node.kafka.",
        )


CAPTURE_CHECK_TIMEOUT_S = 5.0


async def _capture_problem(name: str, section: CaptureSection) -> str:
    """Return why a capture cannot run now, or ""."""
    from tidemill.capture.setup.privileges import check_database

    try:
        async with asyncio.timeout(CAPTURE_CHECK_TIMEOUT_S):
            await check_database(section.dsn, section.tables, section.identity)
    except TimeoutError:
        return f"capture {name}: PostgreSQL has not answered in {CAPTURE_CHECK_TIMEOUT_S:.0f} s."
    except TidemillError as error:
        return f"capture {name}: {error_sentence(error)}"
    return ""


def _capture_problems(config: Config) -> list[str]:
    """Return the errors with which captures would fail, to be printed in the foreground. They do not prevent the start:
    an unavailable database concerns its own capture, not the topics, tables and other captures of the node."""
    if not config.capture:
        return []

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(_capture_problem(name, section) for name, section in config.capture.items()))

    with BlockingPortal() as portal:
        return [said for said in portal.call(all_of_them()) if said]
