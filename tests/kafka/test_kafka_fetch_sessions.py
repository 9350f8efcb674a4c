"""Fetch sessions over the wire: KIP-227 at every version, isolation between clients, and limits on the number of
sessions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from support.kafka.harness import RealBroker
from support.kafka.raw import RawClient, batch, produce_body
from support.kafka.session_reader import Answer, Fetcher, Place
from support.waiting import eventually
from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings, error_codes
from tidemill.kafka.fetch_sessions import sessions as sessions_module
from tidemill.kafka.handlers import APIS
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import NotLeaderError

VERSIONS = range(7, APIS[1].max_version + 1)


@pytest.fixture(scope="module")
def shared() -> Iterator[RealBroker]:
    broker = RealBroker()
    yield broker
    broker.close()


class World:
    """A broker's topic and a raw writer to it."""

    def __init__(self, broker: RealBroker, name: str, partitions: int = 3) -> None:
        self.broker = broker
        self.row: TopicRow = broker.create_topic(name, partitions)
        self._writer = RawClient(broker.port)
        self._writer.ask(3, 1, b"\xff\xff\xff\xff")

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.sock.close()

    def produce(self, partition: int, *values: bytes) -> None:
        answer = self._writer.ask(0, 8, produce_body(self.row.name, [(partition, batch(list(values or (b"v",))))]))
        assert int(answer.responses[0].partition_responses[0].error_code) == 0

    def places(self, *offsets: int) -> dict[Place, int]:
        return {(self.row.name, partition): offset for partition, offset in enumerate(offsets)}

    def place(self, partition: int) -> Place:
        return (self.row.name, partition)

    def fetcher(self, version: int = 13) -> Fetcher:
        return Fetcher(self.broker.port, [self.row], version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_session_is_told_what_changed_and_nothing_else(shared: RealBroker, version: int) -> None:
    with World(shared, f"changes-{version}") as world, world.fetcher(version) as reader:
        world.produce(1, b"a", b"b")
        first = reader.fetch(world.places(0, 0, 0), epoch=0)
        assert first.code == 0 and first.session_id > 0
        assert set(first.reported) == set(world.places(0, 0, 0))
        assert first.reported[world.place(1)].batches == ((0, 2),)
        session = {"session_id": first.session_id}
        again = reader.fetch({}, **session, epoch=1)
        assert set(again.reported) == {world.place(1)}, "it is given until its reader goes on"
        gone_on = reader.fetch({world.place(1): 2}, **session, epoch=2)
        assert (gone_on.code, gone_on.session_id, gone_on.reported) == (0, first.session_id, {})
        world.produce(2, b"c")
        assert set(reader.fetch({}, **session, epoch=3).reported) == {world.place(2)}
        nothing = reader.fetch({}, **session, epoch=4, forgotten=(world.place(2),))
        assert nothing.reported == {}
        world.produce(2, b"d")
        assert reader.fetch({}, **session, epoch=5).reported == {}
        back = reader.fetch({world.place(2): 1}, **session, epoch=6)
        assert back.reported[world.place(2)].batches == ((1, 1),)


@pytest.mark.parametrize("version", [7, 12, 13, 17])
def test_errors_of_sessions_are_kafkas(shared: RealBroker, version: int) -> None:
    with World(shared, f"errors-{version}") as world, world.fetcher(version) as reader:
        unknown = reader.fetch({}, session_id=12345, epoch=1)
        assert (unknown.code, unknown.session_id) == (error_codes.FETCH_SESSION_ID_NOT_FOUND, 0)
        assert reader.fetch({}, session_id=0, epoch=7).code == error_codes.FETCH_SESSION_ID_NOT_FOUND
        session_id = reader.fetch(world.places(0, 0), epoch=0).session_id
        assert reader.fetch({}, session_id=session_id, epoch=2).code == error_codes.INVALID_FETCH_SESSION_EPOCH
        assert reader.fetch({}, session_id=session_id, epoch=1).code == 0
        assert reader.fetch({}, session_id=session_id, epoch=1).code == error_codes.INVALID_FETCH_SESSION_EPOCH
        other = 12 if version >= 13 else 13
        with world.fetcher(other) as mixed:
            assert mixed.fetch({}, session_id=session_id, epoch=2).code == error_codes.FETCH_SESSION_TOPIC_ID_ERROR
        ended = reader.fetch(world.places(0, 0), session_id=session_id, epoch=-1)
        assert (ended.code, ended.session_id, len(ended.reported)) == (0, 0, 2)
        assert reader.fetch({}, session_id=session_id, epoch=2).code == error_codes.FETCH_SESSION_ID_NOT_FOUND
        first = reader.fetch(world.places(0, 0), epoch=0)
        second = reader.fetch(world.places(0, 0), session_id=first.session_id, epoch=0)
        assert second.session_id not in (0, first.session_id)
        assert reader.fetch({}, session_id=first.session_id, epoch=1).code == error_codes.FETCH_SESSION_ID_NOT_FOUND


def test_a_session_without_partitions_ends(shared: RealBroker) -> None:
    with World(shared, "emptied") as world, world.fetcher() as reader:
        assert reader.fetch({}, epoch=0).session_id == 0
        session_id = reader.fetch(world.places(0, 0), epoch=0).session_id
        emptied = reader.fetch({}, session_id=session_id, epoch=1, forgotten=tuple(world.places(0, 0)))
        assert (emptied.code, emptied.session_id, emptied.reported) == (0, 0, {})
        assert reader.fetch({}, session_id=session_id, epoch=2).code == error_codes.FETCH_SESSION_ID_NOT_FOUND


def test_the_epoch_begins_again_at_one_after_the_last(shared: RealBroker) -> None:
    with World(shared, "wrapped") as world, world.fetcher() as reader:
        session_id = reader.fetch(world.places(0), epoch=0).session_id
        server = shared.server
        sessions_of(server)._sessions[session_id].epoch = sessions_module.EPOCH_MAX
        assert reader.fetch({}, session_id=session_id, epoch=sessions_module.EPOCH_MAX).code == 0
        assert reader.fetch({}, session_id=session_id, epoch=1).code == 0


def test_a_long_poll_of_a_session_ends_when_one_of_its_partitions_moves(shared: RealBroker) -> None:
    with World(shared, "awaited") as world, world.fetcher() as reader:
        session_id = reader.fetch(world.places(0, 0, 0), epoch=0).session_id
        reader.client.send(1, 13, 7, reader.body({}, session_id=session_id, epoch=1, max_wait_ms=60_000))
        world.produce(2, b"x")
        answer = receive(reader)
        assert answer.order == [world.place(2)] and answer.reported[world.place(2)].batches == ((0, 1),)


def test_a_session_has_one_request_at_a_time_and_who_gave_one_up_begins_anew(shared: RealBroker) -> None:
    with World(shared, "impatient") as world, world.fetcher() as waits, world.fetcher() as again:
        session_id = waits.fetch(world.places(0, 0), epoch=0).session_id
        waits.client.send(1, 13, 7, waits.body({}, session_id=session_id, epoch=1, max_wait_ms=60_000))
        session = sessions_of(shared.server)._sessions[session_id]
        eventually(lambda: session.busy)
        assert again.fetch({}, session_id=session_id, epoch=2).code == error_codes.INVALID_FETCH_SESSION_EPOCH
        anew = again.fetch(world.places(0, 0), session_id=session_id, epoch=0)
        assert anew.session_id not in (0, session_id)
        assert receive(waits).code == error_codes.FETCH_SESSION_ID_NOT_FOUND, "its wait ends"
        again.client.send(1, 13, 7, again.body({}, session_id=anew.session_id, epoch=1, max_wait_ms=60_000))
        kept = sessions_of(shared.server)._sessions[anew.session_id]
        eventually(lambda: kept.busy)
    eventually(lambda: not kept.busy)
    with world.fetcher() as later:
        assert later.fetch({}, session_id=anew.session_id, epoch=2).code == 0, "its client came by another connection"


def test_a_session_outlives_its_connection_and_is_nobody_elses(shared: RealBroker) -> None:
    with World(shared, "kept") as world:
        with world.fetcher() as reader:
            session_id = reader.fetch(world.places(0, 0, 0), epoch=0).session_id
        with world.fetcher() as again:
            assert again.fetch({}, session_id=session_id, epoch=1).code == 0
        sessions = sessions_of(shared.server)
        for principal, host in (("User:mallory", "127.0.0.1"), ("User:ANONYMOUS", "10.0.0.9")):
            found = sessions.find(session_id, 2, principal=principal, host=host, by_id=True)
            assert found == error_codes.FETCH_SESSION_ID_NOT_FOUND
            sessions.close_by_id(session_id, principal=principal, host=host)
        with world.fetcher() as again:
            assert again.fetch({}, session_id=session_id, epoch=2).code == 0


def test_offsets_that_changed_are_told_and_end_no_wait(shared: RealBroker) -> None:
    with World(shared, "starts") as world, world.fetcher() as reader:
        world.produce(0, b"a", b"b")
        session_id = reader.fetch(world.places(2, 0), epoch=0).session_id
        assert reader.fetch({}, session_id=session_id, epoch=1).reported == {}
        shared.portal.call(shared.topics.delete_records(world.row.topic_id, 0, 1))
        reported = reader.fetch({}, session_id=session_id, epoch=2).reported
        assert set(reported) == {world.place(0)} and reported[world.place(0)].log_start == 1
        assert reader.fetch({}, session_id=session_id, epoch=3).reported == {}


def test_what_fails_is_told_every_time_until_it_does_not(shared: RealBroker) -> None:
    with World(shared, "failing") as world, world.fetcher(12) as reader:
        places = world.places(0, 9) | {("not-there-yet", 0): 0}
        session_id = reader.fetch(places, epoch=0).session_id
        for epoch in (1, 2):
            reported = reader.fetch({}, session_id=session_id, epoch=epoch).reported
            assert reported[world.place(1)].code == error_codes.OFFSET_OUT_OF_RANGE
            assert reported["not-there-yet", 0].code != 0
            assert len(reported) == 2
        shared.create_topic("not-there-yet", 1)
        epoch = 3
        until = time.monotonic() + 40
        while True:
            reported = reader.fetch({world.place(1): 0}, session_id=session_id, epoch=epoch).reported
            epoch += 1
            if not any(each.code for each in reported.values()):
                break
            assert time.monotonic() < until
        assert reader.fetch({}, session_id=session_id, epoch=epoch).reported == {}
        beyond = reader.fetch({world.place(1): 9}, session_id=session_id, epoch=epoch + 1)
        assert beyond.reported[world.place(1)].code == error_codes.OFFSET_OUT_OF_RANGE
        healed = reader.fetch({world.place(1): 0}, session_id=session_id, epoch=epoch + 2)
        assert healed.reported[world.place(1)].code == 0, "that it is well again is a change"


def test_a_partition_that_is_led_anew_is_followed_on(shared: RealBroker) -> None:
    with World(shared, "moved") as world, world.fetcher() as reader:
        world.produce(0, b"a")
        session_id = reader.fetch(world.places(1, 0), epoch=0).session_id
        assert reader.fetch({}, session_id=session_id, epoch=1).reported == {}

        async def moved() -> None:
            shared.topics._led[world.row.topic_id, 0].close(NotLeaderError("moved by this test."))

        shared.portal.call(moved())
        assert reader.fetch({}, session_id=session_id, epoch=2).reported == {}
        world.produce(0, b"b")
        assert reader.fetch({}, session_id=session_id, epoch=3).reported[world.place(0)].batches == ((1, 1),)


def test_a_topic_that_is_made_anew_under_its_name_is_another(shared: RealBroker) -> None:
    with World(shared, "anew") as world, world.fetcher(12) as reader:
        world.produce(0, b"a")
        session_id = reader.fetch(world.places(1), epoch=0).session_id
        shared.portal.call(shared.catalogue.delete(TopicRow, "anew"))
        shared.portal.call(shared.topics.refresh())
        shared.create_topic("anew", 3)
        epoch, until = 1, time.monotonic() + 40
        while True:
            reported = reader.fetch({world.place(0): 0}, session_id=session_id, epoch=epoch).reported
            epoch += 1
            if world.place(0) in reported and reported[world.place(0)].code == 0:
                break
            assert time.monotonic() < until
        assert reported[world.place(0)].high_watermark == 0
        world.produce(0, b"new")
        assert reader.fetch({}, session_id=session_id, epoch=epoch).reported[world.place(0)].batches == ((0, 1),)


def test_who_answered_waits_for_the_others(shared: RealBroker) -> None:
    with World(shared, "fair", 4) as world, world.fetcher() as reader:
        value = bytes(3000)
        for partition in range(4):
            for _ in range(4):
                world.produce(partition, value)
        how = {"max_bytes": 4000, "partition_bytes": 4000}
        first = reader.fetch(world.places(0, 0, 0, 0), epoch=0, **how)
        given = [next(place for place, each in first.reported.items() if each.batches)]
        at = dict.fromkeys(world.places(0, 0, 0, 0), 0)
        for epoch in range(1, 12):
            at[given[-1]] += 1
            answer = reader.fetch({given[-1]: at[given[-1]]}, session_id=first.session_id, epoch=epoch, **how)
            (place,) = (place for place, each in answer.reported.items() if each.batches)
            given.append(place)
        assert [given.count(world.place(partition)) for partition in range(4)] == [3, 3, 3, 3]
        assert all(len(set(given[at : at + 4])) == 4 for at in (0, 4, 8))


def test_f214_sessions_have_slots_and_room_and_make_way_when_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    room = sessions_module.SESSION_BYTES * 3 + sessions_module.PARTITION_BYTES * 12
    broker = RealBroker(settings=KafkaSettings(KafkaSection(fetch_sessions_max=2), fetch_sessions_bytes_max=room))
    try:
        with World(broker, "t", 40) as world, world.fetcher() as reader:
            sessions = sessions_of(broker.server)

            def begin(count: int) -> int:
                return reader.fetch(world.places(*[0] * count), epoch=0).session_id

            two, three = begin(2), begin(3)
            assert two and three and begin(3) == 0, "no slot, and nobody is old"
            assert reader.fetch(world.places(*[0] * 40), epoch=0).reported.keys() == world.places(*[0] * 40).keys()
            monkeypatch.setattr(sessions_module, "EVICT_AFTER_S", 0.0)
            sessions._sessions[two].used_s -= 1.0
            five = begin(5)
            assert five and reader.fetch({}, session_id=two, epoch=1).code == error_codes.FETCH_SESSION_ID_NOT_FOUND
            assert reader.fetch({}, session_id=three, epoch=1).code == 0
            monkeypatch.setattr(sessions_module, "EVICT_AFTER_S", 60.0)
            sessions._sessions[three].began_s -= 61.0
            assert begin(2) == 0, "it is smaller than what it would replace"
            six = begin(6)
            assert six and reader.fetch({}, session_id=three, epoch=2).code == error_codes.FETCH_SESSION_ID_NOT_FOUND
            used = sessions.used_bytes
            grown = reader.fetch(world.places(*[0] * 40), session_id=six, epoch=1)
            assert grown.code == error_codes.FETCH_SESSION_ID_NOT_FOUND and sessions.used_bytes < used <= room
            assert reader.fetch({}, session_id=five, epoch=1).code == 0
            assert reader.fetch({}, session_id=five, epoch=-1).code == 0
            assert (len(sessions), sessions.used_bytes) == (0, 0)
            assert eventually(lambda: all(not len(led.watchers) for led in broker.topics._led.values()))
    finally:
        broker.close()


def test_a_session_that_makes_way_during_its_fetch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = RealBroker(settings=KafkaSettings(KafkaSection(fetch_sessions_max=1)))
    try:
        with World(broker, "t") as world, world.fetcher() as waits, world.fetcher() as comes:
            session_id = waits.fetch(world.places(0), epoch=0).session_id
            waits.client.send(1, 13, 7, waits.body({}, session_id=session_id, epoch=1, max_wait_ms=60_000))
            session = sessions_of(broker.server)._sessions[session_id]
            eventually(lambda: session.epoch == 2)
            monkeypatch.setattr(sessions_module, "EVICT_AFTER_S", 0.0)
            session.used_s -= 1.0
            assert comes.fetch(world.places(0, 0), epoch=0).session_id > 0
            assert receive(waits).code == error_codes.FETCH_SESSION_ID_NOT_FOUND
    finally:
        broker.close()


def receive(reader: Fetcher) -> Answer:
    from support.kafka.raw import decode

    _, data = reader.client.receive()
    return reader.read(decode(1, reader.version, data))


def sessions_of(server: object) -> sessions_module.FetchSessions:
    found = server.fetch_sessions  # type: ignore[attr-defined]
    assert isinstance(found, sessions_module.FetchSessions)
    return found
