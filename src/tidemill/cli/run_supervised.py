"""Supervised processes in the foreground, until Ctrl-C: what `up` and `pipeline run` share, options included."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from typing import Annotated

import typer

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.config import Config
from tidemill.base.errors import InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks
from tidemill.node.supervise.processes import make_supervisor
from tidemill.node.supervise.status import SupervisorStatus
from tidemill.node.supervise.supervisor import Supervisor

MasterOption = Annotated[str, typer.Option("--master", help="Spark master, in place of the configuration's.")]
InstancesOption = Annotated[
    int | None, typer.Option("--instances", min=0, help="Identical drivers of each pipeline, in place of the file's.")
]
ConfOption = Annotated[
    list[str], typer.Option("--conf", metavar="KEY=VALUE", help="A Spark setting; wins over the file's. Repeatable.")
]
MemoryOption = Annotated[str, typer.Option("--driver-memory", help="Heap of each driver's JVM: 512m, 2g.")]


def run_supervised(
    config: Config,
    name: str,
    start: Callable[[Supervisor, Callable[[BaseException], None]], None],
    *,
    pipelines: Collection[str],
    label: str = "",
) -> None:
    """Until SIGINT or SIGTERM; raises what a child ends everything with. `name`: who tells of children that do not come
    to run; `start` adds them: of `pipelines` all the drivers there are with `label`."""

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
            await _host_consensus(config, stack)
            clock = SystemClock()
            supervisor = make_supervisor(config, clock, fail, _say)
            tracker = supervisor.tracker
            telling = SupervisorStatus(
                name, config.consensus_url, tracker, clock, Rand(), _say, pipelines=pipelines, label=label
            )
            stack.push_async_callback(telling.aclose)
            await telling.adopt()
            tasks = await stack.enter_async_context(Tasks(lambda _, error: fail(error)))
            tasks.spawn(telling.run(), name="telling")
            stack.push_async_callback(_end, supervisor, telling)
            start(supervisor, fail)
            telling.started = _marks(supervisor)
            await failed

    asyncio.run(run())


async def _end(supervisor: Supervisor, telling: SupervisorStatus) -> None:
    await supervisor.stop()
    await telling.retire(_marks(supervisor))


def _marks(supervisor: Supervisor) -> list[str]:
    return [mark for child in supervisor.children.values() for mark in child.marks]


def _say(sentence: str) -> None:
    print(f"tidemill: {sentence}", file=sys.stderr, flush=True)


async def _host_consensus(config: Config, stack: AsyncExitStack) -> None:
    """SQLite's sequencer lives in the first process that opens the database. This one has nothing else to do, so a
    driver or a node that is stopped or busy holds up nobody's commits but its own. Where it cannot be opened now, the
    node says so and waits."""
    if not config.consensus_url.startswith("sqlite:"):
        return
    from tidemill.consensus.factory import open_consensus

    try:
        consensus = await open_consensus(config.consensus_url, SystemClock(), Rand())
    except InvalidError:
        return  # the node refuses it in a sentence of its own
    except (UnavailableError, UnknownOutcomeError) as error:
        print(f"tidemill: {error}", file=sys.stderr)
        return
    stack.push_async_callback(consensus.aclose)
