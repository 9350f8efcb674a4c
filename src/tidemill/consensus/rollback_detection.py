"""What this process has heard from consensus, and the proof that consensus did not return to an earlier state.

    every answer      not below what was heard before its question was asked            `RollbackDetector.check`
    every new server  the last record, version and holder that were heard are still there  `RollbackDetector.compare`

A failover to an asynchronous standby, or a database restored from a backup, loses its newest commits. A process that
had heard of them holds state that no log explains; it must not write on. A position below one that was heard shows
that, until other processes have written past it. Then only the nonces differ, so a client that finds another life of
its server compares those before anything else is asked (`postgres.admission`).

SE1  Nothing that was acknowledged to this process, or read by it, is missing from a later answer; else every call
     raises StoreRolledBackError, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidemill.base.errors import StoreRolledBackError
from tidemill.consensus.api import Lease, LogHead, LogSlice, Versioned
from tidemill.consensus.operations import Acquire, AnyOp, Append, Cas, Drop, Fence, Head, HeadOfLog, Read, Truncate

UNSEEN = LogHead(0, 0, 0)

REWRITTEN = ("board/", "kafka/")
"""Registers below these prefixes may be dropped and created again by others: a low version proves nothing. No process
acts on what it remembers of them without asking."""

FIX = (
    "Nodes and drivers start again by themselves and continue from what exists; start any other process again."
    " Set synchronous_standby_names so that a failover loses nothing."
)


class RollbackDetector:
    """One client's. `where` names the engine in sentences, without secrets."""

    def __init__(self, where: str) -> None:
        self.lost: StoreRolledBackError | None = None
        self._where = where
        self._heads: dict[str, LogHead] = {}
        self._records: dict[str, tuple[int, str]] = {}
        """log → position and nonce of the newest record that was heard"""
        self._registers: dict[str, tuple[int, str]] = {}
        self._leases: dict[str, tuple[int, str]] = {}

    # each answer ---------------------------------------------------------------------------------

    def floor(self, op: AnyOp) -> Any:
        """What an answer to `op` may not fall below: to be asked for before `op` is sent, and given to `check`."""
        match op:
            case Append(log=log) | HeadOfLog(log=log) | Read(log=log) | Fence(log=log) | Truncate(log=log):
                return self._heads.get(log, UNSEEN)
            case Cas(key=key) | Head(key=key):
                return self._registers.get(key)
            case Acquire(name=name):
                return self._leases.get(name)
        return None

    def check(self, op: AnyOp, floor: Any, answer: Any, *, done: bool) -> None:
        """`answer`: the result of `op` (`done`), or the current state that its refusal carries. Raises
        StoreRolledBackError."""
        match op, answer:
            case Append(log=log), LogHead():
                self._head(log, floor, answer)
                if done and op.records:
                    self._record(log, answer.next - 1, op.nonce)
            case Read(log=log), LogSlice():
                self._head(log, floor, answer.head)
                if answer.records:
                    self._record(log, answer.records[-1].position, answer.records[-1].nonce)
            case ((HeadOfLog(log=log) | Fence(log=log) | Truncate(log=log)), LogHead()):
                self._head(log, floor, answer)
            case Cas(key=key, expected_seq=0), Versioned() if done and not key.startswith(REWRITTEN):
                # Whoever creates it knew that it was absent: it had been dropped.
                self._registers[key] = answer.seq, answer.nonce
            case ((Cas(key=key) | Head(key=key)), Versioned()):
                self._register(key, floor, answer)
            case Head(key=key), None:
                self._registers.pop(key, None)
            case Acquire(), Lease():
                self._lease(floor, answer)
            case Drop(key=key), _ if done:
                self._registers.pop(key, None)

    def _head(self, log: str, floor: LogHead, head: LogHead) -> None:
        if head.next < floor.next or head.term < floor.term or head.start < floor.start:
            raise self.end(f"log={log!r} seen={_of_head(floor)} found={_of_head(head)}")
        known = self._heads.get(log)
        if known is None or head.next > known.next or head.term > known.term or head.start > known.start:
            self._heads[log] = head if known is None else _greatest(known, head)

    def _record(self, log: str, position: int, nonce: str) -> None:
        known = self._records.get(log)
        if known is None or position > known[0]:
            self._records[log] = position, nonce

    def _register(self, key: str, floor: tuple[int, str] | None, version: Versioned) -> None:
        if key.startswith(REWRITTEN):
            return
        if floor is not None and (version.seq < floor[0] or (version.seq == floor[0] and version.nonce != floor[1])):
            raise self.end(f"register={key!r} seen_version={floor[0]} found_version={version.seq}")
        known = self._registers.get(key)
        if known is None or version.seq > known[0]:
            self._registers[key] = version.seq, version.nonce

    def _lease(self, floor: tuple[int, str] | None, lease: Lease) -> None:
        """A holder has one term, and a term one holder; a lease that was given up has none."""
        if floor is not None and (
            lease.term < floor[0] or (lease.term == floor[0] and lease.holder not in ("", floor[1]))
        ):
            raise self.end(
                f"lease={lease.name!r} seen_term={floor[0]} seen_holder={floor[1]} found_term={lease.term}"
                f" found_holder={lease.holder}"
            )
        known = self._leases.get(lease.name)
        if lease.holder and (known is None or lease.term > known[0]):
            self._leases[lease.name] = lease.term, lease.holder

    # another life of the server ------------------------------------------------------------------

    @property
    def logs(self) -> list[tuple[str, int]]:
        """Every log that was heard of, with the position of its newest record that was; -1 for none."""
        return [(log, self._records.get(log, (-1, ""))[0]) for log in self._heads]

    @property
    def registers(self) -> list[str]:
        return list(self._registers)

    @property
    def leases(self) -> list[str]:
        return list(self._leases)

    def compare(
        self,
        logs: Mapping[str, tuple[LogHead, str | None]],
        registers: Mapping[str, Versioned],
        leases: Iterable[Lease],
    ) -> None:
        """What is there now, asked while nothing else was: heads, with the nonce at the position that `logs` names
        (None where there is no record), registers and leases. Raises StoreRolledBackError where it is no continuation
        (SE1)."""
        for log, (head, nonce) in logs.items():
            known = self._heads[log]
            self._head(log, known, head)
            position, heard = self._records.get(log, (-1, ""))
            if position >= head.start and nonce != heard:
                raise self.end(
                    f"log={log!r} seen={_of_head(known)} found={_of_head(head)} another_record_at={position}"
                )
        for key, version in registers.items():
            self._register(key, self._registers.get(key), version)
        for lease in leases:
            self._lease(self._leases.get(lease.name), lease)

    def end(self, what: str) -> StoreRolledBackError:
        """From here on every call raises this."""
        if self.lost is None:
            self.lost = StoreRolledBackError(
                f"Consensus returned to an earlier state, and commits that this process had seen are gone:"
                f" consensus={self._where} {what}.",
                fix=FIX,
            )
        return self.lost


def _greatest(one: LogHead, other: LogHead) -> LogHead:
    return LogHead(max(one.term, other.term), max(one.start, other.start), max(one.next, other.next))


def _of_head(head: LogHead) -> str:
    return f"term:{head.term},start:{head.start},next:{head.next}"
