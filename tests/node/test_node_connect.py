"""Unmodified Kafka Connect in distributed mode: a source stays exactly-once although its worker freezes and resumes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import jvm
import pytest
from quick import Quick, eventually

pytestmark = pytest.mark.java


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quick]:
    kafka = {"group_initial_rebalance_delay_ms": 0, "group_min_session_timeout_ms": 1_000}
    node = Quick(tmp_path_factory.mktemp("connect"), kafka)
    yield node
    node.end()


@pytest.fixture
def worker(node: Quick) -> Iterator[Callable[[str], jvm.ConnectWorker]]:
    made: list[jvm.ConnectWorker] = []

    def start(name: str) -> jvm.ConnectWorker:
        made.append(jvm.ConnectWorker(node.root / f"{name}.properties", node.address))
        return made[-1]

    yield start
    for each in made:
        each.kill()


def add(path: Path, start: int, end: int) -> None:
    with path.open("a") as file:
        file.write("".join(f"line {number}\n" for number in range(start, end)))


def test_a_frozen_worker_is_taken_over_and_fenced_and_every_line_is_in_the_topic_once(
    node: Quick, worker: Callable[[str], jvm.ConnectWorker]
) -> None:
    source, sink = node.root / "source.txt", node.root / "sink.txt"

    def through(count: int) -> bool:
        return sink.exists() and {f"line {number}" for number in range(count)} <= set(sink.read_text().split("\n"))

    def configure(asked: jvm.ConnectWorker, name: str, kind: str, **more: str) -> None:
        config = {"connector.class": f"FileStream{kind}", "tasks.max": "1"}
        config |= {key.replace("_", "."): value for key, value in more.items()}
        eventually(lambda: asked("PUT", f"/connectors/{name}/config", config))

    node.make("copied", 1)
    add(source, 0, 100)
    workers = [worker("first"), worker("second")]
    eventually(lambda: all(each.is_up() for each in workers))
    asked = workers[0]
    configure(asked, "source", "Source", file=str(source), topic="copied", exactly_once_support="required")
    configure(asked, "sink", "Sink", file=str(sink), topics="copied")
    eventually(lambda: through(100))

    eventually(lambda: asked.task("source")[0] == "RUNNING")
    owner = asked.task("source")[1]
    frozen, other = sorted(workers, key=lambda each: each.id != owner)
    add(source, 100, 200)
    frozen.signal(signal.SIGSTOP)
    eventually(lambda: other.task("source") == ("RUNNING", other.id))
    add(source, 200, 300)
    eventually(lambda: through(300))
    frozen.signal(signal.SIGCONT)  # it has lines to read that are in the topic already
    add(source, 300, 400)
    eventually(lambda: through(400))
    eventually(lambda: {each.task("source")[0] for each in workers} == {"RUNNING"})

    frozen.kill()
    add(source, 400, 500)
    eventually(lambda: through(500))
    assert [value for _, _, value in node.read("copied", 1)[0]] == [b"line %d" % number for number in range(500)]

    for name in ("source", "sink"):
        eventually(lambda: other("PUT", f"/connectors/{name}/stop"))  # noqa: B023
        eventually(lambda: other("DELETE", f"/connectors/{name}/offsets"))  # noqa: B023
        assert other("GET", f"/connectors/{name}/offsets") == {"offsets": []}
        eventually(lambda: other("DELETE", f"/connectors/{name}"))  # noqa: B023
