"""Rows of a domain, from its log alone: every record that ever landed, applied by rules without planted faults."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidemill.base.errors import TidemillError
from tidemill.consensus.api import LogRecord
from tidemill.consensus.state_log.replica import COMMAND
from tidemill.metastore.domain.apply import apply
from tidemill.metastore.domain.state import DomainState, assert_invariants


class Written(msgspec.Struct, frozen=True):
    seqno: int
    rows: dict[bytes, bytes]
    """Key → value; empty means deleted. For a key that is repeated in one batch, its last value."""


class Shadow:
    """Replay of one domain's log. Asserts that seqno and epoch never go back, and the invariants of each state.

    `rule` replaces `apply`: it may add rules (the scenario rejects manifests) but no fault.
    """

    def __init__(self, records: Iterable[LogRecord], rule: object = None) -> None:
        self.state = DomainState()
        self.batches: list[Written] = []
        self.persisted: dict[tuple[int, int], int] = {}
        """(epoch, last seqno) of every manifest that the log accepted → position of its record."""
        step = rule if callable(rule) else apply
        newest = epoch = 0
        for record in records:
            if record.data[0] != COMMAND:
                continue
            before = self.state.manifest
            try:
                self.state = step(self.state, record.data[1:], record.position, record.term)
            except TidemillError:
                continue
            assert_invariants(self.state)
            if self.state.epoch(record.term) < epoch:
                raise AssertionError(f"the epoch went back: position={record.position} epoch={epoch}")
            epoch = self.state.epoch(record.term)
            if self.state.newest_seqno < newest:
                raise AssertionError(f"the seqno went back: position={record.position} newest={newest}")
            newest = self.state.newest_seqno
            if self.state.volatile and (not self.batches or self.state.volatile[-1].seqno > self.batches[-1].seqno):
                batch = self.state.volatile[-1]
                self.batches.append(Written(batch.seqno, dict(zip(batch.keys, batch.values, strict=True))))
            manifest = self.state.manifest
            if manifest is not None and manifest is not before:
                self.persisted[manifest.epoch, manifest.last_seqno] = record.position

    def rows(self, start: dict[bytes, tuple[int, bytes]], through: int | None = None) -> dict[bytes, tuple[int, bytes]]:
        """Return the live rows, key → (seqno, value), after the batches up to `through`, on top of a restore's rows."""
        rows = dict(start)
        for batch in self.batches:
            if through is not None and batch.seqno > through:
                break
            for key, value in batch.rows.items():
                if value:
                    rows[key] = (batch.seqno, value)
                else:
                    rows.pop(key, None)
        return rows
