"""The endpoint under TLS: third-party clients, client certificates, renewal, and refusals."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from support.kafka.harness import FakeBroker, RealBroker
from support.kafka.raw import request_frame
from support.kafka.security import Authority, trusting
from support.waiting import eventually
from tidemill.base.config.listeners import KafkaSection
from tidemill.base.errors import InvalidError
from tidemill.kafka import KafkaSettings
from tidemill.kafka.net.listener_security import ListenerSecurity

LARGE = bytes(range(256)) * 12_000
VALUES = [LARGE, b"", b"small", LARGE[::-1]]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def secure(authority: Authority) -> Iterator[RealBroker]:
    broker = RealBroker(gate=authority.gate())
    broker.create_topic("t", 1)
    yield broker
    broker.close()


def principals(broker: RealBroker | FakeBroker) -> set[str]:
    async def found() -> set[str]:
        assert broker.server is not None
        return {session.visitor.principal for session in broker.server._sessions if session.visitor.known}

    return broker.portal.call(found())


def dial(broker: RealBroker | FakeBroker, context: ssl.SSLContext, **more: Any) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", broker.port), timeout=20)
    return context.wrap_socket(raw, server_hostname="localhost", **more)


def ask_versions(tls: socket.socket, correlation_id: int = 7) -> bytes:
    tls.sendall(request_frame(18, 0, correlation_id, b""))
    head = b""
    while len(head) < 8:
        got = tls.recv(8 - len(head))
        if not got:
            return b""
        head += got
    assert int.from_bytes(head[4:], "big") == correlation_id
    left = int.from_bytes(head[:4], "big") - 4
    body = b""
    while len(body) < left:
        body += tls.recv(left - len(body))
    return body


def answered(broker: FakeBroker, context: ssl.SSLContext) -> None:
    """Send ApiVersions. Raises EOFError if the connection ends without an error of TLS."""
    if not ask_versions(dial(broker, context)):
        raise EOFError


def test_librdkafka_produces_and_consumes_large_and_small_values(secure: RealBroker, authority: Authority) -> None:
    config = {
        "bootstrap.servers": secure.address,
        "security.protocol": "ssl",
        "ssl.ca.location": str(authority.certificate),
        "message.max.bytes": 10_000_000,
    }
    client = ck.Producer({**config, "enable.idempotence": True})
    for value in VALUES:
        client.produce("t", value)
    assert client.flush(30) == 0
    reader = ck.Consumer({**config, "group.id": "g", "enable.auto.commit": False})
    reader.assign([ck.TopicPartition("t", 0, 0)])
    found: list[bytes] = []
    eventually(lambda: (m := reader.poll(0.5)) is not None and (found.append(m.value()) or len(found) == len(VALUES)))
    reader.close()
    assert found == VALUES


def test_kafka_python_produces_and_consumes(secure: RealBroker, authority: Authority) -> None:
    config = {
        "bootstrap_servers": secure.address,
        "security_protocol": "SSL",
        "ssl_cafile": str(authority.certificate),
    }
    client = KafkaProducer(**config, max_request_size=10_000_000, acks="all")
    for value in VALUES:
        client.send("t", value)
    client.flush(30)
    client.close()
    reader = KafkaConsumer(**config, enable_auto_commit=False, consumer_timeout_ms=20_000)
    reader.assign([TopicPartition("t", 0)])
    reader.seek_to_beginning()
    assert [next(reader).value for _ in VALUES] == VALUES
    reader.close()


async def test_aiokafka_produces_and_consumes(secure: RealBroker, authority: Authority) -> None:
    config: dict[str, Any] = {
        "bootstrap_servers": secure.address,
        "security_protocol": "SSL",
        "ssl_context": trusting(authority),
    }
    client = AIOKafkaProducer(**config, max_request_size=10_000_000)
    await client.start()
    for value in VALUES:
        await client.send_and_wait("t", value)
    await client.stop()
    reader = AIOKafkaConsumer("t", **config, enable_auto_commit=False, auto_offset_reset="earliest")
    await reader.start()
    assert [(await reader.getone()).value for _ in VALUES] == VALUES
    await reader.stop()


def test_a_client_that_reads_slowly_gets_every_byte(secure: RealBroker, authority: Authority) -> None:
    """The piece that OpenSSL could not send is retained although further answers are queued."""
    tls = dial(secure, trusting(authority))
    tls.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    count = 3_000
    sender = threading.Thread(
        target=lambda: tls.sendall(b"".join(request_frame(18, 0, i, b"") for i in range(count))), daemon=True
    )
    sender.start()
    first = None
    for i in range(count):
        head = tls.recv(4)
        while len(head) < 4:
            head += tls.recv(4 - len(head))
        frame = b""
        while len(frame) < int.from_bytes(head, "big"):
            frame += tls.recv(min(700, int.from_bytes(head, "big") - len(frame)))
        assert int.from_bytes(frame[:4], "big") == i
        first = first or frame[4:]
        assert frame[4:] == first
    sender.join(20)
    tls.close()


def test_a_certificate_makes_a_principal_by_the_first_rule_that_matches(authority: Authority) -> None:
    rules = ("RULE:CN=(ops-.*),O=.*/ops:$1/U", "RULE:CN=([^,]*),.*/$1/", "DEFAULT")
    broker = FakeBroker(gate=authority.gate("required", *rules))
    for name in ("alice", "ops-1"):
        tls = dial(broker, trusting(authority, authority.client(name)))
        assert ask_versions(tls)
        assert principals(broker) == {"User:alice" if name == "alice" else "User:OPS:OPS-1"}
        tls.close()
        eventually(lambda: not principals(broker))
    broker.close()


def test_without_a_rule_the_principal_is_the_whole_name(authority: Authority) -> None:
    broker = FakeBroker(gate=authority.gate("requested"))
    tls = dial(broker, trusting(authority, authority.client("alice")))
    assert ask_versions(tls)
    assert principals(broker) == {"User:CN=alice,O=Harbour\\, Ltd,C=DE"}
    nobody = dial(broker, trusting(authority))
    assert ask_versions(nobody)
    assert "User:ANONYMOUS" in principals(broker)
    tls.close()
    nobody.close()
    broker.close()


def test_f240_a_certificate_that_does_not_count_is_refused(authority: Authority, tmp_path: Path) -> None:
    """Rejected are: no certificate, one of another authority, an expired one, one that no rule maps, and TLS versions
    that are too old.
    """
    broker = FakeBroker(gate=authority.gate("required", "RULE:CN=(alice|late),.*/$1/", min_version="1.3"))
    other = Authority(tmp_path / "other", "Other CA")
    contexts = [
        trusting(authority),
        trusting(authority, other.client("alice")),
        trusting(authority, authority.client("late", days=-1)),
        trusting(authority, authority.client("mallory")),
    ]
    old = trusting(authority, authority.client("alice"))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    for context in [*contexts, old]:
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
            answered(broker, context)
    good = dial(broker, trusting(authority, authority.client("alice")))
    assert ask_versions(good)
    good.close()
    eventually(lambda: broker.server is not None and broker.server.connection_count == 0)
    broker.close()


def test_clear_text_at_a_port_of_tls_ends_that_connection_only(authority: Authority) -> None:
    broker = FakeBroker(gate=authority.gate())
    good = dial(broker, trusting(authority))
    for words in (request_frame(18, 0, 1, b""), b"GET / HTTP/1.1\r\n\r\n", bytes(5_000)):
        plain = socket.create_connection(("127.0.0.1", broker.port), timeout=20)
        plain.sendall(words)
        received = b""
        try:
            while chunk := plain.recv(4096):
                received += chunk
        except ConnectionError:
            pass
        assert len(received) < 20, "an alert at most"
        plain.close()
    assert ask_versions(good)
    good.close()
    broker.close()


def test_f241_connections_that_prove_nothing_leave_room_and_end(authority: Authority) -> None:
    settings = KafkaSettings(
        KafkaSection(connections_max=64, connections_per_address_max=64), authentication_timeout_s=3.0
    )
    broker = FakeBroker(settings, gate=authority.gate())
    hello = b"\x16\x03\x01\x02\x00\x01\x00"
    crowd = []
    for i in range(1_000):
        half = socket.create_connection(("127.0.0.1", broker.port), timeout=20)
        half.sendall(hello[: i % 8])
        crowd.append(half)
        if i % 100 == 50:
            good = dial(broker, trusting(authority))
            assert ask_versions(good)
            good.close()
    assert broker.server is not None and broker.server.connection_count <= 64 // 4 + 1
    eventually(lambda: broker.server is not None and broker.server.connection_count == 0)
    for half in crowd:
        half.close()
    broker.close()


def test_a_large_frame_is_refused_before_a_client_is_known(authority: Authority) -> None:
    """A client of TLS is authenticated when its handshake ends; from then on its frames may be large."""
    broker = FakeBroker(gate=authority.gate())
    tls = dial(broker, trusting(authority))
    assert ask_versions(tls)

    async def limits() -> set[int]:
        assert broker.server is not None
        return {session._reader.request_bytes_max for session in broker.server._sessions}

    assert broker.portal.call(limits()) == {KafkaSettings().request_bytes_max}
    tls.close()
    broker.close()


def test_f242_new_files_serve_new_connections_and_bad_files_nobody(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.kafka.server.server._RENEW_INTERVAL_S", 0.05)
    gate = authority.gate()
    broker = FakeBroker(gate=gate)
    before = dial(broker, trusting(authority))
    assert ask_versions(before)

    def serial() -> str:
        tls = dial(broker, trusting(authority))
        found = dict(tls.getpeercert() or {})["serialNumber"]
        tls.close()
        return str(found)

    def failing() -> bool:
        return broker.tracker.failure("kafka:certificates") is not None

    first = serial()
    authority.server()
    eventually(lambda: serial() != first)
    second = serial()
    Path(gate.tls._settings.key).write_text("no key")  # type: ignore[union-attr]
    eventually(failing)
    assert serial() == second
    assert ask_versions(before), "a connection keeps what it began with"
    authority.server()
    eventually(lambda: serial() != second)
    before.close()
    broker.close()


def test_files_that_cannot_be_used_are_named_with_their_key(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.server()
    other = Authority(tmp_path / "other").server()[1]
    from tidemill.base.config.listeners import TlsSection
    from tidemill.security.tls import ServerCertificates

    for settings, named in (
        (TlsSection(certificate=str(tmp_path / "none.pem"), key=key), "tls.certificate"),
        (TlsSection(certificate=certificate, key=str(tmp_path)), "key="),
        (TlsSection(certificate=certificate, key=other), "matching PEM files"),
        (TlsSection(certificate=certificate, key=key, client_auth="required"), "tls.client_ca"),
        (TlsSection(certificate=certificate, key=key, client_ca=key, client_auth="required"), "tls.client_ca"),
    ):
        with pytest.raises(InvalidError, match=named):
            ServerCertificates(settings).load()


def test_a_gate_in_clear_text_lets_everybody_in_as_nobody(fake_broker: FakeBroker) -> None:
    plain = socket.create_connection(("127.0.0.1", fake_broker.port), timeout=20)
    assert ask_versions(plain)
    assert principals(fake_broker) == {"User:ANONYMOUS"}
    plain.close()
    assert ListenerSecurity().tls is None


async def test_many_clients_at_once_shake_hands(authority: Authority) -> None:
    broker = FakeBroker(gate=authority.gate())

    async def one(context: ssl.SSLContext, number: int) -> None:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", broker.port, ssl=context, server_hostname="localhost"
        )
        writer.write(request_frame(18, 0, number, b""))
        size = int.from_bytes(await reader.readexactly(4), "big")
        assert int.from_bytes((await reader.readexactly(size))[:4], "big") == number
        writer.close()

    context = trusting(authority)
    await asyncio.gather(*(one(context, i) for i in range(100)))
    broker.close()
