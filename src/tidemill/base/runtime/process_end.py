"""The end of a process whose work is complete, without its threads that resolve names.

getaddrinfo(3) cannot be cancelled, and takes 10 s and more for each name while no DNS server answers. The loop's end
and the interpreter's both join the threads of the loop's executor. A process that was asked to stop has closed
everything before, so these threads have nothing to lose.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

PREFIX = "unawaited"
LINGER_S = 1.0
"""Time for calls that are only slow."""


class _UnawaitedExecutor(ThreadPoolExecutor):
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def leave_threads() -> None:
    """Let the end of the running loop not wait for its executor."""
    asyncio.get_running_loop().set_default_executor(_UnawaitedExecutor(thread_name_prefix=PREFIX))


@contextlib.contextmanager
def prompt_end() -> Iterator[None]:
    """End the process on SystemExit, at most LINGER_S later, if threads of `leave_threads` still run."""
    try:
        yield
    except SystemExit as end:
        threads = [thread for thread in threading.enumerate() if thread.name.startswith(PREFIX)]
        for thread in threads:
            thread.join(LINGER_S / len(threads))
        if any(thread.is_alive() for thread in threads):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
