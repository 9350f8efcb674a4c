"""Random sequences of operations against a plain model: the memory engine at length, SQLite more briefly.

Time is a manual clock, so that expiry of leases is part of the sequences. SQLite's engine is driven directly, in random
groups, and reopened now and then: every acknowledged write must still be there.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tidemill.base.clock import ManualClock
from tidemill.base.errors import ConflictError, FencedError, InvalidError, MissingError, TidemillError
from tidemill.consensus.api import Lease, LogHead, LogSlice, Versioned
from tidemill.consensus.memory import MemoryConsensus
from tidemill.consensus.operations import (
    Acquire,
    AnyOp,
    Append,
    Cas,
    Fence,
    Head,
    HeadOfLog,
    Leases,
    Read,
    Release,
    Scan,
    Truncate,
)
from tidemill.consensus.sqlite import record_storage
from tidemill.consensus.sqlite.engine import SqliteEngine

names = st.sampled_from(["a", "b", "c/1", "c/2"])
numbers = st.integers(0, 12)
payloads = st.binary(max_size=20)


class Model:
    """The contract implemented in the simplest way: dictionaries of plain tuples and lists."""

    def __init__(self) -> None:
        self.registers: dict[str, list[tuple[bytes, str]]] = {}
        self.terms: dict[str, int] = {}
        self.logs: dict[str, list[tuple[int, str, bytes]]] = {}
        self.starts: dict[str, int] = {}
        self.leases: dict[str, dict[str, Any]] = {}

    def head(self, log: str) -> LogHead:
        return LogHead(self.terms.get(log, 0), self.starts.get(log, 0), len(self.logs.get(log, [])))

    def version(self, key: str) -> Versioned | None:
        history = self.registers.get(key)
        return Versioned(len(history), *history[-1]) if history else None

    def lease(self, name: str, now: int) -> Lease:
        row = self.leases[name]
        left = max(0, row["until"] - now)
        return Lease(name, row["holder"], row["term"], row["ttl"], left, left > 0, row["info"])

    def expect(self, op: AnyOp, now: int) -> Any:
        """The result, or the type of error and its `current`."""
        match op:
            case Cas(key=key):
                if len(self.registers.get(key, [])) != op.expected_seq:
                    return (ConflictError, self.version(key))
                self.registers.setdefault(key, []).append((op.data, op.nonce))
                return self.version(key)
            case Head(key=key):
                return self.version(key)
            case Scan(prefix=prefix):
                return [(k, self.version(k)) for k in sorted(self.registers) if k.startswith(prefix)]
            case HeadOfLog(log=log):
                return self.head(log)
            case Fence(log=log):
                if op.term < self.terms.get(log, 0):
                    return (FencedError, self.head(log))
                self.terms[log] = op.term
                return self.head(log)
            case Append(log=log):
                if op.term < self.terms.get(log, 0):
                    return (FencedError, self.head(log))
                if op.expected_next != len(self.logs.get(log, [])):
                    return (ConflictError, self.head(log))
                self.terms[log] = op.term
                self.logs.setdefault(log, []).extend((op.term, op.nonce, data) for data in op.records)
                return self.head(log)
            case Read(log=log):
                if op.start < self.starts.get(log, 0):
                    return (MissingError, None)
                found = self.logs.get(log, [])[op.start : op.start + op.limit_records]
                return [(op.start + i, *record) for i, record in enumerate(found)]
            case Truncate(log=log):
                if op.before > len(self.logs.get(log, [])):
                    return (InvalidError, None)
                self.starts[log] = max(op.before, self.starts.get(log, 0))
                return self.head(log)
            case Acquire(name=name):
                row = self.leases.get(name, {"holder": "", "term": 0, "until": 0})
                if row["holder"] not in ("", op.holder) and row["until"] > now:
                    return (ConflictError, self.lease(name, now))
                term = row["term"] + (row["holder"] != op.holder)
                until = now + op.ttl_ms
                self.leases[name] = {
                    "holder": op.holder,
                    "term": term,
                    "until": until,
                    "ttl": op.ttl_ms,
                    "info": op.info,
                }
                return self.lease(name, now)
            case Release(name=name):
                row = self.leases.get(name)
                if row and (row["holder"], row["term"]) == (op.holder, op.term):
                    row.update(holder="", until=0)
                return None
            case Leases(prefix=prefix):
                return [self.lease(name, now) for name in sorted(self.leases) if name.startswith(prefix)]
            case _:
                raise AssertionError(op)


operations = st.one_of(
    st.builds(Cas, names, st.integers(0, 4), payloads, st.text("xyz", min_size=1, max_size=3)),
    st.builds(Head, names),
    st.builds(Scan, st.sampled_from(["", "c/", "z"])),
    st.builds(HeadOfLog, names),
    st.builds(Fence, names, st.integers(0, 5)),
    st.builds(
        Append, names, st.integers(0, 5), numbers, st.lists(payloads, min_size=1, max_size=3).map(tuple), st.just("n")
    ),
    st.builds(Read, names, numbers, st.integers(1, 4), st.just(1 << 20)),
    st.builds(Truncate, names, numbers),
    st.builds(Acquire, names, st.sampled_from(["h1", "h2"]), st.integers(1, 50), payloads),
    st.builds(Release, names, st.sampled_from(["h1", "h2"]), st.integers(1, 3)),
    st.builds(Leases, st.sampled_from(["", "c/"])),
)


def adapt(op: AnyOp, model: Model) -> AnyOp:
    """Aim half of the random positions and sequences at the present end, since most of them would merely conflict."""
    if isinstance(op, Append) and op.expected_next % 2:
        return Append(
            op.log, max(op.term, model.terms.get(op.log, 0)), len(model.logs.get(op.log, [])), op.records, op.nonce
        )
    if isinstance(op, Cas) and op.expected_seq % 2:
        return Cas(op.key, len(model.registers.get(op.key, [])), op.data, op.nonce)
    return op


def plain(outcome: Any) -> Any:
    if isinstance(outcome, TidemillError):
        return (type(outcome), getattr(outcome, "current", None))
    if isinstance(outcome, LogSlice):
        return [(r.position, r.term, r.nonce, r.data) for r in outcome.records]
    return outcome


class MemoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.model = Model()
        self.engine = MemoryConsensus(self.clock)

    @rule(op=operations)
    def operate(self, op: AnyOp) -> None:
        op = adapt(op, self.model)

        async def once() -> Any:
            try:
                return await self.engine._submit_checked(op)
            except TidemillError as error:
                return error

        assert plain(asyncio.run(once())) == self.model.expect(op, self.clock.now_ms())

    @rule(ms=st.integers(1, 60))
    def time_passes(self, ms: int) -> None:
        self.clock.advance(ms)


class SqliteMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = ManualClock()
        self.model = Model()
        self.engine = self.reopened()

    def reopened(self) -> SqliteEngine:
        return SqliteEngine(Path(self.folder.name) / "model.db", self.clock)

    @rule(ops=st.lists(operations, min_size=1, max_size=8))
    def operate_in_one_group(self, ops: list[AnyOp]) -> None:
        now = self.clock.now_ms()
        writes: list[Any] = []
        expected: list[Any] = []
        for op in ops:
            op = adapt(op, self.model)
            if op.writes:
                writes.append(op)
                expected.append(self.model.expect(op, now))
        assert [plain(outcome) for outcome in self.engine.commit(writes)] == expected
        for op in ops:
            if op.writes:
                continue
            try:
                outcome = self.engine.execute_read(op)
            except TidemillError as error:
                outcome = error
            assert plain(outcome) == self.model.expect(op, now)

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.engine = self.reopened()

    @rule(ms=st.integers(1, 60))
    def time_passes(self, ms: int) -> None:
        self.clock.advance(ms)

    @invariant()
    def heads_agree(self) -> None:
        for log in self.model.logs if hasattr(self, "model") else ():
            assert self.engine.execute_read(HeadOfLog(log)) == self.model.head(log)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
            self.folder.cleanup()


def test_the_memory_engine_does_what_a_dictionary_would() -> None:
    run_state_machine_as_test(
        cast(Any, MemoryMachine), settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


def test_the_sqlite_engine_does_what_a_dictionary_would_across_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Settle and sweep all the time, in small pieces.
    for name, value in {"RECENT_BYTES": 600, "SETTLE_RECORDS": 3, "CHUNK_RECORDS": 2, "SWEEP_CHUNKS": 2}.items():
        monkeypatch.setattr(record_storage, name, value)
    run_state_machine_as_test(
        cast(Any, SqliteMachine),
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
