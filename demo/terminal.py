"""The demo's view on stderr: a live table of stages and rates in a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.status import StageState
from tidemill.cli.cluster.status import STAGE_COLUMNS, status_lines
from tidemill.cli.output.text_table import format_table

if TYPE_CHECKING:
    from demo.runner import Runner

REFRESH_S = 0.5
PLAIN_EVERY_S = 5.0


@asynccontextmanager
async def live_view(runner: Runner) -> AsyncIterator[None]:
    """Show the state of `runner` while the body runs."""
    async with Tasks(lambda _, error: runner.fail(error)) as tasks:
        tasks.spawn(_live(runner) if sys.stderr.isatty() else _plain(runner), name="demo-view")
        yield


async def _live(runner: Runner) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        while True:
            lines = format_table(STAGE_COLUMNS, status_lines(runner.marks), width=console.width, colour=True)
            live.update(Group(_headline(runner), Text.from_ansi("\n".join(lines))))
            await asyncio.sleep(REFRESH_S)


async def _plain(runner: Runner) -> None:
    while True:
        print(f"demo: {_headline(runner)}", file=sys.stderr, flush=True)
        await asyncio.sleep(PLAIN_EVERY_S)


def _headline(runner: Runner) -> Any:
    states = [d.state for d in runner.marks.values()]
    counted = ", ".join(f"{states.count(s)} {s}" for s in StageState if s in states) or "no marks yet"
    check = runner.checks[-1] if runner.checks else None
    money = (
        "money not compared yet" if check is None else f"money {'equal' if check.equal else 'UNEQUAL'} {check.shard}"
    )
    return (
        f"{runner.phase}  transactions {runner.load_counts.get('transactions', 0):,}"
        f"  records {runner.click_counts.get('produced', 0):,}  crashes {runner.report.crashes}"
        f"  money {money}  {counted}"
    )
