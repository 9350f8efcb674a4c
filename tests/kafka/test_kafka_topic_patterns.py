"""Memory of topic patterns: clients choose the patterns, so what they match is bounded, shared and counted."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any, NamedTuple

import pytest

from support.kafka.groups.consumer import SAME, beat
from support.kafka.harness import RealBroker
from support.kafka.raw import RawClient
from tidemill.kafka import error_codes
from tidemill.kafka.groups import topic_patterns
from tidemill.kafka.groups.topic_patterns import TopicPatterns, match_patterns

MIB = 1 << 20
NAMES = [f"tenant-{number:05}.orders.events" for number in range(10_000)]


class Row(NamedTuple):
    name: str


class Topics:
    """A stand-in for the cache of topics."""

    version = 0

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def rows(self) -> list[Row]:
        return [Row(name) for name in self.names]


def patterns_of(names: list[str], **limits: int) -> TopicPatterns:
    return TopicPatterns(Topics(names), **limits)  # type: ignore[arg-type]


async def matched(patterns: TopicPatterns, *wanted: str) -> list[int]:
    view = await patterns.topics_view(lambda: set(wanted), lambda _: True)
    return [len(view.matching(pattern)) for pattern in wanted]


async def test_groups_share_the_visible_matches_of_one_pattern() -> None:
    """Regression: each group held and counted its own set as soon as one matching topic was hidden."""
    patterns = patterns_of(NAMES)
    views = [await patterns.topics_view(lambda: {".*"}, lambda name: name != NAMES[7]) for _ in range(2)]
    found = [view.matching(".*") for view in views]
    assert found[0] is found[1] and found[0] == frozenset(NAMES) - {NAMES[7]}
    del found
    assert not patterns._visible, "nothing is kept for a group that is gone"


async def test_all_cached_matches_together_are_bounded() -> None:
    patterns = patterns_of(NAMES)
    await matched(patterns, "none")
    tracemalloc.start()
    try:
        for number in range(100):
            assert await matched(patterns, f".*[^{number % 10}].events|{number}") == [10_000]
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert patterns.bytes_max / 2 < patterns.used_bytes <= patterns.bytes_max == 32 * MIB
    assert held < 40 * MIB, "names are those of the topics, not copies"


async def test_a_view_may_have_more_matches_than_the_cache_has_room_for() -> None:
    patterns = patterns_of(NAMES[:1_000], bytes_max=100_000)
    wanted = [f".*[^{number}].orders.events" for number in range(10)]
    for _ in range(2):
        assert await matched(patterns, *wanted) == [900] * 10
        assert patterns.used_bytes <= 100_000
    await matched(patterns, "tenant-0000.*")
    patterns._cache.version += 1
    assert await matched(patterns, "none") == [0]
    assert patterns.used_bytes < 1_000, "topics of an earlier version are dropped"


def test_the_names_that_a_pattern_matches_are_the_given_ones() -> None:
    names = [f"t-{number}" for number in range(100)]
    found, error = match_patterns({"t-.*", "t-1."}, names)
    assert error is None and sorted(map(len, found.values())) == [10, 100]
    given = set(map(id, names))
    assert all(id(name) in given for matches in found.values() for name in matches)


def test_an_invalid_heartbeat_matches_no_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(patterns: set[str], names: list[str]) -> Any:
        asked.extend(patterns)
        return match_patterns(patterns, names)

    monkeypatch.setattr(topic_patterns, "match_patterns", counted)
    broker = RealBroker()
    try:
        broker.create_topic("t", 1)
        with RawClient(broker.port) as client:
            assert int(beat(client, "g", "m1", 0).error_code) == 0
            for epoch, code, values in (
                (0, error_codes.INVALID_REQUEST, {"rebalance_timeout": SAME}),
                (0, error_codes.UNSUPPORTED_ASSIGNOR, {"server_assignor": "mine"}),
                (-3, error_codes.INVALID_REQUEST, {}),
                (-2, error_codes.INVALID_REQUEST, {}),
                (-1, error_codes.UNKNOWN_MEMBER_ID, {}),
            ):
                for group in ("g", "other"):
                    answer = beat(client, group, "m9", epoch, subscribed_topic_regex=f"t|{epoch}", **values)
                    assert int(answer.error_code) == code, (group, epoch)
            assert asked == []
            assert int(beat(client, "g", "m2", 0, subscribed_topic_regex="t.*").error_code) == 0
            assert asked == ["t.*"]
    finally:
        broker.close()


def test_groups_count_the_names_that_their_patterns_match_and_share_equal_ones() -> None:
    broker = RealBroker()
    try:
        for number in range(300):
            broker.create_topic(f"t-{number}", 1)
        coordinator = broker.server._groups
        assert coordinator is not None
        with RawClient(broker.port) as client:

            def joined(group: str, pattern: str) -> int:
                before = coordinator.used_bytes
                answer = beat(client, group, "m", 0, subscribed_topic_regex=pattern)
                assert int(answer.error_code) == 0
                assert len(answer.assignment.topic_partitions) == 300
                return coordinator.used_bytes - before

            beat(client, "first", "m", 0, subscribed_topic_names=("missing",))  # refreshes the topics
            names = sys.getsizeof(frozenset(map(str, range(300))))
            alone, shared, other = joined("a", "t-.*"), joined("b", "t-.*"), joined("c", "t-.+")
            assert alone == other >= names
            assert shared == alone - names
    finally:
        broker.close()
