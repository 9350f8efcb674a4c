"""Each oracle fires on a history that breaks its rule, and only then."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tidemill.sim.oracles.linearizable import Call, linearizable, log_model, register_model
from tidemill.sim.oracles.topics import check_acknowledged, check_log, check_producer, check_stable
from tidemill.sim.world import Violated

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
