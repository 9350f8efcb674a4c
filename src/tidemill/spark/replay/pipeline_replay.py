"""Replay of a pipeline's dead letters: every table that reads a letter's topic, then the letter is removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec.structs import replace

from tidemill.base.errors import MissingError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.spark.decode.dead_letter_rows import Place
from tidemill.spark.definition import Pipeline
from tidemill.spark.ingest.feed import feed_of
from tidemill.spark.ingest.sources import SourceNotReadyError, TopicFeed
from tidemill.spark.replay.table_replay import FINAL, UNKNOWN, WAITING, Outcome, TableReplay
from tidemill.spark.stored_letters import StoredLetters
from tidemill.spark.stores import Stores

_Reader = tuple[str, str, TopicFeed]
"""(table, source of its bindings, feed)."""

LETTERS_AT_ONCE = 5_000
"""Letters of one topic that are replayed by one append. Memory holds their rows."""


def replay_pipeline(
    portal: BlockingPortal, stores: Stores, pipeline: Pipeline, *, dry: bool = False
) -> Iterator[list[Outcome]]:
    """Replay all dead letters of a pipeline, with its present declarations; yield the outcomes as they become final.

    A letter is removed once every table that reads its topic has its record, or is right without it. `dry`: change
    nothing. Raises InvalidError (a table has another schema than the file), UnavailableError, UnknownOutcomeError; run
    again: letters that were removed are done, and the others change nothing that is done.
    """
    try:
        shard = portal.call(stores.shard(pipeline.dead_letters))
    except MissingError:
        return
    try:
        letters = StoredLetters(portal, shard, stores.rand)
        feeds, waiting = _feeds_by_topic(portal, stores, pipeline)
        by_topic = sorted(letters.read(), key=lambda letter: (letter.place.topic, letter.order))
        for topic, found in groupby(by_topic, key=lambda letter: letter.place.topic):
            every = list(found)
            if topic not in feeds:
                outcome = WAITING if waiting else UNKNOWN
                yield [Outcome("", x.place, outcome, waiting or "no table reads the topic any more") for x in every]
                continue
            for at in range(0, len(every), LETTERS_AT_ONCE):
                some = every[at : at + LETTERS_AT_ONCE]
                outcomes = [
                    outcome
                    for name, source, feed in feeds[topic]
                    for outcome in TableReplay(portal, stores, name, source, feed, dry=dry).run(some, every)
                ]
                if not dry:
                    letters.remove(_done(outcomes, len(feeds[topic])))
                yield outcomes
    finally:
        portal.call(shard.aclose())


def _done(outcomes: Sequence[Outcome], tables: int) -> set[Place]:
    """Return the places of letters that are done in each of the `tables`."""
    final = Counter(outcome.place for outcome in outcomes if outcome.outcome in FINAL)
    return {place for place, count in final.items() if count == tables}


def _feeds_by_topic(portal: BlockingPortal, stores: Stores, pipeline: Pipeline) -> tuple[dict[str, list[_Reader]], str]:
    """Return topic → the tables that read it, and why some tables have no feed yet."""
    feeds: dict[str, list[_Reader]] = {}
    waiting = ""
    for name, source in sorted(pipeline.tables.items()):
        try:
            feed = portal.call(feed_of(stores.catalogue, source))
        except SourceNotReadyError as error:
            waiting = waiting or error.reason
            continue
        except MissingError as error:  # a captured table that does not exist: no topic, so no letters
            waiting = waiting or error.message
            continue
        feed = replace(feed, expectations=pipeline.expectations.get(name))
        feeds.setdefault(feed.topic, []).append((name, source.source, feed))
    return feeds, waiting
