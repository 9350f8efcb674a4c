"""`tidemill topic alter, produce and consume` against a real endpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.kafka.harness import RealBroker
from support.waiting import eventually
from tidemill.base.errors import InvalidError
from tidemill.cli.topic.line_format import JsonLineParser, TextLineParser, format_json_line, format_text_line
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, PipelineRow, TopicRow

TIMEOUT_S = 120


class World:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.broker = RealBroker(f"file://{path}/objects", f"sqlite://{path}/consensus.db")
        urls = f'[objects]\nurl = "file://{path}/objects"\n[consensus]\nurl = "sqlite://{path}/consensus.db"\n'
        (path / "tidemill.toml").write_text(f'[node]\nkafka = "{self.broker.address}"\n{urls}')

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tidemill", "topic", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        return subprocess.Popen(command, cwd=self.path, **pipes)

    def run(self, *arguments: str, text: bytes = b"", code: int = 0) -> str:
        with self.start(*arguments) as running:
            out, err = running.communicate(text, timeout=TIMEOUT_S)
        assert running.returncode == code, err.decode()
        assert b"Traceback" not in err
        return (out if code == 0 else err).decode()

    def row(self, name: str) -> TopicRow:
        found = self.broker.portal.call(self.broker.catalogue.get(TopicRow, name))
        assert found is not None
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("cli"))
    yield world
    world.broker.close()


def test_a_topic_is_altered_whole_or_not_at_all(world: World) -> None:
    world.broker.create_topic("t", 2)
    out = world.run("alter", "t", "--partitions", "4", "--set", "retention.ms=5", "--dry-run", "--json")
    assert (json.loads(out)[0]["partitions"], world.row("t").partitions) == (4, 2)
    world.run("alter", "t", "--partitions", "4", "--set", "retention.ms=5", "--set", "segment.ms=9")
    assert (world.row("t").partitions, world.row("t").config) == (
        4,
        {"retention.ms": "5", "segment.ms": "9"},
    )
    world.run("alter", "t", "--unset", "segment.ms")
    for wrong in (
        ["--partitions", "3"],
        ["--set", "preallocate=perhaps"],
        ["--unset", "no.such"],
        ["--set", "retention.ms"],
        [],
    ):
        reported = world.run("alter", "t", "--set", "retention.ms=6", *wrong, code=2) if wrong else ""
        reported = reported or world.run("alter", "t", code=2)
        assert len(reported.strip().splitlines()) == 1
    assert (world.row("t").partitions, world.row("t").config) == (4, {"retention.ms": "5"})
    world.broker.create_topic("captured", 1, kind="capture")
    assert "captured table" in world.run("alter", "captured", "--partitions", "2", code=2)
    assert "no such topic" in world.run("alter", "nowhere", "--partitions", "2", code=2)


def test_a_topic_that_a_capture_writes_or_a_pipeline_reads_is_deleted_only_when_told_twice(world: World) -> None:
    catalogue, call = world.broker.catalogue, world.broker.portal.call
    world.broker.create_topic("shop.orders", 1, kind="capture")
    world.broker.create_topic("read", 1)
    call(catalogue.put(CaptureRow("shop", "1", "s", "p", 1, True)))
    table = CaptureTableRow("shop", "public.orders", "shop.orders")
    call(catalogue.change_table("shop", "public.orders", lambda _: table))
    call(catalogue.put(PipelineRow("p", {"reads": "topic:read", "orders": "capture:shop:public.orders"})))
    assert "capture:shop, pipeline:p" in world.run("delete", "shop.orders", code=2)
    assert "pipeline:p" in world.run("delete", "read", code=2)
    world.run("delete", "read", "--force")
    assert "shop.orders" in world.run("list")


def test_lines_go_in_and_come_out(world: World) -> None:
    world.broker.create_topic("lines", 3)
    world.run("produce", "lines", "-K", "=", "-H", "from=here", "--tombstones", text=b"a=1\nb=x=y\na=\n")
    found = [json.loads(line) for line in world.run("consume", "lines", "--json").splitlines()]
    assert sorted((r["key"], r["value"] or "", r["headers"][0][1]) for r in found) == [
        ("a", "", "here"), ("a", "1", "here"), ("b", "x=y", "here")
    ]  # fmt: skip
    assert next(r["value"] for r in found if r["key"] == "a" and r["value"] is None) is None
    world.broker.create_topic("one", 1)
    source = world.path / "lines.txt"
    source.write_bytes(b"".join(b"%d\n" % n for n in range(5000)))
    world.run("produce", "one", str(source))
    assert world.run("consume", "one").splitlines() == [str(n) for n in range(5000)]
    assert world.run("consume", "one", "--from", "10", "--to", "13").split() == ["10", "11", "12"]
    assert world.run("consume", "one", "--from", "-2", "--keys").splitlines() == ["\t4998", "\t4999"]
    assert world.run("consume", "one", "--count", "3", "-p", "0").split() == ["0", "1", "2"]
    assert world.run("consume", "one", "--from", "@9999999999999") == ""
    assert world.run("consume", "one", "--to", "@0") == ""
    assert world.run("consume", "one", "--from", "end") == ""


def test_a_topic_is_copied_by_json_byte_for_byte(world: World) -> None:
    world.broker.create_topic("source", 1)
    world.broker.create_topic("copy", 1)
    lines = [
        {
            "key": {"base64": "/wA="},
            "value": "ä\n\t",
            "headers": [["h", {"base64": "gA=="}], ["h", None]],
            "timestamp": 7,
        },
        {"key": None, "value": None, "headers": [], "timestamp": 8},
    ]
    world.run("produce", "source", "--json", text="\n".join(json.dumps(line) for line in lines).encode())
    first = world.run("consume", "source", "--json")
    world.run("produce", "copy", "--json", text=first.encode())
    strip = [{k: v for k, v in json.loads(line).items() if k not in ("topic",)} for line in first.splitlines()]
    again = [
        {k: v for k, v in json.loads(x).items() if k != "topic"}
        for x in world.run("consume", "copy", "--json").splitlines()
    ]
    assert again == strip
    assert [{k: r[k] for k in lines[0]} for r in strip] == lines


def test_bad_input_is_one_sentence_and_what_came_before_it_is_acknowledged(world: World) -> None:
    world.broker.create_topic("bad", 1)
    reported = world.run("produce", "bad", "-K", ":", text=b"a:1\nno key\nb:2\n", code=2)
    assert "1 of 1 records acknowledged" in reported
    assert "has no key" in reported.splitlines()[-1]
    assert world.run("consume", "bad", "--keys") == "a\t1\n"
    for arguments in (
        ["consume", "bad", "--from", "7"], ["consume", "bad", "--from", "soon"], ["consume", "bad", "-p", "9"],
        ["consume", "nowhere.else"], ["consume", "bad", "-X", "no.such=1"], ["consume", "bad", "-X", "x"],
        ["produce", "bad", "/no/file"], ["produce", "bad", "-p", "9"],
    ):  # fmt: skip
        assert world.run(*arguments, text=b"x\n", code=2)


def test_ctrl_c_ends_a_follower_and_a_reader_that_has_enough_ends_it_too(world: World) -> None:
    world.broker.create_topic("live", 1)
    with world.start("consume", "live", "--follow") as following:
        world.run("produce", "live", text=b"now\n")
        assert following.stdout is not None
        assert following.stdout.readline() == b"now\n", "shown though its output is a pipe"
        following.send_signal(signal.SIGINT)
        assert following.wait(TIMEOUT_S) == 130
        assert following.stderr is not None
        assert b"Traceback" not in following.stderr.read()
    with world.start("produce", "live") as typing:
        assert typing.stdin is not None
        typing.stdin.write(b"one\ntwo\n")
        typing.stdin.flush()
        eventually(lambda: world.run("consume", "live").split() == ["now", "one", "two"])
        typing.send_signal(signal.SIGINT)
        typing.stdin.close()
        assert typing.wait(TIMEOUT_S) == 130
    with world.start("consume", "live", "--follow") as enough:
        assert enough.stdout is not None
        enough.stdout.close()
        world.run("produce", "live", text=b"x" * 200_000 + b"\n")
        assert enough.wait(TIMEOUT_S) == 0


class Message:
    def __init__(self, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]) -> None:
        self._of = key, value, headers

    def __getattr__(self, name: str) -> Any:
        key, value, headers = self._of
        found = {"key": key, "value": value, "headers": headers, "topic": "t", "partition": 2, "offset": 3}
        return lambda: (1, 44) if name == "timestamp" else found[name]


BYTES = st.none() | st.binary(max_size=20) | st.text(max_size=8).map(lambda text: text.encode())


@given(BYTES, BYTES, st.lists(st.tuples(st.text(max_size=5), BYTES), max_size=3))
def test_a_record_is_the_same_after_json(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    read = JsonLineParser().read(format_json_line(Message(key, value, headers)))
    assert (read.key, read.value, list(read.headers), read.partition, read.timestamp_ms) == (key, value, headers, 2, 44)


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode()))
def test_any_line_is_a_record_or_refused(line: bytes) -> None:
    for reading in (JsonLineParser(), TextLineParser("=", (), tombstones=True)):
        with suppress(InvalidError):
            assert reading.read(line).headers is not None


def test_text_lines_show_headers_and_keys_before_the_value() -> None:
    message = Message(b"k", None, [("a", b"1"), ("b", None)])
    assert format_text_line(message, keys=True, headers=True) == b"a=1,b=\tk\t\n"
