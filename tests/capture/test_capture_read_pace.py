"""The pause of a stream's reader, in which small transactions gather."""

from __future__ import annotations

import pytest

from tidemill.capture.postgres.connection import BURST_BYTES
from tidemill.capture.session.stream_reader import DENSE_FRAMES, GATHER_S, ReadPace

FRAME = b"w" * 60
DENSE = round(1_500 * GATHER_S)
"""Commits, with three frames each, in one read of a dense stream."""


def gathers_at(commits_per_s: float) -> bool:
    """Return whether a stream with a read for each commit is gathered after a second."""
    pace = ReadPace()
    for number in range(1, int(commits_per_s) + 1):
        pace.record_read([FRAME] * 3, 1, number / commits_per_s)
    return pace.gathers


@pytest.mark.parametrize(("commits_per_s", "expected"), [(100, False), (300, False), (700, False), (1_500, True)])
def test_many_small_transactions_a_second_are_gathered_and_few_are_not(commits_per_s: float, expected: bool) -> None:
    assert gathers_at(commits_per_s) is expected


def test_a_gathered_stream_remains_gathered_until_it_becomes_slow() -> None:
    pace, now_s = ReadPace(), 0.0
    pace.record_read([FRAME] * 3 * DENSE, DENSE, now_s := now_s + GATHER_S)
    for _ in range(100):
        pace.record_read([FRAME] * 3 * (DENSE - 1), DENSE - 1, now_s := now_s + GATHER_S)
        assert pace.gathers
    pace.record_read([FRAME] * 3, 1, now_s + GATHER_S)
    assert not pace.gathers


def test_the_first_read_after_a_pause_of_the_stream_is_not_gathered() -> None:
    pace = ReadPace()
    pace.record_read([FRAME] * 3 * DENSE, DENSE, GATHER_S)
    pace.record_read([FRAME] * 6, 2, 10.0)
    assert not pace.gathers


def test_rows_of_a_large_transaction_are_gathered_and_a_full_buffer_is_read_immediately() -> None:
    pace = ReadPace()
    pace.record_read([FRAME] * DENSE_FRAMES, 0, 10.0)
    assert pace.gathers
    pace.record_read([b"w" * BURST_BYTES] * DENSE_FRAMES, 0, 10.001)
    assert not pace.gathers
