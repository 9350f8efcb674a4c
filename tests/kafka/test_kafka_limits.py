"""The endpoint's limits as pure rules: which connections are accepted, and which frames are read."""

from __future__ import annotations

import structlog

from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings
from tidemill.kafka.net.connection_limits import LOG_INTERVAL_S, ConnectionLimits
from tidemill.kafka.net.memory_budget import MemoryBudget


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
    budget = MemoryBudget(200, 100)
    one, two = Session(), Session()
    budget.add_receiving(one, 60)
    budget.add_receiving(two, 40)
    assert not budget.can_read(two, 1)
    assert budget.can_read(one, 100), "the oldest may grow past the limit, or nobody ever ends"
    budget.add_receiving(one, 100)
    budget.remove_receiving(one, 160)
    assert two.called >= 1 and budget.can_read(two, 60)
    assert budget.request_bytes == 40


def test_half_received_frames_leave_whole_requests_their_half() -> None:
    budget = MemoryBudget(200, 100)
    hostile, client = Session(), Session()
    budget.add_receiving(hostile, 100)
    assert budget.can_read(client, 0)
    budget.begin_request(101)
    assert not budget.can_read(client, 0)
    budget.end_request(101)
    budget.remove_receiving(hostile, 100)
    assert client.called == 1


def test_the_connection_that_has_taken_nothing_for_longest_ends_first() -> None:
    budget = MemoryBudget(200, 100)
    sessions = [Session() for _ in range(3)]
    for took_s, session in zip((5.0, 1.0, 3.0), sessions, strict=True):
        session.took_s = took_s
        budget.answers(session, 40)
    assert [len(session.closed) for session in sessions] == [0, 1, 0]
    assert budget.answer_bytes == 80


def test_a_flood_is_told_once_in_a_while_with_the_key_to_change() -> None:
    door = ConnectionLimits(KafkaSettings(KafkaSection(connections_max=3, connections_per_address_max=2)))
    with structlog.testing.capture_logs() as logs:
        assert [door.admit("a", 0.0) for _ in range(50)].count(True) == 2
        assert door.admit("b", 0.0) and not door.admit("c", 0.0)
        assert not door.admit("c", LOG_INTERVAL_S + 1)
    assert [(entry["key"], entry["refused"]) for entry in logs] == [
        ("kafka.connections_per_address_max", 1),
        ("kafka.connections_max", 49),
    ]
    door.release("a")
    assert door.admit("c", 0.0)
