"""Comparison of a new life of an engine with what a client has seen, by operations of the engine itself.

A client meets a new life after every change of the process that serves the engine. Before it sends anything else there,
it reads the heads of all logs that it has seen, the nonce of the newest record that it has seen of each, and the
registers and leases (`rollback_detection`). The client of PostgreSQL reads them with one query instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from tidemill.base.errors import CorruptError, TidemillError
from tidemill.consensus.api import Lease, LogHead, LogSlice, Versioned
from tidemill.consensus.operations import AnyOp, Head, HeadOfLog, Leases, Read
from tidemill.consensus.rollback_detection import RollbackDetector

READ_BYTES = 1 << 20

Ask = Callable[[Sequence[AnyOp]], Awaitable[list[Any]]]
"""Send operations to the new life; return their results, or MissingError or CorruptError in the place of one."""


async def check_history(seen: RollbackDetector, ask: Ask) -> None:
    """Raise StoreRolledBackError if the new life does not continue what was seen. Raises the errors of `ask`.

    A damaged record or register is no proof of a rollback: its own readers report it.
    """
    positions, keys, names = dict(seen.seen_logs), seen.seen_registers, seen.seen_leases
    heads: list[LogHead | CorruptError] = await ask([HeadOfLog(log) for log in positions])
    by_log = {log: head for log, head in zip(positions, heads, strict=True) if isinstance(head, LogHead)}
    stored = [log for log, head in by_log.items() if head.start <= positions[log] < head.next]
    found: list[LogSlice | TidemillError] = await ask([Read(log, positions[log], 1, READ_BYTES) for log in stored])
    nonces: dict[str, str] = {}
    for log, record in zip(stored, found, strict=True):
        if isinstance(record, LogSlice):
            nonces[log] = record.records[0].nonce
        else:  # damaged, or truncated since the head was read: there is nothing to compare
            by_log[log] = replace(by_log[log], start=positions[log] + 1)
    registers: list[Versioned | CorruptError | None] = await ask([Head(key) for key in keys])
    leases: list[list[Lease] | CorruptError] = await ask([Leases(name) for name in names])
    seen.check_new_life(
        {log: (head, nonces.get(log)) for log, head in by_log.items()},
        {key: register for key, register in zip(keys, registers, strict=True) if isinstance(register, Versioned)},
        [
            lease
            for name, held in zip(names, leases, strict=True)
            if not isinstance(held, CorruptError)
            for lease in held
            if lease.name == name
        ],
    )
