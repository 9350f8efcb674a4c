"""Group commit: takes operations that may share a commit, builds the statement's parameters, and settles each outcome.

One statement advances each log once. Consecutive appends to one log (same term, each expecting the position at which
the previous one ends) are merged. If the merged append is rejected, the first is rejected and the others are decided
again on their own. A second write of one register, or an append that is not consecutive, waits for the next group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from tidemill.base.errors import UnavailableError
from tidemill.consensus.api import LogHead, Versioned
from tidemill.consensus.operations import Append, Cas, append_conflict_error, cas_conflict_error, fenced_error
from tidemill.consensus.postgres import sql
from tidemill.consensus.postgres.connections import Connection

GROUP_OPS = 512
GROUP_BYTES = 8 << 20


class QueuedOperation:
    __slots__ = ("future", "op")

    def __init__(self, op: Any, future: asyncio.Future[Any]) -> None:
        self.op = op
        self.future = future

    def done(self, result: object) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class CommitGroup:
    """Operations of one commit: in `chains` the consecutive appends per log, in `read_registers` the one write per
    key."""

    def __init__(self) -> None:
        self.chains: dict[str, list[QueuedOperation]] = {}
        self.registers: dict[str, QueuedOperation] = {}

    @property
    def members(self) -> list[QueuedOperation]:
        return [*(queued for chain in self.chains.values() for queued in chain), *self.registers.values()]

    def fail(self, error: BaseException) -> None:
        for queued in self.members:
            queued.fail(error)


def dequeue_group(line: deque[QueuedOperation]) -> CommitGroup:
    """Remove the operations that may share a commit from the queue; the others stay, in order."""
    group, left = CommitGroup(), deque[QueuedOperation]()
    try:
        _fill_group(line, group, left)
    except BaseException as error:
        # These left the queue and were not sent: nothing else would ever settle them.
        for queued in (*group.members, *left):
            queued.fail(UnavailableError(f"the group could not be assembled: reason={error!r}."))
        raise
    line.extendleft(reversed(left))
    return group


def _fill_group(line: deque[QueuedOperation], group: CommitGroup, left: deque[QueuedOperation]) -> None:
    waiting: set[tuple[str, str]] = set()
    count = size_bytes = 0
    while line and count < GROUP_OPS and size_bytes < GROUP_BYTES:
        queued = line.popleft()
        if queued.future.done():
            continue
        left.append(queued)
        op = queued.op
        place = ("log", op.log) if isinstance(op, Append) else ("key", op.key)
        if place in waiting or not _try_join(group, queued):
            # A later operation on the same log or register must not overtake this one.
            waiting.add(place)
            continue
        left.pop()
        count += 1
        size_bytes += sum(map(len, op.records)) if isinstance(op, Append) else len(op.data)


def _try_join(group: CommitGroup, queued: QueuedOperation) -> bool:
    op = queued.op
    if isinstance(op, Cas):
        return group.registers.setdefault(op.key, queued) is queued
    chain = group.chains.setdefault(op.log, [])
    if chain:
        last: Append = chain[-1].op
        if op.term != last.term or op.expected_next != last.expected_next + len(last.records):
            return False
    chain.append(queued)
    return True


async def commit_group(connection: Connection, group: CommitGroup, log_ids: dict[str, int]) -> list[QueuedOperation]:
    """Run the group as one statement and settle its members; return those to be decided again, in order.

    Raises psycopg.Error or TimeoutError with no member settled whose outcome is open. Successes are settled before the
    reason of the rejections is read, since a failure of that read must not be mistaken for a failure of the commit.
    """
    await _cache_log_ids(connection, [log for log in group.chains if log not in log_ids], log_ids)
    chains = {log_ids[log]: chain for log, chain in group.chains.items()}
    creates = [queued for queued in group.registers.values() if queued.op.expected_seq == 0]
    updates = [queued for queued in group.registers.values() if queued.op.expected_seq > 0]
    parts: list[tuple[str, str]] = []
    parameters: list[list[Any]] = []
    if chains:
        parts.append(sql.APPEND)
        parameters += _append_parameters(chains)
    if updates:
        ops = [queued.op for queued in updates]
        parts.append(sql.UPDATE_REGISTERS)
        parameters += [
            [op.key for op in ops],
            [op.expected_seq for op in ops],
            [op.nonce for op in ops],
            [op.data for op in ops],
        ]
    if creates:
        ops = [queued.op for queued in creates]
        parts.append(sql.CREATE_REGISTERS)
        parameters += [[op.key for op in ops], [op.nonce for op in ops], [op.data for op in ops]]
    if not parts:
        return []
    rows = await (await connection.execute(sql.group_statement(parts), parameters)).fetchall()
    starts = {int(name): start for is_log, name, start in rows if is_log}
    written = {name for is_log, name, _ in rows if not is_log}
    for log_id, start in starts.items():
        for queued in chains[log_id]:
            op: Append = queued.op
            queued.done(LogHead(op.term, start, op.expected_next + len(op.records)))
    for key in written:
        queued = group.registers[key]
        queued.done(Versioned(queued.op.expected_seq + 1, queued.op.data, queued.op.nonce))
    lost_chains = [log_id for log_id in chains if log_id not in starts]
    lost_keys = [key for key in group.registers if key not in written]
    heads = await _heads_by_id(connection, lost_chains) if lost_chains else {}
    currents = await read_registers(connection, lost_keys) if lost_keys else {}
    again: list[QueuedOperation] = []
    for log_id in lost_chains:
        first, *rest = chains[log_id]
        head, op = heads[log_id], first.op
        stale = head.term > op.term
        first.fail(fenced_error(head, op) if stale else append_conflict_error(head, op))
        again.extend(rest)
    for key in lost_keys:
        queued = group.registers[key]
        queued.fail(cas_conflict_error(currents.get(key), queued.op))
    return again


def _append_parameters(chains: dict[int, list[QueuedOperation]]) -> list[list[Any]]:
    ids, terms, expected, counts = [], [], [], []
    owners, ordinals, nonces, datas = [], [], [], []
    for log_id, chain in chains.items():
        ordinal = 0
        for queued in chain:
            nonce = queued.op.nonce
            for data in queued.op.records:
                owners.append(log_id)
                ordinals.append(ordinal)
                nonces.append(nonce)
                datas.append(data)
                ordinal += 1
        ids.append(log_id)
        terms.append(chain[0].op.term)
        expected.append(chain[0].op.expected_next)
        counts.append(ordinal)
    return [ids, terms, expected, counts, owners, ordinals, nonces, datas]


async def _cache_log_ids(connection: Connection, names: list[str], log_ids: dict[str, int]) -> None:
    """Look up or create the ids of logs. Ids never change and logs are never deleted, so the cache stays valid."""
    if not names:
        return
    rows = await (await connection.execute(sql.LOG_IDS, (names,))).fetchall()
    log_ids.update(rows)
    missing = [name for name in names if name not in log_ids]
    if missing:
        await connection.execute(sql.CREATE_LOGS, (missing,))
        log_ids.update(await (await connection.execute(sql.LOG_IDS, (missing,))).fetchall())


async def log_id_of(connection: Connection, name: str, log_ids: dict[str, int]) -> int:
    await _cache_log_ids(connection, [name] if name not in log_ids else [], log_ids)
    return log_ids[name]


async def _heads_by_id(connection: Connection, ids: list[int]) -> dict[int, LogHead]:
    rows = await (await connection.execute(sql.HEADS_BY_ID, (ids,))).fetchall()
    found = {row[0]: LogHead(*row[1:]) for row in rows}
    if len(found) != len(ids):
        raise UnavailableError("a log's head row is missing: it was deleted from tidemill.logs.")
    return found


async def read_registers(connection: Connection, keys: list[str]) -> dict[str, Versioned]:
    rows = await (await connection.execute(sql.REGISTERS, (keys,), binary=True)).fetchall()
    return {row[0]: Versioned(*row[1:]) for row in rows}
