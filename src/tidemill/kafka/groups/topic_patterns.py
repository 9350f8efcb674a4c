"""Topics that this node sees, for subscriptions by name and by regular expression.

A pattern is one of RE2, as in Kafka (RE2/J), and must match a whole name. Matching is linear in the name for any
pattern. It runs inside Arrow, over all names together and in a thread. The result is valid until a topic is created or
deleted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import compress, filterfalse
from typing import Final
from weakref import WeakValueDictionary

import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.limits import MIB
from tidemill.base.runtime.memory_budget import RecentCache
from tidemill.kafka.groups.consumer.state import Topic
from tidemill.kafka.metadata.topic_cache import TopicCache

PATTERN_CHARS: Final = 1_000
CACHE_BYTES_MAX: Final = 32 * MIB
"""Maximum size of the cached matches. A pattern that matches 10,000 topics takes 0.5 MB."""
PATTERN_BYTES: Final = 256
"""Memory of a cached pattern, apart from its text and its matches."""

TRIES_MAX: Final = 10
VALIDATION_TEXT: Final = ("t",)
"""Text that validates a pattern: against an empty array Arrow would not compile it.

A tuple and no array, because Arrow looks for pandas at its first array, and this module is imported before the node's
process hides pandas.
"""


class TopicView:
    """All topics, and the matches of some patterns that the client may see: a `consumer.state.TopicSnapshot`.

    It must be used before the next await, because it reads `cache`.
    """

    def __init__(
        self,
        cache: TopicCache,
        matches: Mapping[str, frozenset[str]],
        may: Callable[[str], bool],
        share: Callable[[frozenset[str]], frozenset[str]],
    ) -> None:
        """`share` returns an equal set that is in memory already, or the given one."""
        self.cache = cache
        self._matches = matches
        self._may = may
        self._share = share

    @cached_property
    def _hidden(self) -> frozenset[str]:
        """Matching names that the client may not see. Each name is checked once, however many patterns match it."""
        return frozenset(filterfalse(self._may, frozenset().union(*self._matches.values())))

    @property
    def version(self) -> int:
        return self.cache.version

    def topic(self, name: str) -> Topic | None:
        row = self.cache.by_name(name)
        return None if row is None else Topic(row.topic_id, row.partitions)

    def matching(self, pattern: str) -> frozenset[str]:
        matches = self._matches[pattern]
        return self._share(matches - self._hidden) if self._hidden else matches


class TopicPatterns:
    """Topics of `cache`, by name and by pattern."""

    def __init__(self, cache: TopicCache, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._cache = cache
        self._version = -1
        self.bytes_max = bytes_max
        self._matches: RecentCache[str, frozenset[str]] = RecentCache(bytes_max)
        self._visible: WeakValueDictionary[int, frozenset[str]] = WeakValueDictionary()
        """Hash → visible matches that a group holds: many groups have the same ones."""

    @property
    def used_bytes(self) -> int:
        return self._matches.weight

    async def topics_view(self, patterns: Callable[[], set[str]], may: Callable[[str], bool]) -> TopicView:
        """Return the current topics.

        Raises InvalidError for an invalid pattern, UnavailableError if topics change faster than they can be matched.
        """
        version = -1
        known: dict[str, frozenset[str]] = {}  # the cache may have no room for all of them
        for _ in range(TRIES_MAX):
            self._follow_version()
            if version != self._version:
                version, known = self._version, {}
            wanted = patterns()
            for pattern in wanted - known.keys():
                matches = self._matches.get(pattern)
                if matches is not None:
                    known[pattern] = matches
            missing = wanted - known.keys()
            if not missing:
                return TopicView(self._cache, {pattern: known[pattern] for pattern in wanted}, may, self._share)
            names = [row.name for row in self._cache.rows()]
            found, error = await asyncio.to_thread(match_patterns, missing, names)
            if error is not None:
                raise error
            self._follow_version()
            if version == self._version:
                known |= found
                for pattern, matches in found.items():
                    size = PATTERN_BYTES + sys.getsizeof(pattern) + sys.getsizeof(matches)
                    self._matches.put(pattern, matches, size)
        raise UnavailableError("topics change too fast for their names to be matched.")

    def _share(self, names: frozenset[str]) -> frozenset[str]:
        same = self._visible.get(hash(names))
        if same == names:
            return same
        self._visible[hash(names)] = names
        return names

    def _follow_version(self) -> None:
        if self._version != self._cache.version:
            self._version = self._cache.version
            self._matches.clear()


def match_patterns(patterns: set[str], names: list[str]) -> tuple[dict[str, frozenset[str]], InvalidError | None]:
    """Return the names that each pattern matches as a whole; to be run in a thread. The names are those given, not
    copies.

    Invalid patterns are left out, and the error of one of them is returned.
    """
    column = pa.array(names, pa.string())
    found: dict[str, frozenset[str]] = {}
    error: InvalidError | None = None
    for pattern in patterns:
        try:
            if len(pattern) > PATTERN_CHARS:
                raise pa.ArrowInvalid(f"longer than {PATTERN_CHARS} characters")
            # Alone first: a pattern that closes a bracket which it did not open would be valid inside our group.
            pc.match_substring_regex(pa.array(VALIDATION_TEXT), pattern)
            is_match = pc.match_substring_regex(column, rf"\A(?:{pattern})\z")
        except pa.ArrowInvalid as refused:
            error = InvalidError(f"invalid RE2 regular expression: pattern={pattern[:100]!r} cause={refused}.")
        else:
            found[pattern] = frozenset(compress(names, is_match.to_pylist()))
    return found, error
