"""`tidemill up`: one node and its pipelines as supervised processes, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config import Config, exposed, load
from tidemill.base.errors import Invalid, Unavailable, Unknown
from tidemill.base.portal import Portal
from tidemill.base.tasks import Tasks
from tidemill.cli.context import ConfigOption
from tidemill.node.processes import make_supervisor, start_all
from tidemill.node.telling import Telling


def up(config: ConfigOption = None) -> None:
    """Run a node (Kafka, HTTP, capture) and the Spark drivers of its pipelines."""
    loaded = load(config)
    _preflight(loaded)
    for key in exposed(loaded):
        print(f"tidemill: WARNING: {key} is open to other machines without authentication.", file=sys.stderr)
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
        async with AsyncExitStack() as stack:
            await _host_consensus(loaded, stack)
            clock = SystemClock()
            supervisor = make_supervisor(loaded, clock, fail, _say)
            telling = Telling(loaded.node.name, loaded.consensus_url, supervisor.tracker, clock, Rand(), _say)
            stack.push_async_callback(telling.aclose)
            await telling.adopt()
            tasks = await stack.enter_async_context(Tasks(lambda _, error: fail(error)))
            tasks.spawn(telling.run(), name="telling")
            stack.push_async_callback(supervisor.stop)
            start_all(loaded, clock, fail, supervisor=supervisor)
            await failed

    asyncio.run(run())


def _say(sentence: str) -> None:
    print(f"tidemill: {sentence}", file=sys.stderr, flush=True)


async def _host_consensus(config: Config, stack: AsyncExitStack) -> None:
    """SQLite's sequencer lives in the first process that opens the database. This one has nothing else to do, so a
    driver or a node that is stopped or busy holds up nobody's commits but its own. Where it cannot be opened now, the
    node says so and waits."""
    if not config.consensus_url.startswith("sqlite:"):
        return
    from tidemill.consensus.open import open_consensus

    try:
        consensus = await open_consensus(config.consensus_url, SystemClock(), Rand())
    except Invalid:
        return  # the node refuses it in a sentence of its own
    except (Unavailable, Unknown) as error:
        print(f"tidemill: {error}", file=sys.stderr)
        return
    stack.push_async_callback(consensus.aclose)


def _preflight(config: Config) -> None:
    """Refuse a wrong DSN now, in the foreground; a database that goes away later is waited for instead."""
    if not config.capture:
        return
    from tidemill.capture.setup import check_database

    with Portal() as portal:
        for section in config.capture.values():
            portal.call(check_database(section.dsn, section.tables))
