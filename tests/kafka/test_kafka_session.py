"""One connection on the wire, with raw requests: order, concurrency, back-pressure, bad input."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.kafka.fake_topics import FakeTopicLog
from support.kafka.harness import FakeBroker, RealBroker
from support.kafka.raw import RawClient, batch, decode, example, fetch_body, produce_body, request_frame
from support.waiting import eventually
from tidemill.base.clock import ManualClock, SystemClock
from tidemill.base.config.listeners import KafkaSection
from tidemill.base.errors import InvalidError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.kafka import KafkaSettings, error_codes
from tidemill.kafka.api.authorizer import RequestAuthorizer
from tidemill.kafka.api.dispatch import read_request
from tidemill.kafka.handlers import APIS, k00_produce
from tidemill.kafka.metadata.topic_cache import TopicCache
from tidemill.metastore.catalogue import TopicRow
from tidemill.objects.store import Buffer
from tidemill.security.audit import Audit
from tidemill.topics.api import NotLeaderError, ProduceResult

API_VERSIONS = 18


def sequence(i: int) -> bytes:
    return batch([b"v%d" % i], producer=(1, 0, i))


def test_responses_come_in_request_order_though_the_first_takes_longest(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1)
    with RawClient(fake_broker.port) as client:
        client.send(3, 1, 0, b"\xff\xff\xff\xff")
        client.receive()
        client.send(1, 4, 1, fetch_body("t", 0, 0, max_wait_ms=400))
        for i in range(2, 6):
            client.send(API_VERSIONS, 0, i, b"")
        assert [client.receive()[0] for _ in range(5)] == [1, 2, 3, 4, 5]


def test_requests_of_one_connection_are_worked_on_concurrently(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1)
    with RawClient(fake_broker.port) as client:
        client.send(3, 1, 0, b"\xff\xff\xff\xff")
        client.receive()
        for i in range(4):
            client.send(1, 4, i, fetch_body("t", 0, 0, max_wait_ms=700))
        assert [client.receive()[0] for _ in range(4)] == [0, 1, 2, 3]
    assert fake_broker.topics.fetching_most == fake_broker.settings.concurrent_reads_max > 1


@pytest.mark.parametrize(("connection_bytes_max", "together"), [(64 << 10, 4), (47 << 10, 2), (8 << 10, 1)])
def test_reads_that_run_together_have_room_together(connection_bytes_max: int, together: int) -> None:
    """S6: the budget counts the largest possible answers, not the sizes of earlier answers or of those of
    other APIs.
    """
    broker = FakeBroker(KafkaSettings(connection_bytes_max=connection_bytes_max, fetch_bytes_max=16 << 10))
    try:
        broker.create_topic("t", 1)
        with RawClient(broker.port) as client:
            client.send(3, 1, 0, b"\xff\xff\xff\xff")
            client.receive()
            for i in range(6):
                client.send(1, 4, i, fetch_body("t", 0, 0, max_wait_ms=100))
            assert [client.receive()[0] for _ in range(6)] == list(range(6))
        assert broker.topics.fetching_most == together
    finally:
        broker.close()


async def test_produce_reserves_every_batch_in_order_before_any_await() -> None:
    """K1: `begin` makes every reservation of the request without one turn of the loop."""
    topics = FakeTopicLog()
    cache = TopicCache(None, None)  # type: ignore[arg-type]
    cache.add(TopicRow("t", "id", 3))
    # The clock is frozen: otherwise a long request may yield between two batches on a busy machine.
    parts = {"topics": topics, "cache": cache, "pace": CoopBudget(ManualClock())}
    context: Any = type("Context", (), {**parts, "access": RequestAuthorizer(None, Audit(SystemClock()))})()
    before = len(asyncio.all_tasks())
    for first in (0, 3):
        parts = [(p, sequence(first + p)) for p in range(3)]
        frame = memoryview(request_frame(0, 3, 1, produce_body("t", parts)))[4:]
        k00_produce.begin_produce(context, read_request(frame, 0, 3, 1))
    assert topics.calls == [("id", 0, 0), ("id", 1, 1), ("id", 2, 2), ("id", 0, 3), ("id", 1, 4), ("id", 2, 5)]
    assert len(asyncio.all_tasks()) == before


def test_pipelined_produces_are_reserved_in_request_order(fake_broker: FakeBroker) -> None:
    row = fake_broker.create_topic("t", 1)
    fake_broker.topics.delay_s = 0.05
    with RawClient(fake_broker.port) as client:
        client.send(3, 1, 0, b"\xff\xff\xff\xff")
        client.receive()
        frames = [request_frame(0, 3, i, produce_body("t", [(0, sequence(i))])) for i in range(40)]
        client.sock.sendall(b"".join(frames))
        assert [client.receive()[0] for _ in range(40)] == list(range(40))
    assert fake_broker.topics.calls == [(row.topic_id, 0, i) for i in range(40)]


def test_nothing_overtakes_a_produce_whose_topic_must_be_looked_up(fake_broker: FakeBroker) -> None:
    """A temporary refusal of the first request would let the pipelined ones overtake it."""
    row = fake_broker.create_topic("t", 1)
    with RawClient(fake_broker.port) as client:
        frames = [request_frame(0, 3, i, produce_body("t", [(0, sequence(i))])) for i in range(5)]
        client.sock.sendall(b"".join(frames))
        answers = [client.receive() for _ in range(5)]
    assert [correlation_id for correlation_id, _ in answers] == list(range(5))
    codes = [int(decode(0, 3, data).responses[0].partition_responses[0].error_code) for _, data in answers]
    assert codes == [0] * 5
    assert fake_broker.topics.calls == [(row.topic_id, 0, i) for i in range(5)]


def test_a_connection_that_stalls_too_long_is_closed_and_has_reserved_nothing() -> None:
    broker = FakeBroker(KafkaSettings(stall_timeout_s=0.5, topics_refresh_s=0.1))
    try:
        broker.create_topic("t", 1)
        broker.consensus.down = True
        with RawClient(broker.port) as client:
            for i in range(3):
                client.send(0, 3, i, produce_body("t", [(0, sequence(i))]))
            assert client.is_closed()
        assert broker.topics.calls == []
        broker.consensus.down = False
        with RawClient(broker.port) as client:
            client.send(0, 3, 0, produce_body("t", [(0, sequence(0))]))
            assert client.receive()[0] == 0
    finally:
        broker.close()


def test_what_is_asked_behind_a_change_without_waiting_for_it_sees_it(broker: RealBroker) -> None:
    broker.create_topic("t", 1)
    name = struct.pack(">h", 1) + b"t"
    delete = struct.pack(">i", 1) + name + struct.pack(">iiqi", 1, 0, 2, 10_000)
    earliest = struct.pack(">ii", -1, 1) + name + struct.pack(">iiq", 1, 0, -2)
    with RawClient(broker.port) as client:
        client.ask(0, 7, produce_body("t", [(0, batch([b"a", b"b", b"c"]))]))
        client.sock.sendall(request_frame(21, 1, 1, delete) + request_frame(2, 1, 2, earliest))
        assert client.receive()[0] == 1
        number, answer = client.receive()
        assert number == 2
        (topic,) = decode(2, 1, answer).topics
        assert [int(p.offset) for p in topic.partitions] == [2]


def test_acks_zero_gets_no_response_and_the_next_request_does() -> None:
    broker = GatedBroker()
    try:
        broker.create_topic("t", 1)
        with RawClient(broker.port) as client:
            client.send(3, 1, 0, b"\xff\xff\xff\xff")
            client.receive()
            client.send(0, 3, 1, produce_body("t", [(0, sequence(0))], acks=0))
            client.send(API_VERSIONS, 0, 2, b"")
            assert client.receive()[0] == 2
            assert broker.waiting == 1, "it is not stored yet"
            broker.open_gate()
            client.send(API_VERSIONS, 0, 3, b"")
            assert client.receive()[0] == 3
    finally:
        broker.close()


def test_a_failed_acks_zero_closes_the_connection(fake_broker: FakeBroker) -> None:
    with RawClient(fake_broker.port) as client:
        client.send(0, 3, 1, produce_body("missing", [(0, sequence(0))], acks=0))
        assert client.is_closed()


BAD_FRAMES = {
    "negative size": struct.pack(">i", -5) + b"x" * 20,
    "huge size": struct.pack(">i", 0x7FFFFFFF) + b"x" * 20,
    "zero size": struct.pack(">i", 0) * 3,
    "an http request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(30),
    "shorter than a header": struct.pack(">i", 3) + b"abc",
    "unknown api": request_frame(3, 1, 1, b"").replace(b"\x00\x03\x00\x01", b"\x7f\x03\x00\x01", 1),
    "version too high": struct.pack(">ihhih", 10, 3, 99, 1, -1),
    "produce below 3": struct.pack(">ihhih", 10, 0, 2, 1, -1),
    "client id past the end": struct.pack(">ihhih", 10, 3, 1, 1, 500),
    "body cut short": request_frame(3, 1, 1, b"\x00\x00\x00\x05"),
    "group api not offered": struct.pack(">ihhih", 10, 11, 5, 1, -1),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_bad_frame_costs_one_connection_and_one_log_line(fake_broker: FakeBroker, name: str) -> None:
    with structlog.testing.capture_logs() as logs, RawClient(fake_broker.port) as other:
        with RawClient(fake_broker.port) as client:
            client.sock.sendall(BAD_FRAMES[name])
            assert client.is_closed()
        assert other.ask(API_VERSIONS, 0, b"").error_code == 0
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("kafka.bad_frame", "warning")]


def test_an_unknown_version_of_api_versions_is_answered_in_version_0_with_the_ranges(fake_broker: FakeBroker) -> None:
    with RawClient(fake_broker.port) as client:
        client.sock.sendall(struct.pack(">ihhih", 14, API_VERSIONS, 77, 9, -1) + b"\xffjnk")
        correlation_id, data = client.receive()
        assert correlation_id == 9
        code, count = struct.unpack_from(">hi", data)
        assert code == error_codes.UNSUPPORTED_VERSION
        ranges = {k: (lo, hi) for k, lo, hi in struct.iter_unpack(">hhh", data[6:])}
        assert count == len(ranges) == len(APIS)
        assert ranges[0] == (0, 13)
        assert client.ask(API_VERSIONS, 3, b"\x01\x01\x00").error_code == 0


class Gated(FakeTopicLog):
    """A topic log whose futures complete when the gate opens. It reads the batch only then, as an upload would."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.waiting: list[tuple[asyncio.Future[ProduceResult], str, int, Buffer]] = []

    def produce_nowait(
        self, topic_id: str, partition: int, batch: Buffer, *, sender: object = None, **_: Any
    ) -> asyncio.Future[ProduceResult]:
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        self.waiting.append((future, topic_id, partition, batch))
        return future

    async def open(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future, topic_id, partition, held in waiting:
            future.set_result(self._store(topic_id, partition, bytes(held)))


class GatedBroker(FakeBroker):
    async def _make_topics(self, delay_s: float) -> Gated:
        return Gated()

    def open_gate(self) -> None:
        assert isinstance(self.topics, Gated)
        self.portal.call(self.topics.open())

    @property
    def waiting(self) -> int:
        assert isinstance(self.topics, Gated)
        return len(self.topics.waiting)


def test_reading_stops_while_too_much_is_under_way_and_goes_on_after() -> None:
    broker = GatedBroker(KafkaSettings(connection_bytes_max=300_000))
    try:
        broker.create_topic("t", 1)
        with RawClient(broker.port) as client:
            client.send(3, 1, 0, b"\xff\xff\xff\xff")
            client.receive()
            data = b"".join(
                request_frame(0, 3, i, produce_body("t", [(0, batch([bytes(100_000)], producer=(1, 0, i)))]))
                for i in range(100)
            )
            client.sock.settimeout(0.5)
            sent = 0
            while sent < len(data):
                try:
                    sent += client.sock.send(data[sent : sent + 100_000])
                except TimeoutError:
                    break
            assert sent < len(data)
            assert broker.waiting <= 5
            client.sock.settimeout(10)
            done = 0
            client.sock.setblocking(False)
            deadline = time.monotonic() + 40
            answers = b""
            while done < 100 and time.monotonic() < deadline:
                broker.open_gate()
                try:
                    if sent < len(data):
                        sent += client.sock.send(data[sent : sent + 200_000])
                except BlockingIOError:
                    pass
                try:
                    answers += client.sock.recv(65536)
                except BlockingIOError:
                    time.sleep(0.001)
                while len(answers) >= 4 and len(answers) >= 4 + struct.unpack_from(">i", answers)[0]:
                    answers = answers[4 + struct.unpack_from(">i", answers)[0] :]
                    done += 1
            assert done == 100
    finally:
        broker.close()


def test_a_frame_stays_untouched_until_its_batches_have_ended() -> None:
    broker = GatedBroker()
    try:
        row = broker.create_topic("t", 1)
        with RawClient(broker.port) as client, RawClient(broker.port) as other:
            client.send(3, 1, 0, b"\xff\xff\xff\xff")
            client.receive()
            values = [bytes([65 + i]) * 100_000 for i in range(6)]
            for i, value in enumerate(values):
                sender = (client, other)[i % 2]
                sender.send(0, 3, i, produce_body("t", [(0, batch([value], producer=(i, 0, 0)))]))
                eventually(lambda i=i: broker.waiting == i + 1)
            broker.open_gate()
            for sender in (client, other):
                for _ in range(3):
                    sender.receive()
        stored = broker.topics.partitions[row.topic_id, 0].batches
        assert [next(v for v in values if v in data) for data in stored] == values
    finally:
        broker.close()


def test_a_client_that_leaves_takes_nothing_with_it() -> None:
    broker = GatedBroker()
    try:
        row = broker.create_topic("t", 1)
        with RawClient(broker.port) as client:
            client.send(3, 1, 0, b"\xff\xff\xff\xff")
            client.receive()
            client.send(0, 3, 1, produce_body("t", [(0, sequence(0))]))
            eventually(lambda: broker.waiting == 1)
        eventually(lambda: broker.server is not None and broker.server.connection_count == 0)
        broker.open_gate()
        assert broker.topics.partitions[row.topic_id, 0].next == 1
    finally:
        broker.close()


def test_a_slow_reader_holds_no_more_than_its_share() -> None:
    broker = FakeBroker(KafkaSettings(connection_bytes_max=4 << 20))
    try:
        row = broker.create_topic("t", 1)
        broker.portal.call(_fill(broker.topics, row.topic_id))
        with RawClient(broker.port) as client:
            client.send(3, 1, 0, b"\xff\xff\xff\xff")
            client.receive()
            for i in range(60):
                client.send(1, 4, i, fetch_body("t", 0, 0))
            assert broker.server is not None
            (session,) = broker.server._sessions

            def held_bytes() -> int:
                held = session._connection.unsent_bytes + session._answered_bytes
                assert held <= (4 + 5) << 20
                return held

            eventually(lambda: held_bytes() >= 4 << 20)
            for i in range(60):
                held_bytes()
                assert client.receive()[0] == i
    finally:
        broker.close()


async def _fill(topics: FakeTopicLog, topic_id: str) -> None:
    await topics.produce_nowait(topic_id, 0, batch([bytes(900_000)]))


def test_a_frame_that_stops_half_way_is_closed() -> None:
    broker = FakeBroker(KafkaSettings(frame_timeout_s=0.3, idle_timeout_s=600.0))
    try:
        with RawClient(broker.port) as half, RawClient(broker.port) as quiet:
            half.sock.sendall(struct.pack(">i", 1000) + b"x")
            assert half.is_closed()
            assert quiet.ask(API_VERSIONS, 0, b"").error_code == 0
    finally:
        broker.close()


def test_a_quiet_connection_is_closed() -> None:
    broker = FakeBroker(KafkaSettings(frame_timeout_s=600.0, idle_timeout_s=0.5))
    try:
        with RawClient(broker.port) as quiet:
            assert quiet.is_closed()
    finally:
        broker.close()


def test_a_taken_port_names_the_key_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        class Taken(FakeBroker):
            def start(self) -> None:
                self.port = taken.getsockname()[1]
                super().start()

        with pytest.raises(InvalidError, match=r"node\.kafka"):
            Taken()


def test_not_leader_reaches_the_client_as_code_6(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1)
    fake_broker.topics.faults = lambda *_: NotLeaderError("elsewhere.", leader="n2")
    with RawClient(fake_broker.port) as client:
        client.ask(3, 1, b"\xff\xff\xff\xff")
        answer = client.ask(0, 3, produce_body("t", [(0, sequence(0))]))
        assert answer.responses[0].partition_responses[0].error_code == error_codes.NOT_LEADER_OR_FOLLOWER


def test_many_half_open_connections_do_not_disturb_a_client(fake_broker: FakeBroker) -> None:
    idle = [RawClient(fake_broker.port) for _ in range(200)]
    for i, client in enumerate(idle):
        if i % 2:
            client.sock.sendall(struct.pack(">i", 50_000_000))
    with RawClient(fake_broker.port) as client:
        assert client.ask(API_VERSIONS, 0, b"").error_code == 0
    for each in idle:
        each.sock.close()
    eventually(lambda: fake_broker.server is not None and fake_broker.server.connection_count == 0)


def test_unfinished_frames_of_many_connections_stay_within_their_half() -> None:
    """Each connection announces a megabyte and sends 30 kB of it: full-size buffers alone would be six
    times the limit.
    """
    broker = FakeBroker(KafkaSettings(process_bytes_max=4 << 20))
    assert broker.server is not None
    budget = broker.server._shared.budget
    try:
        hostile = [RawClient(broker.port) for _ in range(200)]
        for client in hostile:
            client.sock.sendall(struct.pack(">i", 1_000_000) + bytes(30_000))
        eventually(lambda: len(budget._receiving) == 200)
        assert budget.request_bytes <= (2 << 20) + (1 << 20) + 200 * (16 << 10), "the half, the oldest frame, the rest"
        with RawClient(broker.port) as client:
            assert client.ask(API_VERSIONS, 0, b"").error_code == 0
        for client in hostile:
            client.sock.close()
        eventually(lambda: budget.request_bytes == 0)
    finally:
        broker.close()


SASL = (17, 36)
"""APIs that only a listener with SASL answers: test_kafka_sasl."""


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_mutation_of_a_request_breaks_the_broker(shared_broker: FakeBroker, data: st.DataObject) -> None:
    """A valid request with bytes changed, cut or inserted is answered, or its connection is closed; it never causes a
    fault.
    """
    key, version = data.draw(
        st.sampled_from(
            [(a.key, v) for a in APIS.values() if a.key not in SASL for v in (a.min_version, a.max_version)]
        )
    )
    body = bytearray(example(key, version, "fuzz", uuid.UUID(int=7)))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(body)))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip" if at < len(body):
                body[at] = data.draw(st.integers(0, 255))
            case "cut":
                del body[at : at + data.draw(st.integers(0, 8))]
            case "insert":
                body[at:at] = data.draw(st.binary(max_size=6))
    with structlog.testing.capture_logs() as logs, RawClient(shared_broker.port) as client:
        client.send(key, version, 1, bytes(body))
        client.send(API_VERSIONS, 0, 2, b"")
        try:
            while client.receive()[0] != 2:
                pass
        except (EOFError, ConnectionError):
            assert any(entry["event"] in ("kafka.bad_frame", "kafka.request_failed") for entry in logs)
    assert [entry for entry in logs if entry["event"] == "kafka.request_broke"] == []
    assert [entry for entry in logs if entry["event"] == "kafka.request_failed" and key != 0] == []


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[FakeBroker]:
    broker = FakeBroker(KafkaSettings(KafkaSection(auto_create_topics=False)))
    broker.create_topic("fuzz", 2)
    yield broker
    broker.close()
