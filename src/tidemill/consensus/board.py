"""The board: every process publishes its marks as one register, anybody reads them all.

A report is written by its own process only, so the last writer wins and a lost acknowledgement is resolved by
writing again. No report is never read as health (M3): that is for `marks.derive_all` to say.
"""

from __future__ import annotations

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.errors import Conflict, Corrupt, Invalid, Unknown
from tidemill.base.marks import Report
from tidemill.consensus.api import Consensus, Versioned

PREFIX = "marks/"

FORGET_AFTER_MS = 3_600_000
"""A process silent for this long is gone, not blind; its report is emptied."""

ATTEMPTS = 5

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)


class Board:
    """One per process and loop. Methods raise Unavailable and Closed as the consensus does."""

    def __init__(self, consensus: Consensus, rand: Rand) -> None:
        self._consensus = consensus
        self._rand = rand
        self._seqs: dict[str, int] = {}

    async def publish(self, report: Report) -> None:
        """Show `report` in place of this process's last one. Raises Unknown only when it could not be settled."""
        key = PREFIX + report.process
        data = _encoder.encode(report)
        for attempt in range(ATTEMPTS):
            if key not in self._seqs:
                current = await self._consensus.head(key)
                self._seqs[key] = current.seq if current else 0
            try:
                version = await self._consensus.cas(key, self._seqs[key], data, self._rand.nonce())
            except Conflict as lost:
                self._seqs[key] = lost.current.seq if isinstance(lost.current, Versioned) else 0
            except Unknown:
                # Whether it landed or not, writing the same report again is right.
                self._seqs.pop(key, None)
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                self._seqs[key] = version.seq
                return
        raise Invalid(
            f"Several processes publish marks under one name: process={report.process!r}.",
            fix="Give every process its own node name.",
        )

    async def reports(self, *, now_ms: int | None = None) -> list[Report]:
        """All reports, by process name; with `now_ms`, those older than an hour are emptied and left out."""
        found = []
        for key, version in await self._consensus.scan(PREFIX):
            if not version.data:
                continue
            try:
                report = _decoder.decode(version.data)
            except msgspec.MsgspecError as error:
                raise Corrupt(f"A report of marks cannot be read: key={key!r} reason={error}.") from error
            if now_ms is not None and report.at_ms < now_ms - FORGET_AFTER_MS:
                await self._empty(key, version)
            else:
                found.append(report)
        return found

    async def _empty(self, key: str, version: Versioned) -> None:
        try:
            await self._consensus.cas(key, version.seq, b"", self._rand.nonce())
        except (Conflict, Unknown):
            # It spoke up again, or somebody else emptied it, or the next reader will.
            return
