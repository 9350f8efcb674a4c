"""RC4-RC7: the table of received and flushed positions, and the bytes of a status update."""

from __future__ import annotations

import struct

import pytest

from sim.scenarios.capture_plants import StaleStatus
from tidemill.base.errors import CorruptError
from tidemill.capture.postgres.standby_status import (
    ReplicationStatus,
    decode_keepalive,
    encode_status,
    keepalive_interval_s,
)


def test_rc4_a_keepalive_moves_nothing_flushed_while_writes_are_buffered() -> None:
    """electric #4731: `up_to_date` is recomputed when the commit was handled."""
    status = ReplicationStatus(99)
    status.record_commit(100)
    status.record_keepalive(500, inside_txn=False)
    assert (status.received, status.flushed) == (499, 99)


def test_rc4_without_the_recompute_the_buffered_transaction_is_confirmed() -> None:
    status = StaleStatus(99)
    status.record_commit(100)
    status.record_keepalive(500, inside_txn=False)
    assert status.flushed == 499  # the planted fault: a crash now loses transaction 100


def test_rc5_a_keepalive_advances_flushed_when_all_is_flushed() -> None:
    status = ReplicationStatus(99)
    status.record_commit(100)
    status.record_flush_notice(100)
    status.record_keepalive(500, inside_txn=False)
    assert status.flushed == 499


def test_rc5_the_flush_notice_catches_up_with_keepalives_received_before_it() -> None:
    status = ReplicationStatus(99)
    status.record_commit(100)
    status.record_keepalive(500, inside_txn=False)
    status.record_flush_notice(100)
    assert status.flushed == 499


def test_rc6_a_keepalive_inside_a_transaction_moves_nothing() -> None:
    status = ReplicationStatus(99)
    status.record_keepalive(500, inside_txn=True)
    assert (status.received, status.flushed) == (99, 99)


def test_rc7_a_transaction_nobody_waits_for_is_confirmed_and_keepalives_go_on() -> None:
    status = ReplicationStatus(99)
    status.record_flush_notice(100)  # the tracker confirms while the commit is handled
    status.record_commit(100)
    assert status.flushed == 100
    status.record_keepalive(500, inside_txn=False)
    assert status.flushed == 499


def test_a_partial_notice_moves_flushed_no_further_than_itself() -> None:
    status = ReplicationStatus(99)
    for lsn in (100, 110, 120):
        status.record_commit(lsn)
    status.record_keepalive(500, inside_txn=False)
    status.record_flush_notice(109)
    assert status.flushed == 109


def test_a_keepalive_stands_for_the_byte_before_it_since_a_commit_may_start_right_there() -> None:
    status = ReplicationStatus(99)
    status.record_keepalive(500, inside_txn=False)
    write, flush = struct.unpack_from(">qq", status.encode(0), 1)
    # The server skips commits that start below the flushed position: one at 500 must survive.
    assert write == flush == 500


def test_encoded_positions_are_one_past_the_inclusive_ones_and_time_counts_from_2000() -> None:
    kind, write, flush, apply, clock_us, reply = struct.unpack(">cqqqqB", encode_status(7, 5, 946_684_801_000))
    assert (kind, write, flush, apply, clock_us, reply) == (b"r", 8, 6, 6, 1_000_000, 0)


def test_a_malformed_keepalive_is_corrupt() -> None:
    with pytest.raises(CorruptError):
        decode_keepalive(b"k123")


def test_the_timer_is_a_third_of_the_servers_patience_and_at_most_15_s() -> None:
    assert [keepalive_interval_s(ms) for ms in (3000, 60_000, 0)] == [1.0, 15.0, 15.0]
