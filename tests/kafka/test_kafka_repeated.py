"""Repeated fetches without a session: the answer always equals that of a connection without earlier requests."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.kafka.harness import RealBroker
from support.kafka.raw import RawClient, batch, decode, produce_body
from support.kafka.session_reader import Fetcher, Place, body_of
from support.waiting import eventually
from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings
from tidemill.kafka.fetch_sessions import implicit as repeated_module
from tidemill.kafka.fetch_sessions.request_diff import RequestDiff
from tidemill.kafka.handlers import APIS, k01_fetch
from tidemill.kafka.schema import fetch as schema
from tidemill.kafka.schema.primitives import MalformedFrameError
from tidemill.metastore.catalogue import TopicRow

MIN = repeated_module.PARTITIONS_MIN
VERSIONS = [4, 5, 9, 11, 12, 13, 17]


class World:
    def __init__(self, settings: KafkaSettings | None = None) -> None:
        self.broker = RealBroker(settings=settings)
        self.rows: list[TopicRow] = [self.broker.create_topic(f"t{number}", MIN // 2) for number in range(3)]
        self.places: list[Place] = [(row.name, partition) for row in self.rows for partition in range(row.partitions)]
        self._writer = RawClient(self.broker.port)
        self._writer.ask(3, 1, b"\xff\xff\xff\xff")

    def produce(self, place: Place) -> None:
        answer = self._writer.ask(0, 8, produce_body(place[0], [(place[1], batch([b"v" * 50]))]))
        assert int(answer.responses[0].partition_responses[0].error_code) == 0

    @property
    def kept(self) -> int:
        assert self.broker.server is not None
        return len(self.broker.server.fetch_sessions)

    def fetcher(self, version: int) -> Fetcher:
        return Fetcher(self.broker.port, self.rows, version)

    def close(self) -> None:
        self._writer.sock.close()
        self.broker.close()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def bytes_of(reader: Fetcher, asked: dict[Place, int], **how: object) -> bytes:
    reader.client.send(1, reader.version, 7, reader.body(asked, **how))  # type: ignore[arg-type]
    return reader.client.receive()[1]


moves = st.lists(
    st.tuples(
        st.sampled_from(["produce", "to", "to", "beyond", "leave", "come", "less", "turn", "turn"]),
        st.integers(0, 10_000),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(VERSIONS), st.lists(moves, min_size=1, max_size=8), st.booleans())
def test_the_answer_is_that_of_a_connection_that_never_asked(
    world: World, version: int, rounds: list[list[tuple[str, int]]], committed: bool
) -> None:
    asked = dict.fromkeys(world.places, 0)
    how: dict[str, object] = {"committed": committed}
    turned = False
    with world.fetcher(version) as reader:
        for steps in rounds:
            for what, number in steps:
                place = world.places[number % len(world.places)]
                if what == "produce":
                    world.produce(place)
                elif what == "leave" and len(asked) > 1:
                    asked.pop(place, None)
                elif what == "less":
                    how["partition_bytes"] = 1 << 10 if number % 2 else 1 << 20
                elif what == "turn":
                    items = list(asked.items())
                    at = number % len(items)
                    asked, turned = dict(items[at:] + items[:at]), True
                elif what in ("to", "come"):
                    asked[place] = number % 3
                elif what == "beyond" and place in asked:
                    asked[place] = 1_000
            got = bytes_of(reader, asked, **how)
            with world.fetcher(version) as other:
                expected = bytes_of(other, asked, **how)
            assert got == expected or turned
            assert reader.read(decode(1, version, got)).reported == reader.read(decode(1, version, expected)).reported
    eventually(lambda: world.kept == 0)


def test_a_repeated_fetch_is_not_read_again_and_ends_when_one_of_its_partitions_moves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = k01_fetch.decode

    def counted(*given: object) -> object:
        read.append(1)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(k01_fetch, "decode", counted)
    with world.fetcher(12) as reader:
        first = reader.fetch(dict.fromkeys(world.places, 0))
        asked = {place: reported.high_watermark for place, reported in first.reported.items()}
        reader.fetch(asked)
        assert read == [1] and world.kept == 1, "its offsets alone are others"
        items = list(asked.items())
        for turned in (1, 40, 0):
            reader.fetch(dict(items[turned:] + items[:turned]))
        assert read == [1], "whatever it begins with"
        body = reader.body(asked, max_wait_ms=60_000)
        reader.client.send(1, 12, 7, body)
        reader.client.send(1, 12, 8, body)
        eventually(lambda: len(read) == 3)
        world.produce(world.places[70])
        answers = []
        for number in (7, 8):
            got, data = reader.client.receive()
            assert got == number
            answers.append(reader.read(decode(1, 12, data)))
        for answer in answers:
            assert [place for place, reported in answer.reported.items() if reported.batches] == [world.places[70]]
            assert len(answer.reported) == len(world.places)
        assert world.kept == 1, "of two at once one is kept"
    eventually(lambda: world.kept == 0)


def test_an_entry_that_names_another_partition_is_another_request(world: World) -> None:
    with world.fetcher(11) as reader:
        asked = dict.fromkeys(world.places, 0)
        body = bytearray(reader.body(asked))
        reader.client.ask(1, 11, bytes(body))
        at = body.index(struct.pack(">i", 5) + struct.pack(">iq", -1, 0))
        body[at : at + 4] = struct.pack(">i", 4_000)
        answer = reader.read(reader.client.ask(1, 11, bytes(body)))
        assert [reported.code for (_, partition), reported in answer.reported.items() if partition == 4_000] != [0]
        assert len(answer.reported) == len(world.places)


def test_a_client_that_is_gone_while_it_waits_leaves_nothing(world: World) -> None:
    with world.fetcher(12) as reader:
        first = reader.fetch(dict.fromkeys(world.places, 0))
        asked = {place: reported.high_watermark for place, reported in first.reported.items()}
        reader.client.send(1, 12, 7, reader.body(asked, max_wait_ms=60_000))
        reader.client.send(1, 12, 8, reader.body(asked, max_wait_ms=60_000))
        leds = world.broker.topics._led.values()
        eventually(lambda: all(len(led.watchers) == 2 for led in leds))
    eventually(lambda: world.kept == 0 and not any(len(led.watchers) for led in leds))


def test_without_room_everything_is_read_each_time() -> None:
    world = World(KafkaSettings(KafkaSection(fetch_sessions_max=0)))
    try:
        with world.fetcher(12) as reader:
            for _ in range(3):
                assert len(reader.fetch(dict.fromkeys(world.places, 0)).reported) == len(world.places)
                assert world.kept == 0
            assert reader.fetch(dict.fromkeys(world.places, 0), epoch=0).session_id == 0
    finally:
        world.close()


NAMES = ("a", "bb", "ccc")
IDS = {name: uuid.UUID(int=number + 1) for number, name in enumerate(NAMES)}
all_places = [(name, partition) for name in NAMES for partition in range(5)]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(VERSIONS), st.data())
def test_what_is_taken_for_a_repetition_is_one(version: int, data: st.DataObject) -> None:
    """The reported changes, applied to the previous partitions, equal a full parse of arbitrary request bytes."""

    def read(body: bytes) -> dict[Place, schema.FetchPartition] | None:
        try:
            topics = schema.decode(memoryview(body), 0, version).topics
        except MalformedFrameError:
            return None
        pairs = [((topic.topic, each.partition), each) for topic in topics for each in topic.partitions]
        return dict(pairs) if len(dict(pairs)) == len(pairs) else None

    def drawn() -> bytes:
        order = data.draw(st.permutations(all_places)) if data.draw(st.booleans()) else all_places
        at = data.draw(st.integers(0, len(order)))
        offsets = {place: data.draw(st.integers(0, 2)) for place in order[at:] + order[:at]}
        offsets = offsets if data.draw(st.booleans()) else dict.fromkeys(offsets, 0)
        return body_of(version, IDS, offsets)

    body = drawn()
    known = read(body)
    asked = RequestDiff.from_body(body, version, schema.decode(memoryview(body), 0, version).topics)
    assert asked is not None and known is not None
    was_broken = False
    for _ in range(data.draw(st.integers(1, 4))):
        broken = data.draw(st.integers(0, 3)) == 0
        was_broken = was_broken or broken
        body = drawn()
        if broken:
            at = data.draw(st.integers(0, len(body) - 1))
            body = body[:at] + data.draw(st.binary(max_size=3)) + body[at + data.draw(st.integers(0, 3)) :]
        changes = asked.changed_topics(body, version)
        if changes is None:
            assert broken
            return
        for topic in changes:
            for each in topic.partitions:
                # Broken bytes may differ in fields that this broker ignores: an epoch, a broker's id.
                assert was_broken or known[topic.topic, each.partition] != each
                known[topic.topic, each.partition] = each
        assert read(body) == known


partition_answers = st.builds(
    schema.PartitionRecords,
    st.just(0),
    st.sampled_from([0, 1, 3]),
    st.integers(-1, 9),
    st.integers(-1, 9),
    st.lists(st.sampled_from([b"ab", b"c" * 200]), max_size=2),
    st.integers(-1, 9),
    st.one_of(st.none(), st.just(()), st.just(((1, 2),))),
)


@given(
    st.integers(4, APIS[1].max_version),
    st.lists(st.dictionaries(st.integers(0, 5), partition_answers), max_size=4),
)
def test_what_was_filled_in_is_what_would_be_written_of_all(
    version: int, rounds: list[dict[int, schema.PartitionRecords]]
) -> None:
    ids = [f"00000000-0000-0000-0000-00000000000{n}" if version >= 13 else f"t{n}" for n in range(2)]
    topics = [(topic, [3 * number, 3 * number + 1, 3 * number + 2]) for number, topic in enumerate(ids)]
    blank = schema.FetchAnswerTemplate(topics, version)
    known = {partition: schema.PartitionRecords(partition, 0) for _, partitions in topics for partition in partitions}
    for reported in rounds:
        reported = {partition: answer._replace(partition=partition) for partition, answer in reported.items()}
        found = [((ids[partition // 3], partition), answer) for partition, answer in reported.items()]
        expected = known | reported
        whole = [(topic, [expected[partition] for partition in partitions]) for topic, partitions in topics]
        assert b"".join(map(bytes, blank.fill(found))) == b"".join(map(bytes, schema.encode(whole, version)))
        known |= {p: answer._replace(batches=[], aborted=None) for p, answer in reported.items()}
        # The isolation level does not change between the rounds of one cached request.
        known |= {p: known[p]._replace(aborted=()) for p, answer in reported.items() if answer.aborted is not None}
