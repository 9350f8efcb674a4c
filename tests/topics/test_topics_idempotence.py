"""Kafka 4's rules for idempotent producers: every row of the acceptance table that needs no transaction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.topics.batch.header import MAX_SEQUENCE, add_sequence
from tidemill.topics.partition.sequence_gaps import GAP_EXPIRY_S, GAPS_LIMIT, SequenceGaps
from tidemill.topics.partition.state_machine.producer_state import (
    ProducerState,
    Refusal,
    RememberedBatch,
    judge_sequence,
    with_batch,
)


def after(*batches: tuple[int, int], epoch: int = 0) -> ProducerState | None:
    producer: ProducerState | None = None
    offset = 100
    for first, count in batches:
        producer = with_batch(producer, epoch, first, count, offset, 0)
        offset += count
    return producer


def test_an_unknown_producer_may_start_at_any_sequence() -> None:
    assert judge_sequence(None, 0, 0, 3) is None
    assert judge_sequence(None, 0, 777, 3) is None


def test_monotonic_sequences_are_accepted() -> None:
    assert judge_sequence(after((0, 3)), 0, 3, 2) is None


def test_a_gap_is_out_of_order_and_an_immediate_retry_gets_the_same_offset() -> None:
    producer = after((0, 3))
    assert judge_sequence(producer, 0, 4, 1) is Refusal.OUT_OF_ORDER
    assert judge_sequence(producer, 0, 0, 3) == RememberedBatch(0, 2, 100, 3)


def test_caches_the_last_five_and_not_the_sixth() -> None:
    producer = after(*((n * 2, 2) for n in range(6)))
    assert judge_sequence(producer, 0, 0, 2) is Refusal.OUT_OF_ORDER
    for n in range(1, 6):
        assert judge_sequence(producer, 0, n * 2, 2) == RememberedBatch(n * 2, n * 2 + 1, 100 + n * 2, 2)


def test_part_of_a_known_batch_is_no_duplicate() -> None:
    producer = after((0, 3))
    assert judge_sequence(producer, 0, 0, 2) is Refusal.OUT_OF_ORDER
    assert judge_sequence(producer, 0, 1, 2) is Refusal.OUT_OF_ORDER


def test_a_lower_epoch_is_stale_even_for_a_known_batch() -> None:
    assert judge_sequence(after((0, 3), epoch=2), 1, 0, 3) is Refusal.STALE_EPOCH


def test_a_higher_epoch_starts_at_zero_and_forgets_the_old_one() -> None:
    producer = after((0, 3), epoch=1)
    assert judge_sequence(producer, 2, 0, 3) is None
    assert judge_sequence(producer, 2, 3, 3) is Refusal.OUT_OF_ORDER
    bumped = with_batch(producer, 2, 0, 1, 200, 0)
    assert [b.base_offset for b in bumped.batches] == [200]


def test_the_sequence_wraps_from_its_maximum_to_zero() -> None:
    at_end = after((MAX_SEQUENCE - 1, 2))
    assert judge_sequence(at_end, 0, 0, 4) is None
    across = after((MAX_SEQUENCE - 1, 4))
    assert judge_sequence(across, 0, 2, 1) is None
    assert judge_sequence(across, 0, MAX_SEQUENCE - 1, 4) == RememberedBatch(MAX_SEQUENCE - 1, 1, 100, 4)
    assert judge_sequence(across, 0, 0, 1) is Refusal.OUT_OF_ORDER


@given(st.integers(0, MAX_SEQUENCE), st.lists(st.integers(1, 500), min_size=1, max_size=12))
def test_any_run_of_batches_is_accepted_in_order_and_its_last_five_are_known(start: int, counts: list[int]) -> None:
    producer: ProducerState | None = None
    sequence, offset = start, 0
    sent = []
    for count in counts:
        assert judge_sequence(producer, 3, sequence, count) is None
        producer = with_batch(producer, 3, sequence, count, offset, 0)
        sent.append((sequence, count, offset))
        sequence, offset = add_sequence(sequence, count), offset + count
    for first, count, base in sent[-5:]:
        verdict = judge_sequence(producer, 3, first, count)
        assert isinstance(verdict, RememberedBatch) and verdict.base_offset == base
    for first, count, _ in sent[:-5]:
        assert judge_sequence(producer, 3, first, count) is Refusal.OUT_OF_ORDER


def test_a_hole_blocks_what_comes_after_it_until_it_is_filled() -> None:
    holes = SequenceGaps()
    holes.failed(1, 0, 10, 0.0)
    assert holes.is_blocked(1, 0, 20, 1.0)
    assert not holes.is_blocked(1, 0, 10, 1.0)
    assert not holes.is_blocked(1, 0, 5, 1.0)
    assert not holes.is_blocked(2, 0, 20, 1.0)
    holes.record_appended(1, 0, 10, 10)
    assert not holes.is_blocked(1, 0, 20, 1.0)


def test_the_earliest_failed_batch_is_the_hole_in_whatever_order_they_fail() -> None:
    holes = SequenceGaps()
    holes.failed(1, 0, 20, 0.0)
    holes.failed(1, 0, 10, 0.0)
    holes.failed(1, 0, 30, 0.0)
    assert holes.is_blocked(1, 0, 20, 1.0)
    assert not holes.is_blocked(1, 0, 10, 1.0)


def test_a_batch_before_the_hole_does_not_fill_it() -> None:
    holes = SequenceGaps()
    holes.failed(1, 0, 20, 0.0)
    holes.record_appended(1, 0, 10, 10)
    assert holes.is_blocked(1, 0, 30, 1.0)


def test_a_batch_that_failed_later_is_missing_still_when_the_earlier_one_has_come() -> None:
    """Found by the simulation: the retry of 10 fills its gap, that of 20 is pending, and 30 is not out of order in
    between."""
    holes = SequenceGaps()
    holes.failed(1, 0, 10, 0.0)
    holes.failed(1, 0, 20, 1.0)
    holes.record_appended(1, 0, 10, 10)
    assert holes.is_blocked(1, 0, 30, 2.0)
    assert not holes.is_blocked(1, 0, 20, 2.0)
    holes.record_appended(1, 0, 20, 10)
    assert not holes.is_blocked(1, 0, 40, 2.0)
    assert len(holes) == 0


def test_who_comes_again_and_again_does_not_keep_a_hole() -> None:
    holes = SequenceGaps()
    holes.failed(1, 0, 10, 0.0)
    holes.failed(1, 0, 20, GAP_EXPIRY_S - 1)
    assert holes.is_blocked(1, 0, 20, GAP_EXPIRY_S - 1)
    assert not holes.is_blocked(1, 0, 20, GAP_EXPIRY_S)


def test_a_new_epoch_supersedes_a_hole() -> None:
    holes = SequenceGaps()
    holes.failed(1, 0, 10, 0.0)
    assert not holes.is_blocked(1, 1, 50, 1.0)
    holes.record_appended(1, 1, 0, 1)
    assert len(holes) == 0


def test_a_hole_is_ordered_across_the_wrap() -> None:
    holes = SequenceGaps()
    holes.failed(1, 0, MAX_SEQUENCE - 1, 0.0)
    assert holes.is_blocked(1, 0, 1, 1.0)


def test_a_hole_expires_and_their_number_is_bounded() -> None:
    holes = SequenceGaps()
    holes.failed(1, 0, 10, 0.0)
    assert not holes.is_blocked(1, 0, 20, GAP_EXPIRY_S)
    for producer_id in range(GAPS_LIMIT + 10):
        holes.failed(producer_id, 0, 0, 0.0)
    assert len(holes) == GAPS_LIMIT
