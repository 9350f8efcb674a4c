from __future__ import annotations

import heapq
import random
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.limits import MIB
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l0.group_commit import (
    GATHER_BYTES,
    GATHER_MAX_S,
    GATHER_MIN_S,
    PLACING_MAX_S,
    SPREAD_MIN_S,
    GroupCommitPolicy,
)

SETTINGS = TopicSettings()
SHORT_S = 0.001


def delay(
    rhythm: GroupCommitPolicy, now_s: float, size: int = 100, uploads: int = 0, first_s: float | None = None
) -> float:
    first_s = now_s if first_s is None else first_s
    return rhythm.delay_s(now_s, waiting_bytes=size, first_s=first_s, uploads=uploads)


def answer(rhythm: GroupCommitPolicy, now_s: float, *lines: Hashable, took_s: float = SHORT_S) -> None:
    rhythm.upload_ended(now_s, took_s, lines)
    for line in lines:
        rhythm.batch_answered(now_s, line)


@given(
    st.lists(
        st.tuples(st.floats(0, 0.01), st.floats(0, 0.2), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))),
        max_size=10,
    ),
    st.floats(0, 1),
)
def test_an_idle_writer_waits_a_moment_at_most_and_only_for_lines_it_answered(
    events: list[tuple[float, float, set[int], set[int]]], later_s: float
) -> None:
    rhythm = GroupCommitPolicy(SETTINGS)
    now_s, missing = 100.0, set()
    for pause_s, took_s, answered, came in events:
        now_s += pause_s
        answer(rhythm, now_s, *answered, took_s=took_s)
        missing |= answered
        for line in came:
            rhythm.batch_arrived(now_s, line)
        missing -= came
    found = delay(rhythm, now_s + later_s)
    assert 0 <= found <= max(0.0, GATHER_MAX_S - later_s) + 1e-9
    if not missing or later_s > GATHER_MAX_S:
        assert found == 0


def test_who_was_not_answered_a_moment_ago_is_waited_for_by_nobody() -> None:
    assert delay(GroupCommitPolicy(SETTINGS), 1.0) == 0


def test_a_lone_producer_that_sends_again_at_once_waits_for_nobody() -> None:
    rhythm = GroupCommitPolicy(SETTINGS)
    answer(rhythm, 1.0, "a")
    rhythm.batch_arrived(1.0005, "a")
    assert delay(rhythm, 1.0005) == 0


def test_the_others_of_a_group_are_waited_for_until_they_are_back() -> None:
    rhythm = GroupCommitPolicy(SETTINGS)
    answer(rhythm, 1.0, "a", "b", "c")
    for line in ("c", "a"):
        rhythm.batch_arrived(1.0, line)
        assert delay(rhythm, 1.0) == pytest.approx(GATHER_MIN_S)
    rhythm.batch_arrived(1.0, "stranger")
    assert delay(rhythm, 1.0) > 0
    rhythm.batch_arrived(1.0, "b")
    assert delay(rhythm, 1.0) == 0


def test_producers_that_do_not_come_back_at_once_are_soon_not_waited_for() -> None:
    rhythm = GroupCommitPolicy(SETTINGS)
    now_s = 1.0
    waits = []
    for number in range(60):
        answer(rhythm, now_s, number)
        rhythm.batch_arrived(now_s + 0.0005, f"other {number}")
        waits.append(delay(rhythm, now_s + 0.0005))
        now_s += 0.05
    assert waits[0] > 0 and not any(waits[10:])
    for _ in range(20):  # now they do
        answer(rhythm, now_s, "a", "b")
        for line in ("a", "b"):
            rhythm.batch_arrived(now_s + 0.001, line)
        now_s += 0.003
    answer(rhythm, now_s, "a", "b")
    rhythm.batch_arrived(now_s, "a")
    assert delay(rhythm, now_s) > 0


def test_who_is_about_to_be_answered_is_waited_for_however_long_the_logs_take() -> None:
    rhythm = GroupCommitPolicy(SETTINGS)
    rhythm.upload_ended(1.0, SHORT_S, ["a", "b"])
    assert delay(rhythm, 1.1) == pytest.approx(GATHER_MAX_S), "no batch waits longer, whoever is missing"
    assert rhythm.batch_answered(1.101, "a") and rhythm.batch_answered(1.101, "b")
    rhythm.batch_arrived(1.1015, "a")
    assert delay(rhythm, 1.1015) == pytest.approx(GATHER_MIN_S - 0.0005)
    rhythm.batch_arrived(1.102, "b")
    assert delay(rhythm, 1.102) == 0


def test_who_is_not_answered_at_all_is_given_up() -> None:
    rhythm = GroupCommitPolicy(SETTINGS)
    rhythm.upload_ended(1.0, SHORT_S, ["a"])
    assert delay(rhythm, 1.0 + PLACING_MAX_S) == 0
    assert not rhythm.batch_answered(3.0, "a") and not rhythm.batch_answered(3.0, "never uploaded")
    assert delay(rhythm, 3.0) == 0


def test_nobody_waits_for_long_however_many_are_answered() -> None:
    rhythm = GroupCommitPolicy(SETTINGS)
    now_s = 1.0
    for number in range(10):
        answer(rhythm, now_s, number, took_s=0.1)
        assert delay(rhythm, now_s, first_s=1.0) <= max(0.0, 1.0 + GATHER_MAX_S - now_s)
        now_s += 0.001


def test_much_that_waits_waits_for_nobody() -> None:
    rhythm = GroupCommitPolicy(SETTINGS)
    answer(rhythm, 1.0, "a")
    assert delay(rhythm, 1.0) == pytest.approx(GATHER_MIN_S)
    assert delay(rhythm, 1.0, size=GATHER_BYTES) == 0


def test_short_uploads_are_waited_for_and_long_ones_overlap_evenly() -> None:
    short, long = GroupCommitPolicy(SETTINGS), GroupCommitPolicy(SETTINGS)
    for _ in range(50):
        short.upload_ended(1.0, SHORT_S, ())
        long.upload_ended(1.0, 0.1, ())
    for rhythm in (short, long):
        rhythm.upload_started(2.0)
    assert delay(short, 2.0, uploads=1) == pytest.approx(SPREAD_MIN_S)
    assert delay(long, 2.0, uploads=1) == pytest.approx(0.1 / SETTINGS.uploads_in_flight, rel=0.01)
    assert delay(long, 2.0, size=SETTINGS.object_bytes, uploads=1) == 0


def test_a_timer_replaces_all_of_it() -> None:
    rhythm = GroupCommitPolicy(TopicSettings(linger_s=0.25))
    answer(rhythm, 1.0, "a")
    assert delay(rhythm, 1.2, size=8 * MIB) == 0
    assert delay(rhythm, 1.2, first_s=1.1, uploads=3) == pytest.approx(0.15)


LINE, UPLOADED, ANSWERED = range(3)


def closed_loop(producers: int, upload_s: float, log_s: float, again_s: float, seed: int) -> list[int]:
    """Return the number of batches in each object, of producers with one batch in flight each. An upload takes about
    `upload_s`, the commit of its contents `log_s`, and its producers send the next batches about `again_s` later."""
    chance = random.Random(seed)
    rhythm = GroupCommitPolicy(SETTINGS)
    events = [(chance.uniform(0, 0.02), LINE, [line]) for line in range(producers)]
    heapq.heapify(events)
    waiting: list[int] = []
    uploads, first_s = 0, 0.0
    flush_s: float | None = None
    groups: list[int] = []
    while len(groups) < 300:
        if flush_s is not None and (not events or flush_s <= events[0][0]):
            now_s, flush_s = flush_s, None
            if (left_s := delay(rhythm, now_s, len(waiting) * 65_536, uploads, first_s)) > 0:
                flush_s = now_s + left_s  # as the writer looks again when its timer ends
                continue
            rhythm.upload_started(now_s)
            groups.append(len(waiting))
            heapq.heappush(events, (now_s + upload_s * chance.uniform(0.8, 1.5), UPLOADED, waiting))
            waiting, uploads = [], uploads + 1
        else:
            now_s, what, members = heapq.heappop(events)
            if what == LINE:
                first_s = first_s if waiting else now_s
                rhythm.batch_arrived(now_s, members[0])
                waiting += members
            elif what == UPLOADED:
                uploads -= 1
                placing: set[Hashable] = {*members} - {*waiting}
                rhythm.upload_ended(now_s, upload_s, placing)
                heapq.heappush(events, (now_s + log_s * chance.uniform(0.8, 1.5), ANSWERED, members))
            else:
                for member in members:
                    rhythm.batch_answered(now_s, member)
                    heapq.heappush(events, (now_s + again_s * chance.uniform(0.8, 1.4), LINE, [member]))
        if waiting:
            due_s = now_s + delay(rhythm, now_s, len(waiting) * 65_536, uploads, first_s)
            flush_s = due_s if flush_s is None else min(flush_s, due_s)
    return groups


@pytest.mark.parametrize(
    ("upload_s", "log_s"),
    [(0.0012, 0.0005), (0.0012, 0.001), (0.005, 0.003), (0.008, 0.012), (0.003, 0.02), (0.02, 0.02)],
)
@pytest.mark.parametrize("producers", [2, 4, 8])
def test_producers_with_one_batch_in_flight_come_to_share_objects(
    producers: int, upload_s: float, log_s: float
) -> None:
    """The simulated stores include a disk that other processes keep busy."""
    for seed in range(5):
        groups = closed_loop(producers, upload_s, log_s, 0.0008, seed)
        assert sum(groups[50:]) / len(groups[50:]) > 0.9 * producers


def test_producers_that_think_between_batches_are_not_made_to_wait_for_each_other() -> None:
    groups = closed_loop(20, 0.0012, 0.0005, 0.1, 1)
    assert sum(groups[50:]) / len(groups[50:]) < 2
