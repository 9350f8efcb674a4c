"""The endpoint's limits as pure rules: who may come in, who may read."""

from __future__ import annotations

import structlog

from tidemill.kafka import KafkaSettings
from tidemill.kafka.net.connection_limits import TELL_EVERY_S, ConnectionQuotas
from tidemill.kafka.net.memory_budget import Budget


class Session:
    def __init__(self) -> None:
        self.called = 0
        self.closed: list[Exception | None] = []
        self.took_s = 0.0

    def consider_reading(self) -> None:
        self.called += 1

    def close(self, error: Exception | None = None) -> None:
        self.closed.append(error)


def test_frames_beyond_the_half_wait_and_the_oldest_goes_on() -> None:
    budget = Budget(200, 100)
    one, two = Session(), Session()
    budget.receiving(one, 60)
    budget.receiving(two, 40)
    assert not budget.may_read(two, 1)
    assert budget.may_read(one, 100), "the oldest may grow past the limit, or nobody ever ends"
    budget.receiving(one, 100)
    budget.received(one, 160)
    assert two.called >= 1 and budget.may_read(two, 60)
    assert budget.request_bytes == 40


def test_half_received_frames_leave_whole_requests_their_half() -> None:
    budget = Budget(200, 100)
    hostile, client = Session(), Session()
    budget.receiving(hostile, 100)
    assert budget.may_read(client, 0)
    budget.take(101)
    assert not budget.may_read(client, 0)
    budget.give(101)
    budget.received(hostile, 100)
    assert client.called == 1


def test_the_connection_that_has_taken_nothing_for_longest_ends_first() -> None:
    budget = Budget(200, 100)
    sessions = [Session() for _ in range(3)]
    for took_s, session in zip((5.0, 1.0, 3.0), sessions, strict=True):
        session.took_s = took_s
        budget.answers(session, 40)
    assert [len(session.closed) for session in sessions] == [0, 1, 0]
    assert budget.answer_bytes == 80


def test_a_flood_is_told_once_in_a_while_with_the_key_to_change() -> None:
    door = ConnectionQuotas(KafkaSettings(connections_max=3, connections_per_address_max=2))
    with structlog.testing.capture_logs() as logs:
        assert [door.enter("a", 0.0) for _ in range(50)].count(True) == 2
        assert door.enter("b", 0.0) and not door.enter("c", 0.0)
        assert not door.enter("c", TELL_EVERY_S + 1)
    assert [(entry["key"], entry["refused"]) for entry in logs] == [
        ("kafka.connections_per_address_max", 1),
        ("kafka.connections_max", 49),
    ]
    door.leave("a")
    assert door.enter("c", 0.0)
