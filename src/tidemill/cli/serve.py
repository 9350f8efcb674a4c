"""`python -m tidemill.cli.serve RESOLVED.json`: the node process. Exit 2 = bad configuration, in one sentence."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.routing import BaseRoute

from tidemill.base.clock import Clock
from tidemill.base.errors import Invalid
from tidemill.consensus.board import Board
from tidemill.console.app import console_routes
from tidemill.node.assembly import Node
from tidemill.node.config import Config
from tidemill.node.logs import configure_logs


def _console(board: Board, ready: Callable[[], bool], clock: Clock) -> Sequence[BaseRoute]:
    return console_routes(board.reports, ready, clock)


async def _serve(config: Config) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await Node(config, _console).run(stop)


def main() -> int:
    configure_logs()
    config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    # Long-lived start-up objects would be walked by every full collection, a pause on the produce path.
    gc.freeze()
    try:
        asyncio.run(_serve(config))
    except Invalid as error:
        print(f"tidemill: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
