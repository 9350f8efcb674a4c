"""`tidemill up`: one node and its pipelines as supervised processes, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys

from tidemill.base.clock import SystemClock
from tidemill.base.portal import Portal
from tidemill.cli.context import ConfigOption
from tidemill.node.config import Config, load
from tidemill.node.processes import start_all


def up(config: ConfigOption = None) -> None:
    """Run a node (Kafka, HTTP, capture) and the Spark drivers of its pipelines."""
    loaded = load(config)
    _preflight(loaded)
    print(f"tidemill: node {loaded.node.name}  http {loaded.node.http}  kafka {loaded.node.kafka}", file=sys.stderr)

    async def run() -> None:
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        def finish() -> None:
            if not failed.done():
                failed.set_result(None)

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, finish)
        supervisor = start_all(loaded, SystemClock(), fail)
        try:
            await failed
        finally:
            await supervisor.stop()

    asyncio.run(run())


def _preflight(config: Config) -> None:
    """Refuse a wrong DSN now, in the foreground; a database that goes away later is waited for instead."""
    if not config.capture:
        return
    from tidemill.capture.setup import check_database

    with Portal() as portal:
        for section in config.capture.values():
            portal.call(check_database(section.dsn, section.tables))
