"""The topics that this node sees, for subscriptions by name and by regular expression.

A pattern is RE2's, as Kafka's (RE2/J) is, and must match a whole name: linear in the name, whatever it says. It runs
inside Arrow, over all names at once and beside the event loop; what it found counts until a topic comes or goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.kafka.groups.consumer_state import Topic
from tidemill.kafka.metadata.topic_cache import TopicCache

PATTERN_CHARS: Final = 1_000
PATTERNS_MAX: Final = 1_000
"""Whose topics are remembered; beyond, all are worked out again when they are needed."""


TRIES_MAX: Final = 10
ANY_NAME: Final = ("t",)
"""Of no name at all nothing is made of the pattern, and so nothing is said of it. No array: Arrow looks for pandas at
its first one, and this module is read before the node's process hides it."""


class TopicView(NamedTuple):
    """`consumer_state.Seen`: every topic, and of some patterns those that `may` be seen. To be used before the next
    await, while `cache` is what it was."""

    cache: TopicCache
    matches: Mapping[str, frozenset[str]]
    may: Callable[[str], bool]

    @property
    def version(self) -> int:
        return self.cache.version

    def of(self, name: str) -> Topic | None:
        row = self.cache.by_name(name)
        return None if row is None else Topic(row.topic_id, row.partitions)

    def matching(self, pattern: str) -> frozenset[str]:
        return frozenset(filter(self.may, self.matches[pattern]))


class Subscribable:
    """The topics that `cache` holds, by name and by pattern."""

    def __init__(self, cache: TopicCache) -> None:
        self._cache = cache
        self._version = -1
        self._matches: dict[str, frozenset[str]] = {}

    async def seen(self, patterns: Callable[[], set[str]], may: Callable[[str], bool]) -> TopicView:
        """As of this moment, when it returns. Raises InvalidError for what RE2 does not take, UnavailableError where
        topics come and go faster than they can be looked at."""
        for _ in range(TRIES_MAX):
            self._look()
            wanted = patterns()
            missing = wanted - self._matches.keys()
            if not missing:
                return TopicView(self._cache, {pattern: self._matches[pattern] for pattern in wanted}, may)
            version = self._version
            names = [row.name for row in self._cache.rows()]
            found, error = await asyncio.to_thread(match, missing, names)
            if error is not None:
                raise error
            self._look()
            if self._version == version:
                if len(self._matches) + len(found) > PATTERNS_MAX:
                    self._matches.clear()
                self._matches |= found
        raise UnavailableError("Topics change too fast for their names to be matched.")

    def _look(self) -> None:
        if self._version != self._cache.version:
            self._version, self._matches = self._cache.version, {}


def match(patterns: set[str], names: list[str]) -> tuple[dict[str, frozenset[str]], InvalidError | None]:
    """The names of which each pattern matches the whole. For a thread. Those that are no patterns are left out, and one
    of them is told."""
    column = pa.array(names, pa.string())
    found: dict[str, frozenset[str]] = {}
    error: InvalidError | None = None
    for pattern in patterns:
        try:
            if len(pattern) > PATTERN_CHARS:
                raise pa.ArrowInvalid(f"longer than {PATTERN_CHARS} characters")
            # By itself first: what closes a bracket that it did not open would be fine between ours.
            pc.match_substring_regex(pa.array(ANY_NAME), pattern)
            is_match = pc.match_substring_regex(column, rf"\A(?:{pattern})\z")
        except pa.ArrowInvalid as refused:
            error = InvalidError(f"not a regular expression of RE2: pattern={pattern[:100]!r} cause={refused}.")
        else:
            found[pattern] = frozenset(column.filter(is_match).to_pylist())
    return found, error
