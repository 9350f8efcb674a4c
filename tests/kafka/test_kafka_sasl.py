"""SASL at the endpoint: every mechanism with third-party clients, and every kind of invalid credential."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider as AioTokenProvider
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kafka.errors import KafkaError, SaslAuthenticationFailedError
from kafka.net.sasl.oauth import AbstractTokenProvider

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from support.kafka.harness import FakeBroker, RealBroker
from support.kafka.raw import request_frame
from support.kafka.security import PASSWORD, Authority, add, confluent, gate, plainly, token
from support.waiting import eventually, until
from tidemill.base.clock import Rand
from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings
from tidemill.kafka.net.listener_security import UNAUTHENTICATED_REQUEST_BYTES
from tidemill.kafka.net.memory_budget import BudgetedSession, MemoryBudget
from tidemill.security.sasl import (
    CHECKS_MAX,
    CHECKS_PER_ADDRESS,
    FAILED_PER_USER,
    MECHANISMS,
    Authenticator,
    AuthFailureThrottle,
    TooManyChecksError,
)
from tidemill.security.scram import (
    NAMES,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    AuthenticationFailedError,
    Credential,
    ScramServer,
    decoy_credential,
)
from tidemill.security.users import Users

CLASSIC = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


@pytest.fixture(params=[False, True], ids=["clear", "tls"])
def secure(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RealBroker, Authority | None]]:
    authority = Authority(tmp_path / "ca") if request.param else None
    broker = RealBroker(gate=gate(authority))
    add(broker, "alice")
    broker.create_topic("t", 1)
    yield broker, authority
    broker.close()


@pytest.fixture
def plain() -> Iterator[FakeBroker]:
    broker = FakeBroker(gate=gate())
    add(broker, "alice")
    yield broker
    broker.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_librdkafka_comes_in_by_every_mechanism(secure: tuple[RealBroker, Authority | None], mechanism: str) -> None:
    broker, authority = secure
    config = confluent(broker, authority, mechanism)
    client = ck.Producer({**config, "enable.idempotence": True})
    client.produce("t", mechanism.encode())
    client.poll(0)
    assert client.flush(30) == 0
    reader = ck.Consumer({**config, "group.id": "g", "enable.auto.commit": False})
    reader.assign([ck.TopicPartition("t", 0, 0)])
    message = eventually(lambda: reader.poll(0.5))
    assert message.error() is None and message.value() == mechanism.encode()
    reader.close()


class Provider(AbstractTokenProvider):
    def token(self) -> str:
        return token("alice")


class AioProvider(AioTokenProvider):
    async def token(self) -> str:
        return token("alice")


def python_config(broker: RealBroker, authority: Authority | None, mechanism: str, provider: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "bootstrap_servers": broker.address,
        "security_protocol": "SASL_SSL" if authority else "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
    }
    if mechanism == "OAUTHBEARER":
        return {**config, "sasl_oauth_token_provider": provider}
    return {**config, "sasl_plain_username": "alice", "sasl_plain_password": PASSWORD}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kafka_python_comes_in_by_every_mechanism(secure: tuple[RealBroker, Authority | None], mechanism: str) -> None:
    broker, authority = secure
    config = python_config(broker, authority, mechanism, Provider())
    if authority:
        config["ssl_cafile"] = str(authority.certificate)
    client = KafkaProducer(**config, acks="all")
    client.send("t", mechanism.encode()).get(30)
    client.close()
    reader = KafkaConsumer(**config, enable_auto_commit=False, consumer_timeout_ms=20_000)
    reader.assign([TopicPartition("t", 0)])
    reader.seek_to_beginning()
    assert next(reader).value == mechanism.encode()
    reader.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_aiokafka_comes_in_by_every_mechanism(
    secure: tuple[RealBroker, Authority | None], mechanism: str
) -> None:
    broker, authority = secure
    config = python_config(broker, authority, mechanism, AioProvider())
    if authority:
        from support.kafka.security import trusting

        config["ssl_context"] = trusting(authority)
    client = AIOKafkaProducer(**config)
    await client.start()
    await client.send_and_wait("t", mechanism.encode())
    await client.stop()
    reader = AIOKafkaConsumer("t", **config, enable_auto_commit=False, auto_offset_reset="earliest")
    await reader.start()
    assert (await reader.getone()).value == mechanism.encode()
    await reader.stop()


@pytest.mark.parametrize("mechanism", CLASSIC)
def test_a_wrong_password_is_told_as_such(secure: tuple[RealBroker, Authority | None], mechanism: str) -> None:
    broker, authority = secure
    errors: list[Any] = []
    client = ck.Producer({**confluent(broker, authority, mechanism, "wrong"), "error_cb": errors.append})

    def refused() -> bool:
        client.poll(0.2)
        return any(error.code() == ck.KafkaError._AUTHENTICATION for error in errors)

    eventually(refused)
    config = {**python_config(broker, authority, mechanism, None), "sasl_plain_password": "wrong"}
    if authority:
        config["ssl_cafile"] = str(authority.certificate)
    with pytest.raises((SaslAuthenticationFailedError, KafkaError)):
        KafkaProducer(**config, bootstrap_timeout_ms=1_500, max_block_ms=1_500).send("t", b"v").get(8)


def test_the_admin_client_writes_and_describes_credentials(plain: FakeBroker) -> None:
    admin = AdminClient({**confluent(plain, None, "SCRAM-SHA-512")})  # type: ignore[arg-type]
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 8192)
    done = admin.alter_user_scram_credentials([UserScramCredentialUpsertion("bob", info, b"bobs", b"salty salt")])
    done["bob"].result(20)
    found = admin.describe_user_scram_credentials(["bob"])["bob"].result(20)
    assert [(i.mechanism, i.iterations) for i in found.scram_credential_infos] == [(ScramMechanism.SCRAM_SHA_256, 8192)]
    assert set(admin.describe_user_scram_credentials().result(20)) == {"alice", "bob"}
    config = {**confluent(plain, None, "SCRAM-SHA-256", "bobs"), "sasl.username": "bob"}  # type: ignore[arg-type]
    assert AdminClient(config).list_topics(timeout=20)
    with pytest.raises(ck.KafkaException) as unknown:
        admin.describe_user_scram_credentials(["carol"])["carol"].result(20)
    assert unknown.value.args[0].code() == ck.KafkaError.RESOURCE_NOT_FOUND
    weak = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 100)
    with pytest.raises(ck.KafkaException) as unacceptable:
        admin.alter_user_scram_credentials([UserScramCredentialUpsertion("bob", weak, b"x")])["bob"].result(20)
    assert unacceptable.value.args[0].code() == ck.KafkaError.UNACCEPTABLE_CREDENTIAL
    gone = UserScramCredentialDeletion("bob", ScramMechanism.SCRAM_SHA_256)
    admin.alter_user_scram_credentials([gone])["bob"].result(20)
    with pytest.raises(ck.KafkaException) as absent:
        admin.alter_user_scram_credentials([gone])["bob"].result(20)
    assert absent.value.args[0].code() == ck.KafkaError.RESOURCE_NOT_FOUND
    assert plain.portal.call(plain.users.credential("bob", SCRAM_SHA_256)) is None


def test_a_users_credentials_change_together_or_not_at_all(plain: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    admin = AdminClient({**confluent(plain, None, "SCRAM-SHA-512")})  # type: ignore[arg-type]
    both = (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)

    def alter(*changes: UserScramCredentialUpsertion | UserScramCredentialDeletion) -> None:
        admin.alter_user_scram_credentials(list(changes))["dora"].result(20)

    def put(mechanism: ScramMechanism) -> UserScramCredentialUpsertion:
        return UserScramCredentialUpsertion("dora", ScramCredentialInfo(mechanism, 8192), b"doras", b"salty salt")

    def mechanisms() -> set[int]:
        return {each.mechanism for each in plain.portal.call(plain.users.list()) if each.user == "dora"}

    there = len(plain.portal.call(plain.users.list()))
    with monkeypatch.context() as patched:
        patched.setattr("tidemill.security.users.USERS_MAX", there + 1)
        with pytest.raises(ck.KafkaException, match="too many users"):
            alter(*map(put, both))
        assert mechanisms() == set()
        alter(put(both[0]))
    commit, written = plain.metastore.commit, []

    async def counted(rows: Any, **more: Any) -> int:
        written.append(len(rows))
        return await commit(rows, **more)

    monkeypatch.setattr(plain.metastore, "commit", counted)
    alter(put(both[1]), UserScramCredentialDeletion("dora", both[0]))
    assert written == [2], "nobody sees the one without the other"
    assert mechanisms() == {SCRAM_SHA_512}
    alter(UserScramCredentialDeletion("dora", both[1]))
    assert mechanisms() == set()


# by hand -----------------------------------------------------------------------------------------------------


class Dialogue:
    """One connection in clear text that sends arbitrary messages."""

    def __init__(self, broker: FakeBroker) -> None:
        self.sock = socket.create_connection(("127.0.0.1", broker.port), timeout=30)

    def send(self, key: int, version: int, body: bytes) -> None:
        self.sock.sendall(request_frame(key, version, 1, body))

    def raw(self, message: bytes) -> bytes:
        self.sock.sendall(struct.pack(">i", len(message)) + message)
        return self.receive()

    def receive(self) -> bytes:
        """One frame; b"" = the connection ended."""
        try:
            size = struct.unpack(">i", self._exactly(4))[0]
            return self._exactly(size) or b"\x00"
        except (ConnectionError, EOFError):
            return b""

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            got = self.sock.recv(count - len(data))
            if not got:
                raise EOFError
            data += got
        return data

    def handshake(self, mechanism: str, version: int = 1) -> int:
        name = mechanism.encode()
        self.send(17, version, struct.pack(">h", len(name)) + name)
        answer = self.receive()
        return struct.unpack_from(">h", answer, 4)[0] if answer else -99

    def authenticate(self, message: bytes) -> tuple[int, int]:
        """(error code, session lifetime ms) of SaslAuthenticate v1; (-99, 0) = the connection ended."""
        self.send(36, 1, struct.pack(">i", len(message)) + message)
        answer = self.receive()
        if not answer:
            return -99, 0
        return struct.unpack_from(">h", answer, 4)[0], struct.unpack_from(">q", answer, len(answer) - 8)[0]

    def asks(self) -> bool:
        """Return whether DescribeCluster is answered."""
        self.send(60, 0, b"\x00\x00")
        return bool(self.receive())

    def close(self) -> None:
        self.sock.close()


def bearer(text: str) -> bytes:
    return f"n,,\x01auth=Bearer {text}\x01\x01".encode()


def test_an_old_handshake_is_followed_by_bare_messages(plain: FakeBroker) -> None:
    good, bad = Dialogue(plain), Dialogue(plain)
    assert good.handshake("PLAIN", version=0) == 0
    assert good.raw(plainly()) == b"\x00", "an empty message"
    assert good.asks()
    assert bad.handshake("PLAIN", version=0) == 0
    assert bad.raw(plainly(password="wrong")) == b""
    good.close()
    bad.close()


def test_a_bare_reply_counts_as_an_unsent_answer_until_it_is_sent(
    plain: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    count = MemoryBudget.answers

    def record(budget: MemoryBudget, session: BudgetedSession, size: int) -> None:
        counted.append(size)
        count(budget, session, size)

    monkeypatch.setattr(MemoryBudget, "answers", record)
    client = Dialogue(plain)
    assert client.handshake("SCRAM-SHA-256", version=0) == 0
    counted.clear()
    reply = client.raw(b"n,,n=alice,r=abcdef")
    assert reply.startswith(b"r=abcdef")
    eventually(lambda: counted[-1:] == [0] and 4 + len(reply) in counted)
    client.close()


def test_what_is_pipelined_behind_a_proof_waits_for_it(plain: FakeBroker) -> None:
    client = Dialogue(plain)
    name = b"PLAIN"
    message = plainly()
    client.sock.sendall(
        request_frame(17, 1, 1, struct.pack(">h", len(name)) + name)
        + request_frame(36, 1, 2, struct.pack(">i", len(message)) + message)
        + request_frame(60, 0, 3, b"\x00\x00")
    )
    assert [struct.unpack_from(">i", client.receive())[0] for _ in range(3)] == [1, 2, 3]
    client.close()


def test_f243_nothing_is_served_before_a_proof(plain: FakeBroker) -> None:
    """Every API but three ends the connection, as do large frames, unknown mechanisms, and messages out of order."""
    from tidemill.kafka.handlers import APIS

    for key in sorted(APIS.keys() - {17, 18, 36}):
        client = Dialogue(plain)
        client.send(key, APIS[key].max_version, b"")
        assert client.receive() == b"", f"api {key}"
        client.close()
    early = Dialogue(plain)
    assert early.authenticate(plainly())[0] == 34 and early.receive() == b""
    strange = Dialogue(plain)
    assert strange.handshake("GSSAPI") == 33 and strange.receive() == b""
    large = Dialogue(plain)
    large.sock.sendall(struct.pack(">i", UNAUTHENTICATED_REQUEST_BYTES + 1))
    assert large.receive() == b""
    huge = Dialogue(plain)
    assert huge.handshake("PLAIN") == 0
    huge.sock.sendall(struct.pack(">ihhi", 1 << 30, 36, 1, 1) + bytes(1 << 16))
    assert huge.receive() == b""
    versions = Dialogue(plain)
    versions.send(18, 0, b"")
    assert versions.receive()
    assert not versions.asks()
    for client in (early, strange, large, huge, versions):
        client.close()


def test_a_listener_that_asks_for_nothing_refuses_a_handshake(fake_broker: FakeBroker) -> None:
    client = Dialogue(fake_broker)
    assert client.handshake("PLAIN") == 34 and client.receive() == b""
    client.close()


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        ("PLAIN", plainly(password="wrong")),
        ("PLAIN", plainly("nobody")),
        ("PLAIN", plainly(authzid="root")),
        ("PLAIN", plainly("", "")),
        ("PLAIN", plainly(password="x" * 2000)),
        ("PLAIN", plainly("a" * 60_000)),
        ("PLAIN", b"\xff\x00\xff\x00\xff"),
        ("PLAIN", b""),
        ("PLAIN", plainly("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"))),
        ("SCRAM-SHA-256", b"p=tls-unique,,n=alice,r=x"),
        ("OAUTHBEARER", bearer("a.b.c")),
        ("OAUTHBEARER", bearer(token("alice", -3600))),
        ("OAUTHBEARER", f"n,a=root,\x01auth=Bearer {token('alice')}\x01\x01".encode()),
        ("OAUTHBEARER", b"n,,\x01\x01"),
        ("OAUTHBEARER", b"\x01"),
    ],
)
def test_what_proves_nothing_is_refused_with_one_text(plain: FakeBroker, mechanism: str, message: bytes) -> None:
    client = Dialogue(plain)
    assert client.handshake(mechanism) == 0
    assert client.authenticate(message)[0] == 58
    assert client.receive() == b"", "the connection ends"
    client.close()


def test_f244_failed_attempts_are_slowed_told_and_hide_who_exists(plain: FakeBroker) -> None:
    with structlog.testing.capture_logs() as logs:
        answers = set()
        for user in ("alice", "nobody"):
            client = Dialogue(plain)
            client.handshake("PLAIN")
            message = plainly(user, "wrong")
            client.send(36, 1, struct.pack(">i", len(message)) + message)
            answers.add(client.receive())
            client.close()
        eventually(lambda: len([line for line in logs if line["event"] == "kafka.authentication_failed"]) == 2)
    assert len(answers) == 1
    line = next(line for line in logs if line["event"] == "kafka.authentication_failed")
    assert (line["user"], line["mechanism"], line["audit"]) == ("alice", "PLAIN", True)
    assert not any(str(value) == "wrong" or PASSWORD in str(value) for entry in logs for value in entry.values())


def test_delays_grow_by_address_are_bounded_and_forgotten() -> None:
    failures = AuthFailureThrottle()
    assert [round(failures.delay_s("a", 0.0), 1) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert failures.delay_s("b", 0.0) == 0.1
    assert failures.delay_s("a", 100.0) == 0.1
    for i in range(5_000):
        failures.delay_s(f"c{i}", 100.0)
    assert len(failures._counts) <= 1_000


def test_a_session_that_expires_proves_anew_or_ends() -> None:
    """KIP-368 by raw requests: re-authentication as the same principal with the same mechanism, before or after the
    expiry, succeeds. Anything else ends the session.
    """
    broker = FakeBroker(gate=gate(session_lifetime_s=1.0))
    add(broker, "alice")
    add(broker, "bob")
    client = Dialogue(broker)
    assert client.handshake("PLAIN") == 0
    code, lifetime_ms = client.authenticate(plainly())
    assert code == 0 and 0 < lifetime_ms <= 1000
    for _ in range(2):
        time.sleep(1.1)  # the lifetime of the session, by the broker's clock
        assert client.handshake("PLAIN") == 0
        assert client.authenticate(plainly())[0] == 0
        assert client.asks()
    assert client.handshake("PLAIN") == 0
    assert client.authenticate(plainly("bob"))[0] == 58
    late = Dialogue(broker)
    late.handshake("PLAIN")
    late.authenticate(plainly())
    time.sleep(1.1)
    assert not late.asks()
    other = Dialogue(broker)
    other.handshake("PLAIN")
    other.authenticate(plainly())
    other.handshake("OAUTHBEARER")
    assert other.authenticate(bearer(token("alice")))[0] == 58
    for each in (client, late, other):
        each.close()
    broker.close()


def test_a_token_ends_its_session_when_it_expires(plain: FakeBroker) -> None:
    client = Dialogue(plain)
    client.handshake("OAUTHBEARER")
    code, lifetime_ms = client.authenticate(bearer(token("alice", 90)))
    assert code == 0 and 80_000 < lifetime_ms <= 90_000
    client.close()


def test_librdkafka_proves_anew_under_load() -> None:
    broker = RealBroker(gate=gate(session_lifetime_s=1.0))
    add(broker, "alice")
    broker.create_topic("t", 1)
    client = ck.Producer({**confluent(broker, None, "SCRAM-SHA-256"), "linger.ms": 5})
    until = time.monotonic() + 3
    sent = 0
    while time.monotonic() < until:
        client.produce("t", str(sent).encode())
        client.poll(0.01)
        sent += 1
    assert client.flush(30) == 0
    reader = ck.Consumer({**confluent(broker, None, "PLAIN"), "group.id": "g", "enable.auto.commit": False})
    reader.assign([ck.TopicPartition("t", 0, 0)])
    found: list[bytes] = []
    while len(found) < sent:
        found += [message.value() for message in reader.consume(500, 0.5) if message.error() is None]
    assert found == [str(i).encode() for i in range(sent)]
    reader.close()
    broker.close()


def test_a_password_that_changed_or_a_user_that_is_gone_counts_at_once(plain: FakeBroker) -> None:
    def comes_in(password: str) -> bool:
        client = Dialogue(plain)
        client.handshake("PLAIN")
        code, _ = client.authenticate(plainly(password=password))
        client.close()
        return code == 0

    assert comes_in(PASSWORD)
    add(plain, "alice", "new")
    assert comes_in("new") and not comes_in(PASSWORD)
    plain.portal.call(plain.users.delete("alice", list(NAMES)))
    assert not comes_in("new")


def test_f245_while_the_metastore_is_away_nobody_is_told_of_a_wrong_password(
    plain: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.base.errors import UnavailableError

    async def away(*_: Any, **__: Any) -> None:
        raise UnavailableError("the metastore is away.")

    async def replace() -> None:
        monkeypatch.setattr(plain.metastore, "get", away)

    plain.portal.call(replace())
    client = Dialogue(plain)
    assert client.handshake("PLAIN") == 0
    assert client.authenticate(plainly()) == (-99, 0)
    client.close()
    monkeypatch.undo()
    again = Dialogue(plain)
    again.handshake("PLAIN")
    assert again.authenticate(plainly())[0] == 0
    again.close()


def test_many_half_open_proofs_leave_room_for_an_honest_one() -> None:
    small = KafkaSettings(
        KafkaSection(connections_max=64, connections_per_address_max=64), authentication_timeout_s=3.0
    )
    broker = FakeBroker(small, gate=gate())
    add(broker, "alice")
    crowd = []
    for i in range(400):
        half = Dialogue(broker)
        half.send(17, 1, struct.pack(">h", 13) + b"SCRAM-SHA-256")
        crowd.append(half)
        if i % 100 == 50:
            honest = Dialogue(broker)
            assert honest.handshake("PLAIN") == 0
            assert honest.authenticate(plainly())[0] == 0
            honest.close()
    eventually(lambda: broker.server is not None and broker.server.connection_count == 0)
    for half in crowd:
        half.close()
    broker.close()


MESSAGES = st.lists(
    st.one_of(
        st.binary(max_size=300),
        st.sampled_from([plainly(), plainly(password="x"), bearer("x"), b"n,,n=alice,r=abc", b"c=biws,r=abc,p=AAAA"]),
    ),
    min_size=1,
    max_size=3,
)


@given(st.sampled_from(["SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]), st.sampled_from([0, 1]), MESSAGES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_said_nobody_comes_in(
    plain: FakeBroker, monkeypatch: pytest.MonkeyPatch, mechanism: str, version: int, messages: list[bytes]
) -> None:
    monkeypatch.setattr("tidemill.security.sasl.FIRST_DELAY_S", 0.0)
    client = Dialogue(plain)
    assert client.handshake(mechanism, version) == 0
    for message in messages:
        if version == 0:
            if not message or client.raw(message) == b"":
                break
        elif client.authenticate(message)[0] != 0:
            break
    assert not client.asks()
    client.close()


def without_users() -> Authenticator:
    """An authenticator that knows no user, without a metastore."""
    users = Users.__new__(Users)

    async def credential(user: str, mechanism: int) -> None:
        return None

    async def decoy(user: str) -> Credential:
        return decoy_credential(user, SCRAM_SHA_512, b"secret", ())

    users.credential = credential  # type: ignore[method-assign,assignment]
    users.decoy = decoy  # type: ignore[method-assign,assignment]
    return Authenticator(users, Rand())


async def test_the_authenticator_takes_turns_with_passwords() -> None:
    """Deriving a password costs milliseconds of CPU time, so at most two are derived concurrently."""
    authenticator = without_users()
    running = peak = 0
    real = asyncio.to_thread

    async def counted(*arguments: Any) -> Any:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        try:
            return await real(*arguments)
        finally:
            running -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidemill.security.sasl.asyncio.to_thread", counted)
        results = await asyncio.gather(
            *(authenticator.verify_password("u", "p", "h") for _ in range(10)), return_exceptions=True
        )
    assert all(isinstance(result, Exception) for result in results)
    assert peak == 2
    assert ScramServer(SCRAM_SHA_256, "n").read_client_first(b"n,,n=u,r=x") == "u"


async def test_failing_passwords_of_one_user_and_too_many_in_all_wait_to_be_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidemill.security.sasl.matches_password", lambda *_: False)
    monkeypatch.setattr("tidemill.security.sasl.LONGEST_DELAY_S", 60.0)
    authenticator = without_users()

    async def attempt(attempts: Iterable[tuple[str, str]]) -> Counter[str]:
        """Return the errors of concurrent attempts: (user, address)."""
        checks = (authenticator.verify_password(user, "p", host) for user, host in attempts)
        found = await asyncio.gather(*checks, return_exceptions=True)
        return Counter(type(error).__name__ for error in found)

    failed, refused = AuthenticationFailedError.__name__, TooManyChecksError.__name__
    for _ in range(FAILED_PER_USER):
        assert await attempt([("u", "a")]) == {failed: 1}
    assert await attempt([("u", "a"), ("u", "b"), ("v", "a")]) == {refused: 1, failed: 2}, (
        "only that user at that address"
    )
    users = [(f"u{i}", "c") for i in range(CHECKS_PER_ADDRESS + 8)]
    assert await attempt(users) == {failed: CHECKS_PER_ADDRESS, refused: 8}
    hosts = [("u", f"d{i}") for i in range(CHECKS_MAX + 88)]
    assert await attempt(hosts) == {failed: CHECKS_MAX, refused: 88}
    monkeypatch.setattr("tidemill.security.sasl.LONGEST_DELAY_S", 0.01)
    assert await attempt([("u", "e")] * FAILED_PER_USER) == {failed: FAILED_PER_USER}
    await until(lambda: ("e", "u") not in authenticator._checks._failed)
    assert await attempt([("u", "e")]) == {failed: 1}
    monkeypatch.setattr("tidemill.security.sasl.matches_password", lambda *_: True)

    async def credential(user: str, mechanism: int) -> Credential:
        return decoy_credential(user, mechanism, b"secret", ())

    authenticator.users.credential = credential  # type: ignore[method-assign]
    burst = (authenticator.verify_password("w", "p", "a") for _ in range(500))
    assert set(await asyncio.gather(*burst)) == {"User:w"}, "all connections of an address after a restart"


@pytest.mark.parametrize("version", [0, 1])
def test_a_password_for_whose_check_there_is_no_room_is_not_called_wrong(
    plain: FakeBroker, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setattr("tidemill.security.sasl.CHECKS_PER_ADDRESS", 0)
    with structlog.testing.capture_logs() as logs:
        client = Dialogue(plain)
        assert client.handshake("PLAIN", version) == 0
        if version == 0:
            assert client.raw(plainly()) == b""
        else:
            assert client.authenticate(plainly()) == (-99, 0), "closed without an answer"
        client.close()
        eventually(lambda: [line for line in logs if line["event"] == "kafka.connection_not_secured"])
    assert not [line for line in logs if line["event"] in ("kafka.request_failed", "kafka.authentication_failed")]
    monkeypatch.undo()
    again = Dialogue(plain)
    again.handshake("PLAIN")
    assert again.authenticate(plainly())[0] == 0
    again.close()
