from __future__ import annotations

import crc32c
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import CorruptError
from tidemill.topics.api import OffsetOutOfRangeError
from tidemill.topics.partition.state_machine.apply import Rejected, apply
from tidemill.topics.partition.state_machine.codec import (
    MAGIC,
    decode_command,
    decode_state,
    encode_command,
    encode_state,
)
from tidemill.topics.partition.state_machine.commands import Advance, PlaceBatches, Placeholder, Rollup
from tidemill.topics.partition.state_machine.producer_state import PRODUCER_EXPIRY_MS
from tidemill.topics.partition.state_machine.state import PRODUCERS_LIMIT, PartitionState


def placed(
    base: int, count: int = 1, *, pid: int = -1, epoch: int = 0, seq: int = 0, ts: int = 0, obj: int = 0
) -> Placeholder:
    return Placeholder(obj, base * 10, count * 10, base, count, pid, epoch if pid >= 0 else -1, seq, ts)


def place(state: PartitionState, *batches: Placeholder, at_ms: int = 0, term: int = 1) -> Rejected | None:
    return apply(state, PlaceBatches(at_ms, ("o1", "o2"), batches), state.applied, term)


def test_offsets_are_contiguous_or_the_command_changes_nothing() -> None:
    state = PartitionState()
    assert place(state, placed(0, 3), placed(3, 2)) is None
    assert isinstance(place(state, placed(6)), Rejected)
    assert isinstance(place(state, placed(5), placed(5)), Rejected)
    assert isinstance(place(state, placed(5, 0)), Rejected)
    assert isinstance(place(state, placed(5, obj=2)), Rejected)
    assert (state.high_watermark, len(state), state.applied) == (5, 2, 5)


def test_a_refused_sequence_refuses_the_whole_command() -> None:
    state = PartitionState()
    assert place(state, placed(0, pid=1, seq=0)) is None
    assert isinstance(place(state, placed(1), placed(2, pid=1, seq=9)), Rejected)
    assert isinstance(place(state, placed(1, pid=1, seq=0)), Rejected), "a duplicate never reaches the log"
    assert state.high_watermark == 1


def test_positions_are_applied_once_and_in_order() -> None:
    state = PartitionState()
    with pytest.raises(ValueError):
        apply(state, PlaceBatches(0, (), ()), 1, 1)


def test_an_offset_is_found_in_the_batch_that_holds_it() -> None:
    state = PartitionState()
    place(state, placed(0, 3), placed(3, 2, obj=1), placed(5, 4))
    assert [state.batch_index(o) for o in range(10)] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert state.batch_ref(1).object_key == "o2"
    assert (state.batch_ref(2).base_offset, state.batch_ref(2).record_count) == (5, 4)
    for bad in (-1, 10):
        with pytest.raises(OffsetOutOfRangeError):
            state.batch_index(bad)


def test_a_time_finds_the_first_batch_that_reaches_it() -> None:
    state = PartitionState()
    place(state, placed(0, ts=50), placed(1, ts=20), placed(2, ts=70))
    assert [state.batch_for_time(t) for t in (0, 50, 51, 70, 71)] == [0, 0, 2, 2, None]


def test_terms_remember_their_first_offset() -> None:
    state = PartitionState()
    place(state, placed(0, 2), term=3)
    place(state, placed(2), term=3)
    place(state, placed(3), term=7)
    assert state.terms == [(3, 0), (7, 3)]


def test_idle_producer_is_forgotten_and_may_start_anywhere() -> None:
    state = PartitionState()
    place(state, placed(0, pid=1, seq=0), at_ms=1000)
    assert isinstance(place(state, placed(1, pid=1, seq=5), at_ms=1000 + PRODUCER_EXPIRY_MS - 1), Rejected)
    assert place(state, placed(1, pid=1, seq=5), at_ms=1000 + PRODUCER_EXPIRY_MS) is None


def test_the_longest_idle_producers_go_first_when_there_are_too_many() -> None:
    state = PartitionState()
    count = PRODUCERS_LIMIT + 1
    place(state, placed(0, pid=0, seq=0), placed(1, pid=1, seq=0))
    place(state, placed(2, pid=0, seq=1))
    place(state, *(placed(3 + n, pid=2 + n, seq=0) for n in range(count - 2)))
    assert 0 in state.producers and 1 not in state.producers
    assert len(state.producers) == PRODUCERS_LIMIT


batches = st.lists(
    st.tuples(st.integers(1, 50), st.integers(-1, 4), st.integers(0, 2**41), st.integers(0, 1)), max_size=40
)


@given(st.lists(batches, max_size=6), st.integers(0, 6))
@settings(deadline=None)
def test_replay_equals_rollup_plus_the_rest(groups: list[list[tuple[int, int, int, int]]], cut: int) -> None:
    direct, resumed = PartitionState(), PartitionState()
    sequences: dict[int, int] = {}
    for number, group in enumerate(groups):
        offset = direct.high_watermark
        rows = []
        for count, pid, ts, obj in group:
            rows.append(placed(offset, count, pid=pid, seq=sequences.get(pid, 0), ts=ts, obj=obj))
            sequences[pid] = sequences.get(pid, 0) + count
            offset += count
        record = encode_command(PlaceBatches(number, (f"a{number}", f"b{number}"), tuple(rows)))
        if number == cut:
            resumed = decode_state(encode_state(resumed), "k")
        for state in (direct, resumed):
            assert apply(state, decode_command(record), state.applied, 1 + number // 2) is None
    assert vars(direct) == vars(resumed)


def test_a_rollup_names_its_object_and_changes_nothing_else() -> None:
    state = PartitionState()
    place(state, placed(0))
    apply(state, Rollup("k", 5), 1, 1)
    assert (state.rollup_key, state.rollup_position, state.applied, state.high_watermark) == ("k", 1, 2, 1)


def test_expired_producers_stay_out_of_the_rollup() -> None:
    state = PartitionState()
    place(state, placed(0, pid=1, seq=0), at_ms=0)
    place(state, placed(1, pid=2, seq=0), at_ms=PRODUCER_EXPIRY_MS)
    assert list(decode_state(encode_state(state), "k").producers) == [2]


def test_damage_is_corrupt_never_state() -> None:
    data = encode_state(PartitionState())
    for bad in (data[:-1], b"X" + data[1:], data[:10] + b"\x00" + data[11:], b""):
        with pytest.raises(CorruptError):
            decode_state(bad, "k")
    for bad in (b"", b"\x93\x09\x00\x00", b"\xff"):
        with pytest.raises(CorruptError):
            decode_command(bad)


@pytest.mark.parametrize("body", [b"", b"\x80", b"\xc1", msgspec.msgpack.encode({"applied": "text"})])
def test_a_rollup_of_a_valid_checksum_and_unreadable_contents_is_corrupt(body: bytes) -> None:
    whole = MAGIC + body
    with pytest.raises(CorruptError, match="unreadable rollup object: key=k cause="):
        decode_state(whole + crc32c.crc32c(whole).to_bytes(4, "little"), "k")


def test_what_lies_in_l1_leaves_the_state_and_never_comes_back() -> None:
    state = PartitionState()
    place(state, placed(0, 3), placed(3, 2, obj=1), placed(5, 4, obj=1), term=1)
    assert apply(state, Advance(0, 0, "w", 1, 5), state.applied, 1) is None
    assert (state.log_start, state.reconciled, state.hot_start) == (0, 5, 5)
    assert (list(state.bases), state.object_keys, state.terms) == ([5], ["o2"], [(1, 0)])
    assert apply(state, Advance(0, 0, "w", 1, 3), state.applied, 1) is None
    assert state.reconciled == 5
    assert isinstance(apply(state, Advance(0, 0, "w", 1, 10), state.applied, 1), Rejected)
    assert state.batch_index(5) == 0
    with pytest.raises(ValueError, match="L1"):
        state.batch_index(4)
    assert apply(state, Advance(0, 7, "w", 1), state.applied, 1) is None
    assert (state.hot_start, list(state.bases)) == (7, [5])
    with pytest.raises(OffsetOutOfRangeError):
        state.batch_index(6)
    assert apply(state, Advance(0, 0, "w", 1, 9), state.applied, 1) is None
    assert (state.hot_start, len(state), state.batch_index(9)) == (9, 0, 0)
    assert decode_state(encode_state(state), "k").reconciled == 9


def test_records_and_roll_ups_from_before_l1_say_that_nothing_is_there() -> None:
    assert decode_command(msgspec.msgpack.encode([3, 7, 2, "w", 5])) == Advance(7, 2, "w", 5, 0, 0)
    state = PartitionState()
    place(state, placed(0, 3))
    body = encode_state(state)[:-4]
    fields = msgspec.msgpack.decode(body[5:])
    del fields["reconciled"], fields["aborted_start"]
    older = body[:5] + msgspec.msgpack.encode(fields)
    again = decode_state(older + crc32c.crc32c(older).to_bytes(4, "little"), "k")
    assert (again.reconciled, again.aborted_start, again.high_watermark) == (0, 0, 3)
