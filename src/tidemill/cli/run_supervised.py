"""Supervised processes in the foreground until Ctrl-C: the shared part of `up` and `pipeline run`, options included."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.config import Config
from tidemill.base.errors import InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.daemon_threads import resolve_names_in_daemon_threads
from tidemill.base.runtime.private_directories import make_private_directory
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.logging import configure_logs
from tidemill.base.status.status import StatusReport
from tidemill.node.supervise.driver_instances import OwnDrivers
from tidemill.node.supervise.processes import make_supervisor, with_overrides
from tidemill.node.supervise.status import SupervisorStatus
from tidemill.node.supervise.supervisor import STOP_TIMEOUT_S, Supervisor

InstancesOption = Annotated[
    int | None,
    typer.Option(
        "--instances", min=0, help="Number of identical drivers of each pipeline; overrides the configuration."
    ),
]


@dataclass(frozen=True)
class SparkOptions:
    """Settings of drivers that override those of the configuration."""

    master: Annotated[str, typer.Option("--master", help="Spark master; overrides the configuration.")] = ""
    driver_memory: Annotated[
        str, typer.Option("--driver-memory", help="JVM heap of each driver that uses Spark, such as 512m or 2g.")
    ] = ""
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="KEY=VALUE", help="A Spark setting; overrides the configuration. Repeatable."),
    ] = None

    def apply(self, config: Config, pipelines: Iterable[str], instances: int | None) -> Config:
        """Return the configuration with these settings for `pipelines`. Raises InvalidError."""
        master, memory = self.master, self.driver_memory
        return with_overrides(
            config, pipelines, instances=instances, master=master, driver_memory=memory, conf=self.conf or ()
        )


def run_supervised(
    config: Config,
    name: str,
    start: Callable[[Supervisor, Callable[[BaseException], None]], None],
    *,
    pipelines: Collection[str],
    label: str = "",
    ready: Callable[[Sequence[StatusReport], int, float], str] | None = None,
) -> None:
    """Run children until SIGINT or SIGTERM. Raises the error with which a child ends everything.

    `name` is the process that reports children that fail to start. `start` adds the children: all drivers of
    `pipelines` that exist with `label`. `ready` returns what to print once, from the reports of all processes, the time
    and the seconds since the start; "" = not yet.
    """

    _log_to_file(Path(config.node.data) / "logs" / f"up-{name}.log")

    async def run() -> None:
        resolve_names_in_daemon_threads(asyncio.get_running_loop())
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        def finish() -> None:
            if not failed.done():
                _print_message(f"stopping: each process finishes its current work, for at most {STOP_TIMEOUT_S:.0f} s.")
                failed.set_result(None)

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, finish)
        async with AsyncExitStack() as stack:
            await _host_consensus(config, stack)
            clock = SystemClock()
            supervisor = make_supervisor(config, clock, fail, _print_message)
            tracker = supervisor.tracker
            drivers = OwnDrivers(pipelines, label)
            telling = SupervisorStatus(name, config.consensus_url, tracker, clock, Rand(), _print_message, drivers)
            telling.restarts = supervisor.recent_restarts
            stack.push_async_callback(telling.aclose)
            began_s = clock.monotonic_s()

            def announce(reports: Sequence[StatusReport]) -> bool:
                text = ready(reports, clock.now_ms(), clock.monotonic_s() - began_s) if ready is not None else ""
                if text:
                    _print_message(text)
                return bool(text)

            telling.announce = announce if ready is not None else None
            await telling.adopt()
            tasks = await stack.enter_async_context(Tasks(lambda _, error: fail(error)))
            tasks.spawn(telling.run(), name="telling")
            stack.push_async_callback(_stop_children, supervisor, telling)
            start(supervisor, fail)
            drivers.started = _stage_names(supervisor)
            await failed

    asyncio.run(run())


def _log_to_file(path: Path) -> None:
    """Keep the terminal for sentences: log lines of this process go to a file, as those of its children do."""
    with contextlib.suppress(OSError):  # the node reports a directory that cannot be used
        make_private_directory(path.parent)
        configure_logs(file=path)


async def _stop_children(supervisor: Supervisor, telling: SupervisorStatus) -> None:
    await supervisor.stop()
    await telling.forget_ended(_stage_names(supervisor))


def _stage_names(supervisor: Supervisor) -> list[str]:
    return [mark for child in supervisor.children.values() for mark in child.marks]


def _print_message(sentence: str) -> None:
    print(f"tidemill: {sentence}", file=sys.stderr, flush=True)


async def _host_consensus(config: Config, stack: AsyncExitStack) -> None:
    """Open SQLite's consensus in this process first, because the first process that opens it hosts the sequencer. This
    process has nothing else to do, so a driver or a node that is stopped or busy delays only its own commits. If SQLite
    cannot be opened now, the node reports that and waits."""
    if not config.consensus_url.startswith("sqlite:"):
        return
    from tidemill.consensus.factory import open_consensus

    try:
        consensus = await open_consensus(config.consensus_url, SystemClock(), Rand())
    except InvalidError:
        return  # the node reports it
    except (UnavailableError, UnknownOutcomeError) as error:
        print(f"tidemill: {error}", file=sys.stderr)
        return
    stack.push_async_callback(consensus.aclose)
