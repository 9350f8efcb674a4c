"""`tidemill up`: one node and its pipelines as supervised processes, until Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tidemill.base.clock import SystemClock
from tidemill.base.config import Config, exposed, load
from tidemill.base.portal import Portal
from tidemill.cli.context import ConfigOption
from tidemill.cli.supervised import ConfOption, InstancesOption, MasterOption, MemoryOption, run_supervised
from tidemill.node.overrides import overridden
from tidemill.node.processes import start_all, supervised_here
from tidemill.node.supervise import Supervisor


def up(
    config: ConfigOption = None,
    instances: InstancesOption = None,
    master: MasterOption = "",
    driver_memory: MemoryOption = "",
    conf: ConfOption = [],  # noqa: B006
) -> None:
    """Run a node (Kafka, HTTP, capture) and the Spark drivers of its pipelines."""
    loaded = load(config)
    loaded = overridden(
        loaded, loaded.pipeline, instances=instances, master=master, driver_memory=driver_memory, conf=conf
    )
    _preflight(loaded)
    for key in exposed(loaded):
        print(f"tidemill: WARNING: {key} is open to other machines without authentication.", file=sys.stderr)
    print(f"tidemill: node {loaded.node.name}  http {loaded.node.http}  kafka {loaded.node.kafka}", file=sys.stderr)

    def start(supervisor: Supervisor, fail: Callable[[BaseException], None]) -> None:
        start_all(loaded, SystemClock(), fail, supervisor=supervisor)

    run_supervised(loaded, loaded.node.name, start, pipelines=supervised_here(loaded))


def _preflight(config: Config) -> None:
    """Refuse a wrong DSN now, in the foreground; a database that goes away later is waited for instead."""
    if not config.capture:
        return
    from tidemill.capture.setup import check_database

    with Portal() as portal:
        for section in config.capture.values():
            portal.call(check_database(section.dsn, section.tables))
