"""Each oracle fires on a history that breaks its rule, and only then."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any

import pytest

from sim.oracles.linearizable import Call, linearizable, log_model, register_model
from sim.oracles.shards import (
    Attempt,
    Frontiers,
    Model,
    check_heard,
    check_landed,
    check_nothing_skipped,
    check_reads,
    check_stored,
    folded,
)
from sim.oracles.topics import Durable, check_acknowledged, check_log, check_producer, check_stable
from sim.oracles.transactions import Fate, Sent, check_order, check_transaction
from sim.world import Violated
from tidemill.consensus.api import LogRecord
from tidemill.consensus.state_log.replica import COMMAND
from tidemill.shards.api import Batch, Column, ShardSchema
from tidemill.shards.state.codec import encode_command
from tidemill.shards.state.commands import Append, Create
from tidemill.topics.partition.state_machine.codec import encode_command as topic_command
from tidemill.topics.partition.state_machine.commands import PlaceBatches, Placeholder

START = (0, b"")


def call(operation: Any, start: float, end: float, result: Any) -> Call:
    return Call("c", operation, start, end, result, True)


def lost(operation: Any, start: float) -> Call:
    return Call("c", operation, start)


WRITE_A, WRITE_B = ("cas", 0, b"a"), ("cas", 1, b"b")


@pytest.mark.parametrize(
    ("calls", "fine"),
    [
        ([], True),
        ([call(WRITE_A, 1, 2, ("ok", 1)), call(("read",), 3, 4, (1, b"a"))], True),
        ([call(WRITE_A, 1, 2, ("ok", 1)), call(("read",), 3, 4, START)], False),  # a stale read
        ([call(WRITE_A, 1, 4, ("ok", 1)), call(("read",), 2, 3, START)], True),  # concurrent: either will do
        ([lost(WRITE_A, 1), call(("read",), 2, 3, (1, b"a"))], True),  # it took effect
        ([lost(WRITE_A, 1), call(("read",), 2, 3, START)], True),  # not yet, or never
        ([lost(WRITE_A, 1), call(("read",), 2, 3, (1, b"a")), call(("read",), 4, 5, START)], False),  # it went away
        ([call(WRITE_A, 1, 2, ("ok", 1)), call(("cas", 0, b"b"), 3, 4, ("ok", 1))], False),  # two winners
        ([call(WRITE_A, 1, 2, ("ok", 1)), call(WRITE_B, 3, 4, ("conflict", (1, b"a")))], False),  # refused in vain
    ],
)
def test_register_histories(calls: list[Call], fine: bool) -> None:
    assert linearizable(calls, START, register_model) == fine


def test_log_histories() -> None:
    def append(term: int, expected: int, *records: bytes) -> tuple[Any, ...]:
        return ("append", term, expected, records)

    start = (0, ())
    good = [call(append(0, 0, b"a"), 1, 2, ("ok", 1)), call(("fence", 2), 3, 4, ("ok", 2))]
    fenced = call(append(1, 1, b"b"), 5, 6, ("fenced", 2))
    landed = call(append(1, 1, b"b"), 5, 6, ("ok", 2))
    assert linearizable([*good, fenced], start, log_model)
    assert not linearizable([*good, landed], start, log_model)  # a fenced term landed
    assert linearizable([*good, call(("read",), 5, 6, (2, (b"a",)))], start, log_model)
    assert not linearizable([*good, call(("read",), 5, 6, (2, ()))], start, log_model)


def test_a_long_history_of_many_clients_is_searched_quickly() -> None:
    source = random.Random(1)
    state: Any = START
    calls, now = [], 0.0
    for number in range(600):
        operation: Any = ("read",) if source.random() < 0.5 else ("cas", state[0], str(number).encode())
        state, result = register_model(state, operation)
        known = source.random() > 0.05
        begun = now - source.random() * 4
        calls.append(Call("c", operation, begun, now + source.random() * 4 if known else float("inf"), result, known))
        now += 1
    assert linearizable(calls, START, register_model)


def test_unknown_calls_that_change_nothing_are_not_placed() -> None:
    """The search would try every subset of them: 2 to the power of 40."""
    unknown = [Call(f"c{i}", ("cas", 9, b"late"), 0) for i in range(40)]
    assert not linearizable([*unknown, Call("r", ("read",), 1, 2, (5, b"other"), True)], START, register_model)


def test_topic_oracles_fire() -> None:
    log = [(0, b"a"), (1, b"b"), (2, b"c")]
    check_log(0, log)
    check_acknowledged({0: dict(log)}, {b"b": (0, 1)})
    check_producer("p", [b"a", b"c"], log)
    check_stable({(0, 2): b"c"}, {0: dict(log)})
    check_log(0, log[1:], 1)
    check_acknowledged({0: dict(log[1:])}, {b"a": (0, 0)}, {0: 1})
    with pytest.raises(Violated, match="lost"):
        check_acknowledged({0: dict(log[1:])}, {b"a": (0, 0)}, {0: 0})
    with pytest.raises(Violated, match="contiguous"):
        check_log(0, [(0, b"a"), (2, b"b")])
    with pytest.raises(Violated, match="lost"):
        check_acknowledged({0: dict(log)}, {b"d": (0, 3)})
    with pytest.raises(Violated, match="lost"):
        check_acknowledged({0: dict(log)}, {b"a": (0, 1)})
    with pytest.raises(Violated, match="out of order"):
        check_producer("p", [b"c", b"a"], log)
    with pytest.raises(Violated, match="twice"):
        check_producer("p", [b"a"], [*log, (3, b"a")])
    with pytest.raises(Violated, match="last"):
        check_stable({(0, 3): b"x"}, {0: dict(log)})


def test_what_is_told_before_it_is_durable_is_a_violation() -> None:
    landed: list[LogRecord] = []
    durable = Durable(lambda partition: landed if partition == 0 else ())
    with pytest.raises(Violated, match="a batch is shown before it is durable: partition=0 end=1 durable=0"):
        durable.vouch(0, 1, "a batch is shown")
    for position in range(3):
        placed = Placeholder(0, 100 * position, 100, 2 * position, 2, -1, -1, -1, 1)
        landed.append(LogRecord(position, 1, "n", topic_command(PlaceBatches(1, (f"l0/{position}",), (placed,)))))
        durable.vouch(0, 2 * position + 2, "a batch is shown")
        with pytest.raises(Violated):
            durable.vouch(0, 2 * position + 3, "a batch is shown")
        durable.vouch(0, 1, "an older one is shown")
    with pytest.raises(Violated):
        durable.vouch(1, 1, "a batch of another partition is shown")


def test_transaction_oracles_fire() -> None:
    sent = Sent(3)
    sent.records, sent.offset = {(0, b"p.3/0"), (1, b"p.3/1")}, 7
    whole, kept = sorted(sent.records), {("p", 3): 7}
    for fate, found, offsets, wrong in (
        (Fate.COMMITTED, whole, kept, ""),
        (Fate.MAYBE, whole, kept, ""),
        (Fate.MAYBE, [], {}, ""),
        (Fate.ABORTED, [], {}, ""),
        (Fate.COMMITTED, [], {}, "is not shown"),
        (Fate.MAYBE, whole[:1], kept, "a part of"),
        (Fate.COMMITTED, [*whole, whole[0]], kept, "twice"),
        (Fate.ABORTED, whole, kept, "an aborted transaction is shown"),
        (Fate.UNASKED, whole, kept, "an aborted transaction is shown"),
        (Fate.COMMITTED, whole, {}, "offsets and records part"),
        (Fate.MAYBE, [], kept, "offsets and records part"),
    ):
        sent.fate = fate
        with pytest.raises(Violated, match=wrong) if wrong else contextlib.nullcontext():
            check_transaction(b"p.3/", sent, found, offsets)
    check_order({(0, 0): b"p.0/0", (0, 1): b"q.0/0", (0, 2): b"p.2/4", (1, 0): b"p.1/3"})
    for wrong_order in ({(0, 0): b"p.0/1", (0, 4): b"p.0/0"}, {(1, 0): b"p.0/1", (1, 1): b"q.0/1", (1, 2): b"p.1/1"}):
        with pytest.raises(Violated, match="out of order"):
            check_order(wrong_order)


UPDATES = [("a", "1", 7, 1, 1), ("a", "1", 7, 3, -1), ("a", "2", 7, 3, 1), ("b", "9", None, 5, 1)]


def test_shard_oracles_of_contents_fire() -> None:
    model = Model(UPDATES)
    one, two, nine = ("a", "1", 7), ("a", "2", 7), ("b", "9", None)
    good = {0: {}, 2: {one: 1}, 3: {two: 1}, 9: {two: 1, nine: 1}}
    check_reads([(as_of, Counter(rows)) for as_of, rows in good.items()], model)
    for as_of, wrong in ((2, {two: 1}), (3, {two: 2}), (9, {two: 1}), (2, {("a", "1", 8): 1})):
        with pytest.raises(Violated, match="differ"):
            check_reads([(as_of, Counter(wrong))], model)
    # The stored parts may sum up updates at or below since, and no others.
    summed = [(*two, 3, 1), (*nine, 5, 1)]
    check_stored(UPDATES, 0, model)
    check_stored(summed, 3, model)
    with pytest.raises(Violated, match="since=2"):
        check_stored(summed, 2, model)
    with pytest.raises(Violated, match="extra"):
        check_stored([(*two, 5, 1), (*nine, 5, 1)], 3, model)
    check_heard(Counter(UPDATES), 6, model)
    check_heard(Counter(UPDATES[:3]), 5, model)
    with pytest.raises(Violated, match="missed or repeated"):
        check_heard(Counter(UPDATES[:2]), 5, model)
    with pytest.raises(Violated, match="missed or repeated"):
        check_heard(Counter([*UPDATES, UPDATES[0]]), 6, model)


def test_shard_oracle_of_the_log_fires() -> None:
    create = Create("t", "id", ShardSchema((Column("k", "string"), Column("v", "string")), ("k",)))
    appends = [Append(Batch(0, 2, (), "w", "one")), Append(Batch(2, 5, (), "w", "two"))]
    log = [bytes([COMMAND]) + encode_command(command) for command in (create, *appends)]

    def attempts(one: str, two: str) -> dict[str, Attempt]:
        return {"one": Attempt("one", 0, 2, outcome=one), "two": Attempt("two", 2, 5, outcome=two)}

    assert [a.token for a in check_landed(log, attempts("ok", "running"))] == ["one", "two"]
    assert [a.token for a in check_landed(log[:2], attempts("ok", "running"))] == ["one"]
    for records, said in ((log[:2], attempts("ok", "ok")), (log, attempts("ok", "refused"))):
        with pytest.raises(Violated, match="stands"):
            check_landed(records, said)


def test_shard_oracle_of_frontiers_fires() -> None:
    class Answers:
        def __init__(self, *found: tuple[int, int]) -> None:
            self.found = list(found)

        async def frontiers(self) -> tuple[int, int]:
            return self.found.pop(0)

    async def ask(*found: tuple[int, int]) -> None:
        frontiers, shard = Frontiers(), Answers(*found)
        for _ in range(len(found)):
            await frontiers.read(shard)  # type: ignore[arg-type]

    asyncio.run(ask((0, 0), (0, 5), (3, 5), (3, 9)))
    for back in ((2, 9), (3, 8)):
        with pytest.raises(Violated, match="went back"):
            asyncio.run(ask((3, 9), back))


def test_the_folding_of_commands_is_an_upsert() -> None:
    first = Attempt("1", 0, 4, seen=((0, "a", "x", 1), (2, "a", "z", 1), (1, "a", "y", 1), (3, "b", None, 2)))
    second = Attempt("2", 4, 9, seen=((2, "a", "q", 1), (4, "a", "z", 4), (5, "a", None, 5), (6, "a", "w", 9)))
    assert folded([first, second]) == [("a", "z", 7, 1, 1), ("a", "z", 7, 5, -1)]
    # With the column from 4 on, the record at offset 4 changes it although its value is the same: 7 becomes 7 + 4 % 3.
    grown = [("a", "z", 7, 1, 1), ("a", "z", 7, 4, -1), ("a", "z", 8, 4, 1), ("a", "z", 8, 5, -1)]
    assert folded([first, second], evolved_at=4) == grown
    topic = [(2, "a", "z", 1), (3, "b", None, 2), (5, "a", None, 5), (6, "a", "w", 9)]
    check_nothing_skipped([first, second], topic)
    with pytest.raises(Violated, match="left records out"):
        check_nothing_skipped([first, second], [*topic, (7, "c", "n", 3)])
