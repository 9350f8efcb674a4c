"""`python -m tidemill.cli.serve RESOLVED.json`: the node process. Its last line is one sentence with the reason of its
end.

    exit  0  stopped    1  ended, to be restarted    2  refused before it served: bad configuration
          5  the cluster was replaced, do not restart
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import signal
import sys
import traceback
from pathlib import Path

from tidemill.base.clock import TEST_CLOCK
from tidemill.base.config.config import Config
from tidemill.base.errors import ClusterReplacedError, InvalidError, StoreRolledBackError
from tidemill.base.libraries import hide_modules
from tidemill.base.limits import MIB
from tidemill.base.runtime import file_descriptors
from tidemill.base.runtime.daemon_threads import exit_now, resolve_names_in_daemon_threads
from tidemill.base.runtime.gc_tuning import install_gc_tuning
from tidemill.base.runtime.memory_budget import retain_freed_memory
from tidemill.base.status.logging import configure_logs
from tidemill.console.app import console_routes
from tidemill.node.supervise.supervisor import EXIT_CONFIGURATION, EXIT_REPLACED

RETAINED_FREE_BYTES = 64 * MIB
"""Limit of freed memory that stays with the process. The largest buffers of a node live for one request, and a page
fault on a returned page costs more than filling it."""


async def _serve(config: Config) -> int:
    """Serve until a signal. Return the exit code. An error of the configuration that appears after the node served is a
    failure like any other: the next process refuses it."""
    stop = asyncio.Event()
    resolve_names_in_daemon_threads(asyncio.get_running_loop())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    from tidemill.node.node import Node  # behind hide_modules

    node = Node(config, console_routes)
    try:
        await node.run(stop)
    except InvalidError as error:
        print(f"tidemill: {error}", file=sys.stderr)
        return 1 if node.has_served else EXIT_CONFIGURATION
    return 0


def _preload_modules(config: Config) -> None:
    """Import the modules that the first request or session would import on the running loop, in 0.1 s steps."""
    import postgast  # noqa: F401

    import tidemill.kafka.handlers
    import tidemill.node.http.embedded_granian
    import tidemill.node.node
    import tidemill.shapes.where
    import tidemill.shards.api

    if config.capture:
        import psycopg  # noqa: F401

        import tidemill.capture.session.capture  # noqa: F401


def main() -> int:
    configure_logs()
    file_descriptors.raise_limit()
    retain_freed_memory(RETAINED_FREE_BYTES)
    hide_modules("pandas", "hypothesis")
    config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    try:
        gc.disable()  # nearly all containers that imports create live on: walking them took an eighth of the start
        _preload_modules(config)
        gc.enable()
        install_gc_tuning()
        with asyncio.Runner(loop_factory=TEST_CLOCK.loop if TEST_CLOCK is not None else None) as runner:
            return runner.run(_serve(config))
    except ClusterReplacedError as error:
        print(f"tidemill: {error}", file=sys.stderr)
        return EXIT_REPLACED
    except StoreRolledBackError as error:
        # Another process continues from the state in the stores; the memory of this process must not be used again.
        print(f"tidemill: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    exit_now(code)  # so that no thread of the HTTP server's runtime aborts the process after its last line
