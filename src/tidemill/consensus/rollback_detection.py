"""Detection of a rollback: proof that consensus did not return to a state before one that this process has seen.

    every answer      not below what had been seen before the request was sent                `RollbackDetector.check`
    every new server  the newest record, version and holder seen are still there
                                                                                              `RollbackDetector.check_new_life`

A failover to an asynchronous standby, or a database restored from a backup, loses the newest commits. A process that
has seen those commits holds state that no log explains; it must not write any more. A position below one already seen
reveals the loss, until other processes write past it. From then on only the nonces differ, so a client that meets a new
life of its server compares nonces before it sends anything else (`history_check`, `postgres.session_checks`).

Invariant (no rollback): state that was acknowledged to this process, or read by it, is not missing from any later
answer; otherwise every further call raises StoreRolledBackError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidemill.base.errors import StoreRolledBackError
from tidemill.consensus.api import Lease, LogHead, LogSlice, Versioned
from tidemill.consensus.operations import Acquire, AnyOp, Append, Cas, Drop, Fence, Head, HeadOfLog, Read, Truncate

UNSEEN = LogHead(0, 0, 0)

REWRITTEN_PREFIXES = ("board/", "kafka/")
"""Registers below these prefixes may be dropped and re-created by other processes, so a low version proves nothing. No
process acts on a remembered version of them without reading it again.
"""

FIX = (
    "Nodes and drivers restart automatically and continue from the current state; restart any other process."
    " Set synchronous_standby_names so that a failover loses nothing."
)


class RollbackDetector:
    """State seen by one client. `where` names the engine in error texts, without secrets."""

    def __init__(self, where: str) -> None:
        self.lost: StoreRolledBackError | None = None
        self._where = where
        self._heads: dict[str, LogHead] = {}
        self._records: dict[str, tuple[int, str]] = {}
        """log → position and nonce of the newest record seen."""
        self._registers: dict[str, tuple[int, str]] = {}
        self._leases: dict[str, tuple[int, str]] = {}

    # each answer ---------------------------------------------------------------------------------

    def lower_bound(self, op: AnyOp) -> Any:
        """Return the lower bound for an answer to `op`. Call it before `op` is sent, and pass the result to `check`."""
        match op:
            case Append(log=log) | HeadOfLog(log=log) | Read(log=log) | Fence(log=log) | Truncate(log=log):
                return self._heads.get(log, UNSEEN)
            case Cas(key=key) | Head(key=key):
                return self._registers.get(key)
            case Acquire(name=name):
                return self._leases.get(name)
        return None

    def check(self, op: AnyOp, floor: Any, answer: Any, *, done: bool) -> None:
        """Compare an answer with `lower_bound`, then remember it. Raises StoreRolledBackError.

        `answer` is the result of `op` (`done`), or the current state that its rejection carries.
        """
        match op, answer:
            case Append(log=log), LogHead():
                self._check_head(log, floor, answer)
                if done and op.records:
                    self._remember_record(log, answer.next - 1, op.nonce)
            case Read(log=log), LogSlice():
                self._check_head(log, floor, answer.head)
                if answer.records:
                    self._remember_record(log, answer.records[-1].position, answer.records[-1].nonce)
            case ((HeadOfLog(log=log) | Fence(log=log) | Truncate(log=log)), LogHead()):
                self._check_head(log, floor, answer)
            case Cas(key=key, expected_seq=0), Versioned() if done and not key.startswith(REWRITTEN_PREFIXES):
                # The writer that creates the register knew that it was absent: it had been dropped.
                self._registers[key] = answer.seq, answer.nonce
            case ((Cas(key=key) | Head(key=key)), Versioned()):
                self._check_register(key, floor, answer)
            case Head(key=key), None:
                self._registers.pop(key, None)
            case Acquire(), Lease():
                self._check_lease(floor, answer)
            case Drop(key=key), _ if done:
                self._registers.pop(key, None)

    def _check_head(self, log: str, floor: LogHead, head: LogHead) -> None:
        if head.next < floor.next or head.term < floor.term or head.start < floor.start:
            raise self.end(f"log={log!r} seen={_format_head(floor)} found={_format_head(head)}")
        known = self._heads.get(log)
        if known is None or head.next > known.next or head.term > known.term or head.start > known.start:
            self._heads[log] = head if known is None else _max_head(known, head)

    def _remember_record(self, log: str, position: int, nonce: str) -> None:
        known = self._records.get(log)
        if known is None or position > known[0]:
            self._records[log] = position, nonce

    def _check_register(self, key: str, floor: tuple[int, str] | None, version: Versioned) -> None:
        if key.startswith(REWRITTEN_PREFIXES):
            return
        if floor is not None and (version.seq < floor[0] or (version.seq == floor[0] and version.nonce != floor[1])):
            raise self.end(f"register={key!r} seen_version={floor[0]} found_version={version.seq}")
        known = self._registers.get(key)
        if known is None or version.seq > known[0]:
            self._registers[key] = version.seq, version.nonce

    def _check_lease(self, floor: tuple[int, str] | None, lease: Lease) -> None:
        """Check a lease. A term has one holder, which never changes; a released lease has none."""
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

    # a new life of the server -------------------------------------------------------------------

    @property
    def seen_logs(self) -> list[tuple[str, int]]:
        """All logs seen, each with the position of its newest record seen; -1 for none."""
        return [(log, self._records.get(log, (-1, ""))[0]) for log in self._heads]

    @property
    def seen_registers(self) -> list[str]:
        return list(self._registers)

    @property
    def seen_leases(self) -> list[str]:
        return list(self._leases)

    def check_new_life(
        self,
        logs: Mapping[str, tuple[LogHead, str | None]],
        registers: Mapping[str, Versioned],
        leases: Iterable[Lease],
    ) -> None:
        """Compare the state of a new server life with what was seen. Raises StoreRolledBackError if it is no
        continuation.

        The caller reads that state before it sends anything else: heads, each with the nonce at the position that
        `seen_logs` names (None if there is no record), registers and leases.
        """
        for log, (head, nonce) in logs.items():
            known = self._heads[log]
            self._check_head(log, known, head)
            position, heard = self._records.get(log, (-1, ""))
            if position >= head.start and nonce != heard:
                raise self.end(
                    f"log={log!r} seen={_format_head(known)} found={_format_head(head)} another_record_at={position}"
                )
        for key, version in registers.items():
            self._check_register(key, self._registers.get(key), version)
        for lease in leases:
            self._check_lease(self._leases.get(lease.name), lease)

    def end(self, what: str) -> StoreRolledBackError:
        """Return the StoreRolledBackError that every call raises from now on."""
        if self.lost is None:
            self.lost = StoreRolledBackError(
                f"consensus returned to an earlier state, and commits that this process had seen are lost:"
                f" consensus={self._where} {what}.",
                fix=FIX,
            )
        return self.lost


def _max_head(one: LogHead, other: LogHead) -> LogHead:
    return LogHead(max(one.term, other.term), max(one.start, other.start), max(one.next, other.next))


def _format_head(head: LogHead) -> str:
    return f"term:{head.term},start:{head.start},next:{head.next}"
