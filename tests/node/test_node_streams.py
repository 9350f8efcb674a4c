"""Unmodified Kafka Streams: counts stay exact after each kill, restored from changelogs that the node compacted."""

from __future__ import annotations

import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka as ck
import jvm
import pytest
from quick import PARTITIONS, Quick, eventually

from support.waiting import DEADLINE_S

pytestmark = pytest.mark.java

WINDOW_MS = 1_000
INTERNAL = ("app-counts-changelog", "app-windows-changelog", "app-words-repartition")


class Lines:
    """The input written so far: two words per line, one line per tenth of a second of record time."""

    def __init__(self, node: Quick) -> None:
        self._node, self._said = node, 0
        self._begin_ms = int(time.time() * 1_000) - 3_600_000
        self._producer = node.producer(**{"linger.ms": 1})
        self.words = Counter[str]()
        self.windows = Counter[str]()

    def say(self, count: int) -> None:
        for number in range(self._said, self._said + count):
            at_ms = self._begin_ms + number * 100
            pair = f"w{number % 13}", f"x{number % 5}"
            self._producer.produce("lines", key=str(number), value=" ".join(pair), timestamp=at_ms)
            self.words.update(pair)
            self.windows.update(f"{word}@{at_ms // WINDOW_MS * WINDOW_MS}" for word in pair)
        assert self._producer.flush(60) == 0
        self._said += count

    def counted(self, topic: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for rows in self._node.read(topic).values():
            for _, key, value in rows:
                found[(key or b"").decode()].append(int(value or b""))
        return found

    def exact(self, times: int = 1) -> None:
        """Check that each word was counted up from one, `times` times: once per fresh start of the application."""
        for topic, words in (("counted", self.words), ("windowed", self.windows)):
            wanted = times * sum(words.values())
            eventually(lambda: sum(map(len, self.counted(topic).values())) >= wanted)  # noqa: B023
            assert self.counted(topic) == {word: [*range(1, n + 1)] * times for word, n in words.items()}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quick]:
    kafka = {"group_initial_rebalance_delay_ms": 0, "group_min_session_timeout_ms": 1_000}
    node = Quick(tmp_path_factory.mktemp("streams"), kafka)
    yield node
    node.end()


@pytest.fixture
def instance(node: Quick) -> Iterator[Callable[..., jvm.StreamsApp]]:
    made: list[jvm.StreamsApp] = []

    def start(**more: Any) -> jvm.StreamsApp:
        configs = {
            "application.id": "app",
            "bootstrap.servers": node.address,
            "state.dir": str(node.root / f"state-{len(made)}"),
            "processing.guarantee": "exactly_once_v2",
            "commit.interval.ms": 100,
            "statestore.cache.max.bytes": 0,
            "repartition.purge.interval.ms": 200,
            "session.timeout.ms": 3_000,
            "heartbeat.interval.ms": 300,
            "window_ms": WINDOW_MS,
        }
        made.append(jvm.StreamsApp(configs | {name.replace("_", "."): value for name, value in more.items()}))
        return made[-1]

    yield start
    for app in made:
        app.kill()


def low(node: Quick, topic: str) -> list[int]:
    client = node.consumer()
    ends = [client.get_watermark_offsets(ck.TopicPartition(topic, p), timeout=DEADLINE_S) for p in range(PARTITIONS)]
    client.close()
    return [end[0] for end in ends]


def test_every_word_is_counted_once_when_an_instance_is_killed_and_when_the_application_is_reset(
    node: Quick, instance: Callable[..., jvm.StreamsApp]
) -> None:
    for topic in ("lines", "counted", "windowed"):
        node.make(topic)
    lines = Lines(node)
    first = instance()
    for _ in range(4):
        lines.say(100)
    lines.exact()
    assert set(INTERNAL) <= node.admin.list_topics(timeout=DEADLINE_S).topics.keys()
    eventually(lambda: all(low(node, "app-words-repartition")), "what was repartitioned is not purged")
    words = len(lines.words)

    def held() -> int:
        return sum(map(len, node.read("app-counts-changelog").values()))

    eventually(lambda: held() < 5 * words, "the changelog is not compacted")
    second = instance()
    eventually(lambda: second.state == "RUNNING" and second.restored.get("counts", 0) > 0)
    lines.say(100)
    first.kill()
    lines.say(100)
    lines.exact()
    assert second.restored["windows"] > second.restored["counts"] >= words
    assert second.failed == []
    second.close()

    reset = ("--bootstrap-server", node.address, "--application-id", "app", "--input-topics", "lines", "--force")
    subprocess.run(
        jvm.command("kafka", "org.apache.kafka.tools.StreamsResetter", *reset), check=True, timeout=DEADLINE_S
    )
    assert not set(INTERNAL) & node.admin.list_topics(timeout=DEADLINE_S).topics.keys()
    third = instance()
    lines.exact(times=2)
    assert third.failed == []


def test_the_streams_group_protocol_is_refused_in_words(instance: Callable[..., jvm.StreamsApp]) -> None:
    app = instance(application_id="other", group_protocol="streams")
    eventually(lambda: bool(app.failed))
    assert "does not support the STREAMS group protocol" in app.failed[0]
