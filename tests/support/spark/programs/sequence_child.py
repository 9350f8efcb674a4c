"""A driver of a table with a sequence that kills itself: at an append, before or after it took effect.

python sequence_child.py OBJECTS_URL CONSENSUS_URL SCRATCH follow|replay APPEND before|after

It follows the topic binding by binding, or replays the dead letters in groups of ten. It prints "done" at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from support.spark.harbour import Harbour
from support.spark.sinks import topic_sink
from support.spark.users_topic import DECLARED, STRICT
from tidemill.base.runtime.daemon_threads import exit_now
from tidemill.shards.handle import LogShard
from tidemill.spark.definition import Pipeline
from tidemill.spark.replay import pipeline_replay
from tidemill.spark.settings import StoreUrls


def kill_at_append(number: int, *, after: bool) -> None:
    """End this process by SIGKILL at its append of this number, counted over all shards."""
    append: Callable[..., Awaitable[Any]] = LogShard.compare_and_append
    seen = 0

    async def killed(*args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = await append(*args, **options)
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    LogShard.compare_and_append = killed  # type: ignore[method-assign,assignment]


def follow(harbour: Harbour, scratch: Path) -> None:
    sink = topic_sink(harbour, scratch, "users", expectations=STRICT, **DECLARED)
    (table,) = sink.seats.tables
    for upper in range(1001, sink.latest() + 1, 1000):
        if table.upper < upper:
            sink.process(upper)
    assert not sink.seats.failed and not sink.error


def replay(harbour: Harbour) -> None:
    pipeline_replay.LETTERS_AT_ONCE = 10
    p = Pipeline("p")
    p.table("users", p.topic("users", **DECLARED))
    for _ in pipeline_replay.replay_pipeline(harbour.portal, harbour.stores, p):
        pass


def main(objects: str, consensus: str, scratch: str, mode: str, append: str, when: str) -> None:
    harbour = Harbour(Path(), StoreUrls(objects, consensus))
    kill_at_append(int(append), after=when == "after")
    if mode == "follow":
        follow(harbour, Path(scratch))
    else:
        replay(harbour)
    print("done", flush=True)
    exit_now(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
