"""What `up` tells for its children: marks of those that do not come to run, and their tables' errors in the terminal.

A driver that cannot even start has nobody else to speak for it. Nothing is written while every child runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import TidemillError
from tidemill.base.limits import MARK_BLIND_AFTER_MS, MARK_PUBLISH_INTERVAL_S
from tidemill.base.marks import Report, Tracker
from tidemill.base.tasks import is_fault, sentence
from tidemill.consensus.api import Consensus
from tidemill.consensus.board import Board
from tidemill.consensus.open import open_consensus

LOOK_EVERY = 3
"""Rounds between two looks at what the drivers publish."""
ADOPT_TIMEOUT_S = 3.0
RETIRE_TIMEOUT_S = 3.0

log = structlog.get_logger()


class Telling:
    """`run` until cancelled; `adopt` before the first child starts, so that ages survive a restart of `up` too."""

    def __init__(self, name: str, url: str, tracker: Tracker, clock: Clock, rand: Rand, say: Callable[[str], None]):
        self._process = f"up:{name}"
        self._url = url
        self._tracker = tracker
        self._clock = clock
        self._rand = rand
        self._say = say
        self._consensus: Consensus | None = None
        self._told = False
        self._said: dict[str, str] = {}

    async def adopt(self) -> None:
        try:
            async with asyncio.timeout(ADOPT_TIMEOUT_S):
                board = await self._board()
                for report in await board.reports():
                    if report.process == self._process:
                        self._tracker.adopt(report)
                        self._told = bool(report.marks)
        except (TidemillError, TimeoutError) as error:
            log.info("what was told before is not known", cause=sentence(error))

    async def run(self) -> None:
        round_number = 0
        while True:
            await asyncio.sleep(MARK_PUBLISH_INTERVAL_S)
            round_number += 1
            try:
                await self._publish()
                if round_number % LOOK_EVERY == 0:
                    self._print(await (await self._board()).reports())
            except BaseException as error:
                if not is_fault(error):
                    raise
                log.debug("nothing told", error=sentence(error))

    async def retire(self, ended: Collection[str]) -> None:
        """These processes ended with their parent, in order. A driver that a peer outlives is not missed, so it is
        forgotten; what nobody does any more stays, as blind: no report is never read as health."""
        try:
            async with asyncio.timeout(RETIRE_TIMEOUT_S):
                board = await self._board()
                reports = await board.reports()
                now_ms = self._clock.now_ms()
                living = {_pipeline(r.process) for r in reports if r.process not in ended and not _blind(r, now_ms)}
                for process in ended:
                    if _pipeline(process) in living - {""}:
                        await board.forget(process)
        except (TidemillError, TimeoutError) as error:
            log.info("what ended is told as blind for an hour", cause=sentence(error))

    async def aclose(self) -> None:
        if self._consensus is not None:
            await self._consensus.aclose()

    async def _board(self) -> Board:
        if self._consensus is None:
            self._consensus = await open_consensus(self._url, self._clock, self._rand)
        return Board(self._consensus, self._rand)

    async def _publish(self) -> None:
        report = self._tracker.report(self._process, self._clock.now_ms())
        if report.marks or self._told:
            await (await self._board()).publish(report)
            self._told = bool(report.marks)

    def _print(self, reports: list[Report]) -> None:
        """Errors that drivers tell of their units: each once, again only when it is another or came back."""
        now: dict[str, str] = {}
        for report in reports:
            if report.process.startswith("pipeline:"):
                now |= {mark.name: mark.error for mark in report.marks if mark.error}
        for name, error in now.items():
            if self._said.get(name) != error:
                self._say(f"{name}: {error}")
        self._said = now


def _pipeline(process: str) -> str:
    """Whose driver a process is; "" = nobody's."""
    kind, _, rest = process.partition(":")
    return rest.partition(":")[0] if kind == "pipeline" else ""


def _blind(report: Report, now_ms: int) -> bool:
    return now_ms - report.at_ms > MARK_BLIND_AFTER_MS
