"""Every wait ends: long polls, parked requests and connections whose clients are slow, silent or gone."""

from __future__ import annotations

import socket
import struct
import time

import pytest

from support.kafka.harness import RealBroker
from support.kafka.raw import RawClient, batch, fetch_body, produce_body
from support.kafka.session_reader import Fetcher
from support.waiting import eventually
from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings, error_codes

FOR_EVER_MS = 0x7FFFFFFF


def open_sessions(broker: RealBroker) -> list[object]:
    return list(broker.server._sessions)


def watchers(broker: RealBroker) -> int:
    return sum(len(led.watchers) for led in broker.topics._led.values())


def test_a_poll_without_an_end_ends_when_a_connection_would_be_idle() -> None:
    broker = RealBroker(settings=KafkaSettings(idle_timeout_s=1.5))
    try:
        broker.create_topic("t", 1)
        with RawClient(broker.port) as client:
            client.ask(3, 1, b"\xff\xff\xff\xff")
            began = time.monotonic()
            answer = client.ask(1, 4, fetch_body("t", 0, 0, max_wait_ms=FOR_EVER_MS))
            assert time.monotonic() - began >= 1.4
            assert int(answer.responses[0].partitions[0].error_code) == 0
        eventually(lambda: not open_sessions(broker) and not watchers(broker))
    finally:
        broker.close()


def test_what_is_refused_for_good_is_told_without_ending_the_wait_for_the_rest() -> None:
    broker = RealBroker(settings=KafkaSettings(KafkaSection(auto_create_topics=False)))
    try:
        row = broker.create_topic("t", 1)
        with Fetcher(broker.port, [row], 12) as reader:
            asked = {("t", 0): 0, ("nowhere", 0): 0}
            session_id = reader.fetch(asked, epoch=0).session_id
            epoch, code = 1, 0
            until = time.monotonic() + 40
            while code != error_codes.UNKNOWN_TOPIC_OR_PARTITION:
                code = reader.fetch({}, session_id=session_id, epoch=epoch).reported["nowhere", 0].code
                epoch += 1
                assert time.monotonic() < until
            began = time.monotonic()
            reported = reader.fetch({}, session_id=session_id, epoch=epoch, max_wait_ms=400).reported
            assert set(reported) == {("nowhere", 0)} and time.monotonic() - began >= 0.35
            began = time.monotonic()
            alone = reader.fetch({("nowhere", 0): 0}, max_wait_ms=60_000)
            assert alone.reported["nowhere", 0].code and time.monotonic() - began < 30, "there is nothing to wait for"
    finally:
        broker.close()


def test_f215_a_peer_that_vanished_is_asked_whether_it_is_there() -> None:
    broker = RealBroker()
    try:
        with RawClient(broker.port) as client:
            client.ask(18, 0, b"")
            (session,) = open_sessions(broker)
            sock = session._connection._sock  # type: ignore[attr-defined]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, interval, count = (
                sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            )
            assert idle + interval * count <= 120
    finally:
        broker.close()


def test_a_client_that_stops_sending_leaves_no_poll_behind() -> None:
    broker = RealBroker()
    try:
        broker.create_topic("t", 3)
        with RawClient(broker.port) as client:
            client.ask(3, 1, b"\xff\xff\xff\xff")
            for partition in range(3):
                client.send(1, 4, partition, fetch_body("t", partition, 0, max_wait_ms=FOR_EVER_MS))
            eventually(lambda: watchers(broker) == broker.settings.concurrent_reads_max == 2)
            client.sock.shutdown(socket.SHUT_WR)
            eventually(lambda: not open_sessions(broker) and not watchers(broker))
    finally:
        broker.close()


def test_polls_behind_polls_have_their_turn_and_end_in_order() -> None:
    broker = RealBroker()
    try:
        broker.create_topic("t", 1)
        with RawClient(broker.port) as client, RawClient(broker.port) as writer:
            client.ask(3, 1, b"\xff\xff\xff\xff")
            writer.ask(3, 1, b"\xff\xff\xff\xff")
            for number in range(60):
                client.send(1, 4, number, fetch_body("t", 0, 0, max_wait_ms=FOR_EVER_MS))
            eventually(lambda: watchers(broker) > 0)
            writer.ask(0, 8, produce_body("t", [(0, batch([b"v"]))]))
            assert [client.receive()[0] for _ in range(60)] == list(range(60))
        eventually(lambda: not watchers(broker))
    finally:
        broker.close()


def test_a_client_that_reads_nothing_is_cut_off_with_all_that_waits_for_it() -> None:
    broker = RealBroker(settings=KafkaSettings(frame_timeout_s=1.0, fetch_bytes_max=1 << 20))
    try:
        broker.create_topic("t", 1)
        with RawClient(broker.port) as writer:
            writer.ask(3, 1, b"\xff\xff\xff\xff")
            writer.ask(0, 8, produce_body("t", [(0, batch([bytes(900_000)]))]))
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            deaf.connect(("127.0.0.1", broker.port))
            from support.kafka.raw import request_frame

            for number in range(200):
                deaf.sendall(request_frame(1, 4, number, fetch_body("t", 0, 0, max_wait_ms=FOR_EVER_MS)))
            eventually(lambda: not open_sessions(broker))
            budget = broker.server._shared.budget
            eventually(lambda: not watchers(broker) and budget.answer_bytes == budget.request_bytes == 0)
    finally:
        broker.close()


@pytest.mark.parametrize("how", ["reset", "close", "half"])
def test_a_crowd_that_waits_for_one_partition_is_answered_whoever_leaves_meanwhile(how: str) -> None:
    broker = RealBroker(settings=KafkaSettings(KafkaSection(connections_max=500, connections_per_address_max=500)))
    try:
        broker.create_topic("t", 1)
        clients = [RawClient(broker.port) for _ in range(120)]
        for client in clients:
            client.ask(3, 1, b"\xff\xff\xff\xff")
            client.send(1, 4, 7, fetch_body("t", 0, 0, max_wait_ms=FOR_EVER_MS))
        eventually(lambda: watchers(broker) == 120)
        leaving, staying = clients[::2], clients[1::2]
        for client in leaving:
            if how == "reset":
                client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if how == "half":
                client.sock.shutdown(socket.SHUT_WR)
            else:
                client.sock.close()
        with RawClient(broker.port) as writer:
            writer.ask(3, 1, b"\xff\xff\xff\xff")
            writer.ask(0, 8, produce_body("t", [(0, batch([b"v"]))]))
        for client in staying:
            assert client.receive()[0] == 7
        for client in clients:
            client.sock.close()
        eventually(lambda: not open_sessions(broker) and not watchers(broker))
    finally:
        broker.close()
