"""The status board: every process publishes its stage statuses in its own registers, and any process reads them all.

    board/<process>              the head: when, who, how many pages; written every time, last
    board/<process> 0x1f <n>     page n: statuses and facts (`pages`); written when one of them changed

Only its own process writes a report, so the last write wins and a lost acknowledgement is resolved by writing again.
One scan reads all registers; a page may be slightly newer than its head. This module never interprets a report as
health: `base.status.status.derive_statuses` does that. A publishing process also drops the reports of processes that
have been silent for an hour: those are gone, not blind. So is one whose report, of a fast clock, is from the future
and has not changed for an hour by the publishing process's monotonic clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.status.status import StatusReport
from tidemill.consensus.api import REPORT_PREFIX, Consensus, Versioned
from tidemill.consensus.status.pages import Pager, decode_report_head, join_report

PREFIX = REPORT_PREFIX
SEPARATOR = "\x1f"

DROP_SILENT_AFTER_MS = 3_600_000
"""Silence after which a process counts as gone rather than blind; its registers are then dropped."""

CLEANUP_INTERVAL_MS = 600_000

WRITE_ATTEMPTS = 5
READ_TIMEOUT_S = 2.0
"""Deadline for `reports_or_raise`: a person, a load balancer or a scraper gets an answer within this time."""

log = structlog.get_logger()


class StatusBoard:
    """Reader and writer of the board, one per process and event loop.

    Methods raise UnavailableError and ClosedError as the consensus does.
    """

    def __init__(self, consensus: Consensus, rand: Rand) -> None:
        self._consensus = consensus
        self._rand = rand
        self._pagers: dict[str, Pager] = {}
        self._seqs: dict[str, int] = {}
        self._written: dict[str, bytes] = {}
        self._tidied_ms = 0
        self._unchanged: dict[str, tuple[int, float]] = {}
        """Version of the head of each process, and the time of the loop at which it was first found."""

    async def publish(self, report: StatusReport) -> None:
        """Replace this process's last report by `report`.

        Raises UnknownOutcomeError only if retries did not resolve it.
        """
        key = PREFIX + report.process
        if report.process not in self._pagers:
            # An earlier life of this process may have had more pages than this one.
            await self._read_versions(key)
            self._pagers[report.process] = Pager()
        head, pages = self._pagers[report.process].split(report)
        names = [f"{key}{SEPARATOR}{number:06d}" for number in range(len(pages))]
        changed = [(name, page) for name, page in zip(names, pages, strict=True) if self._written.get(name) != page]
        # Writes that start in order share few commits.
        outcomes = await asyncio.gather(*(self._write(*page) for page in changed), return_exceptions=True)
        for failed in outcomes:
            if isinstance(failed, BaseException):
                raise failed
        await self._write(key, head)
        for name, page in zip(names, pages, strict=True):
            if name not in self._written:  # another process dropped our registers in the meantime
                await self._write(name, page)
        stale = [name for name in self._seqs if name.startswith(key + SEPARATOR) and name not in names]
        for name in stale:
            await self._drop(name, self._seqs.pop(name))
            self._written.pop(name, None)
        if report.at_ms - self._tidied_ms > CLEANUP_INTERVAL_MS:
            self._tidied_ms = report.at_ms
            await self._drop_silent_processes(report.at_ms)

    async def reports(self) -> list[StatusReport]:
        """Return all reports, by process name. An unreadable one has no statuses and the time 0."""
        return [_decode_report(process, registers) for process, registers in (await self._scan()).items()]

    async def last_report_head(self, process: str) -> StatusReport | None:
        """Return the last report of one process without statuses and facts, by one small read.

        None if there is no readable report.
        """
        head = await self._consensus.head(PREFIX + process)
        try:
            return None if head is None else decode_report_head(head.data)
        except msgspec.MsgspecError as error:
            log.debug("the head of a report cannot be read", process=process, cause=str(error))
            return None

    async def reports_or_raise(self, trouble: Callable[[], str]) -> list[StatusReport]:
        """Return `reports` within READ_TIMEOUT_S, for a caller that must answer in time.

        Raises UnavailableError with `trouble()`, or with the fact that consensus does not answer.
        """
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await self.reports()
        except TimeoutError as error:
            said = trouble() or f"consensus does not answer: waited_s={READ_TIMEOUT_S:g}."
            raise UnavailableError(said, fix="Check that its server runs and can be reached.") from error

    async def drop_report(self, process: str) -> None:
        """Drop the report of a process that ended for good. If the process publishes concurrently, its report stays."""
        for key, version in reversed((await self._scan()).get(process, [])):
            if not await self._drop(key, version.seq):
                return

    # ----------------------------------------------------------------------------------------------

    async def _scan(self) -> dict[str, list[tuple[str, Versioned]]]:
        """Return the registers by process, the head first. Processes without a head are left out."""
        found: dict[str, list[tuple[str, Versioned]]] = {}
        for key, version in await self._consensus.scan(PREFIX):
            process = key[len(PREFIX) :].partition(SEPARATOR)[0]
            found.setdefault(process, []).append((key, version))
        return {process: each for process, each in found.items() if each[0][0] == PREFIX + process}

    async def _read_versions(self, key: str) -> None:
        head = await self._consensus.head(key)
        self._seqs[key] = head.seq if head is not None else 0
        for name, version in await self._consensus.scan(key + SEPARATOR):
            self._seqs[name] = version.seq

    async def _write(self, key: str, data: bytes) -> None:
        for attempt in range(WRITE_ATTEMPTS):
            if key not in self._seqs:
                current = await self._consensus.head(key)
                self._seqs[key] = current.seq if current else 0
            try:
                version = await self._consensus.cas(key, self._seqs[key], data, self._rand.nonce())
            except ConflictError as lost:
                self._seqs[key] = lost.current.seq if isinstance(lost.current, Versioned) else 0
                if not isinstance(lost.current, Versioned):
                    self._written.clear()  # our registers were dropped: every page must be written again
            except UnknownOutcomeError:
                # Whether it landed or not, writing the same data again is right.
                self._seqs.pop(key, None)
                self._written.pop(key, None)
                if attempt == WRITE_ATTEMPTS - 1:
                    raise
            else:
                self._seqs[key] = version.seq
                self._written[key] = data
                return
        raise InvalidError(
            f"several processes publish statuses under one name: process={key[len(PREFIX) :]!r}.",
            fix="Give every process its own node name.",
        )

    async def _drop_silent_processes(self, now_ms: int) -> None:
        """Drop the registers of processes that are gone. Failures are left for the next time, or another process."""
        found, now_s = await self._scan(), asyncio.get_running_loop().time()
        heads = {process: registers[0][1].seq for process, registers in found.items()}
        known = self._unchanged
        self._unchanged = {
            process: known[process] if known.get(process, (0, 0.0))[0] == seq else (seq, now_s)
            for process, seq in heads.items()
        }
        for process, registers in found.items():
            unchanged_ms = (now_s - self._unchanged[process][1]) * 1000
            silent = _decode_report(process, registers).at_ms < now_ms - DROP_SILENT_AFTER_MS
            if not silent and unchanged_ms < DROP_SILENT_AFTER_MS:
                continue
            log.info("a silent process was removed from the status board", process=process, registers=len(registers))
            for key, version in reversed(registers):  # the head last: until then the report can be found again
                if not await self._drop(key, version.seq):
                    break

    async def _drop(self, key: str, seq: int) -> bool:
        """Drop one register. False if its process published again, another process dropped it, or the outcome is
        unknown.
        """
        try:
            await self._consensus.drop(key, seq)
        except (ConflictError, UnknownOutcomeError, UnavailableError) as error:
            log.debug("a register of the status board was not dropped", key=key, cause=error.message)
            return False
        return True


def _decode_report(process: str, registers: list[tuple[str, Versioned]]) -> StatusReport:
    try:
        return join_report(registers[0][1].data, (version.data for _, version in registers[1:]))
    except (msgspec.MsgspecError, TidemillError, ValueError) as error:
        return StatusReport(process, 0, (), {"error": f"its report cannot be read: {error}"})
