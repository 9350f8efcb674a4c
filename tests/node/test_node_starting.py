"""Row F612: a store that fails between two steps of a node's start is awaited in the same process, and reported."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

import tidemill.node.assembly as assembly
from support.ports import free_address
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.config import Config
from tidemill.base.errors import UnavailableError
from tidemill.base.status.status import StageStatus
from tidemill.consensus.memory import MemoryConsensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.metastore import Metastore
from tidemill.node.node import Node

WHY = "planted: consensus went away."


class GoesAway:
    """Consensus whose calls fail while `away` is set, except those of the status board, which reports it."""

    def __init__(self, inner: MemoryConsensus) -> None:
        self.inner = inner
        self.away = False

    def trouble(self) -> str:
        return WHY if self.away else ""

    async def aclose(self) -> None:
        """Do nothing: the test reads the state after the node's end."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(key: str, *more: Any, **named: Any) -> Any:
            if self.away and not key.startswith("board/"):
                raise UnavailableError(WHY)
            return await found(key, *more, **named)

        return call


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (assembly, "check_bucket"),
        (Metastore, "start"),
        (assembly.Membership, "start"),
        (assembly.CaptureAssignment, "start"),
        (assembly.Catalogue, "create_topic"),
        (assembly.LocalTopics, "start"),
        (assembly.KafkaServer, "start"),
    ],
)
async def test_f612_consensus_that_goes_away_between_two_steps_of_the_start_is_waited_for_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    consensus = GoesAway(MemoryConsensus(SystemClock()))

    async def opened(*_: Any) -> Any:
        return consensus

    monkeypatch.setattr(assembly, "open_consensus", opened)
    works = getattr(owner, name)
    tries = []

    async def begins(*args: Any, **named: Any) -> Any:
        consensus.away = consensus.away or not tries
        tries.append(1)
        return await works(*args, **named)

    monkeypatch.setattr(owner, name, begins)
    config = Config.model_validate(
        {
            "node": {"name": "n1", "data": str(tmp_path), "http": free_address(), "kafka": free_address()},
            "objects": {"url": "memory://"},
            "topics": {"clicks": {"partitions": 1}},
        }
    )
    node, stop = Node(config, lambda *_: []), asyncio.Event()
    running = asyncio.ensure_future(node.run(stop))
    board = StatusBoard(consensus, Rand())  # type: ignore[arg-type]

    async def reported() -> StageStatus | None:
        return next((m for r in await board.reports() for m in r.marks if m.name == "node:n1" and m.error), None)

    await until(lambda: running.done() or (len(tries) >= 2 and "cannot start" in node.not_ready_reason()))
    assert not running.done(), running.exception()
    while (mark := await reported()) is None:
        await asyncio.sleep(0.02)
    assert WHY in mark.error and mark.held_by == "consensus@node:n1"
    consensus.away = False
    await until(lambda: running.done() or not node.not_ready_reason())
    assert not running.done(), running.exception()
    while await reported() is not None:
        await asyncio.sleep(0.02)
    stop.set()
    await running
    (last,) = [report for report in await board.reports() if report.process == "node:n1"]
    assert last.left and last.marks, "a node that is stopped in order says so"
    await consensus.inner.aclose()
