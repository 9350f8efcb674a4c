"""Descriptions of a consensus server's state, derived from the events of its connections. No server is contacted."""

from __future__ import annotations

import pytest

from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.postgres.client import PostgresConsensus

LOST = "the connection to PostgreSQL was lost."


@pytest.mark.parametrize(
    ("answered_s", "away_s", "began_s", "words"),
    [
        (99.5, 0.0, None, ""),
        (90.0, 99.0, 99.0, LOST),
        # a recent error is more precise than the silence before it
        (90.0, 99.0, 92.0, LOST),
        (90.0, 94.0, 94.0, "does not answer"),  # the session was lost, and the next one has no answer yet
        (95.0, 0.0, 96.0, "does not answer"),
        (99.5, 99.0, None, ""),
    ],
)
def test_a_server_that_is_silent_since_it_dropped_a_connection_is_called_silent(
    answered_s: float, away_s: float, began_s: float | None, words: str
) -> None:
    client = PostgresConsensus("postgresql://nowhere/x", SystemClock(), Rand())
    lane = client._groups.lane
    lane.answered_s, lane.away_s, lane.away, lane.began_s = answered_s, away_s, LOST, began_s
    found = client._lane_trouble(100.0)
    assert found == words if words in ("", LOST) else words in found
