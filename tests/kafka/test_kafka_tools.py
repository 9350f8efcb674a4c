"""The command-line tools of Apache Kafka, unmodified, against a tidemill broker."""

from __future__ import annotations

from collections.abc import Iterator

import confluent_kafka as ck
import pytest

from support.kafka.foreign import SETTINGS, Driver
from support.kafka.harness import RealBroker
from support.waiting import eventually

pytestmark = pytest.mark.java

TOOLS = "org.apache.kafka.tools"


class Tools:
    def __init__(self, broker: RealBroker) -> None:
        self.broker = broker
        self._driver = Driver("java")

    def __call__(self, tool: str, *words: str, text: str = "", code: int = 0) -> str:
        return self.bare(tool, "--bootstrap-server", self.broker.address, *words, text=text, code=code)

    def bare(self, tool: str, *words: str, text: str = "", code: int = 0) -> str:
        asked = {"class": f"{TOOLS}.{tool}", "args": words, "input": text}
        ended, said = self._driver("tool", **asked)
        assert ended == code, said
        return str(said)

    def close(self) -> None:
        self._driver.close()


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    broker = RealBroker(settings=SETTINGS)
    try:
        tools = Tools(broker)
        yield tools
        tools.close()
    finally:
        broker.close()


def test_kafka_topics_creates_lists_describes_grows_and_deletes(tools: Tools) -> None:
    tools("TopicCommand", "--create", "--topic", "made", "--partitions", "2", "--config", "retention.ms=60000")
    assert "made" in tools("TopicCommand", "--list").split()
    said = tools("TopicCommand", "--describe", "--topic", "made")
    assert "PartitionCount: 2" in said and "retention.ms=60000" in said
    tools("TopicCommand", "--alter", "--topic", "made", "--partitions", "3")
    assert "PartitionCount: 3" in tools("TopicCommand", "--describe", "--topic", "made")
    assert "topic exists: topic=made" in tools("TopicCommand", "--create", "--topic", "made", code=1)
    tools("TopicCommand", "--delete", "--topic", "made")
    eventually(lambda: "made" not in tools("TopicCommand", "--list").split())


def test_the_console_producer_and_consumer_and_their_group(tools: Tools) -> None:
    tools.broker.create_topic("lines", 1)
    keyed = ("--reader-property", "parse.key=true", "--reader-property", "key.separator=:")
    tools("ConsoleProducer", "--topic", "lines", *keyed, text="a:1\nb:2\nc:3\n")
    shown = ("--formatter-property", "print.key=true", "--formatter-property", "print.offset=true")
    read = ("--topic", "lines", "--from-beginning", "--max-messages", "3", "--timeout-ms", "30000")
    said = tools("consumer.ConsoleConsumer", *read, *shown, "--group", "readers")
    assert [line for line in said.splitlines() if line.startswith("Offset")] == [
        "Offset:0\ta\t1",
        "Offset:1\tb\t2",
        "Offset:2\tc\t3",
    ]
    group = "consumer.group.ConsumerGroupCommand"
    assert "readers" in tools(group, "--list").split()
    said = tools(group, "--describe", "--group", "readers")
    row = next(line.split() for line in said.splitlines() if line.split()[:2] == ["readers", "lines"])
    assert row[2:6] == ["0", "3", "3", "0"], "partition, offset, end and lag"
    tools(group, "--reset-offsets", "--to-offset", "1", "--group", "readers", "--topic", "lines", "--execute")
    assert "b\t2" in tools(
        "consumer.ConsoleConsumer", "--topic", "lines", "--group", "readers", "--max-messages", "2", *shown
    )
    tools(group, "--delete", "--group", "readers")
    assert "readers" not in tools(group, "--list").split()


def test_kafka_get_offsets_delete_records_and_log_dirs(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> None:
    tools.broker.create_topic("cut", 1)
    tools("ConsoleProducer", "--topic", "cut", text="".join(f"{n}\n" for n in range(10)))
    assert "cut:0:10" in tools("GetOffsetShell", "--topic", "cut")
    plan = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.write_text('{"partitions": [{"topic": "cut", "partition": 0, "offset": 4}], "version": 1}')
    assert "low_watermark: 4" in tools("DeleteRecordsCommand", "--offset-json-file", str(plan))
    assert "cut:0:4" in tools("GetOffsetShell", "--topic", "cut", "--time", "-2")
    assert '"partition":"cut-0"' in tools("LogDirsCommand", "--describe", "--topic-list", "cut")


def test_kafka_transactions_lists_describes_and_aborts(tools: Tools) -> None:
    tools.broker.create_topic("written", 1)
    client = ck.Producer({"bootstrap.servers": tools.broker.address, "transactional.id": "open/1", "log_level": 0})
    client.init_transactions(30)

    def begin() -> None:
        client.begin_transaction()
        client.produce("written", b"v", partition=0)
        client.flush(30)

    def row(*words: str) -> list[str]:
        """Return the fields of the first row below the header, or [] without rows."""
        lines = tools("TransactionsCommand", *words).splitlines()
        return lines[1].split() if len(lines) > 1 else []

    begin()
    for words in ((), ("--transactional-id-pattern", "open/[0-9]"), ("--duration-filter", "0")):
        assert row("list", *words)[0] == "open/1" and row("list", *words)[-1] == "Ongoing"
    assert row("list", "--transactional-id-pattern", "open") == []
    assert "written-0" in row("describe", "--transactional-id", "open/1")
    place = ("--topic", "written", "--partition", "0")
    assert row("describe-producers", *place)[-1] == "0", "where it began"
    assert row("find-hanging", "--broker-id", "1") == []
    tools("TransactionsCommand", "abort", *place, "--start-offset", "0")
    assert row("describe-producers", *place)[-1] == "None"
    client.abort_transaction(30)
    begin()
    tools("TransactionsCommand", "forceTerminateTransaction", "--transactionalId", "open/1")
    with pytest.raises(ck.KafkaException) as fenced:
        client.commit_transaction(30)
    assert fenced.value.args[0].code() in (ck.KafkaError._FENCED, ck.KafkaError.INVALID_PRODUCER_EPOCH)


def test_kafka_groups_of_every_kind_and_offsets_that_are_deleted_and_reset(tools: Tools) -> None:
    tools.broker.create_topic("grouped", 2)
    produce = ck.Producer({"bootstrap.servers": tools.broker.address})
    for number in range(10):
        produce.produce("grouped", b"%d" % number, partition=number % 2, timestamp=1_000 + number)
    assert produce.flush(30) == 0
    group = "consumer.group.ConsumerGroupCommand"
    config = {"bootstrap.servers": tools.broker.address, "enable.auto.commit": False}
    members = [ck.Consumer({**config, "group.id": kind, "group.protocol": kind}) for kind in ("classic", "consumer")]

    def joined(member: ck.Consumer) -> bool:
        member.poll(0.1)
        return len(member.assignment()) == 2

    for member in members:
        member.subscribe(["grouped"])
        eventually(lambda: joined(member))  # noqa: B023
        member.commit(offsets=[ck.TopicPartition("grouped", p, 3) for p in range(2)], asynchronous=False)

    def rows(*words: str) -> dict[str, list[str]]:
        lines = [line.split() for line in tools(group, *words).splitlines()]
        return {line[0]: line[1:] for line in lines if line and line[0] in ("classic", "consumer", "new")}

    assert {name: row[0].lower() for name, row in rows("--list", "--type").items()} == {
        "classic": "classic", "consumer": "consumer",
    }  # fmt: skip
    described = rows("--describe", "--all-groups")
    assert all(row[2:5] == ["3", "5", "2"] for row in described.values()), described
    assert {row[-2] for row in rows("--describe", "--all-groups", "--state").values()} == {"Stable"}
    assert all("grouped:0,1" in row for row in rows("--describe", "--all-groups", "--members", "--verbose").values())
    assert "GroupSubscribedToTopic" in tools(group, "--delete-offsets", "--group", "classic", "--topic", "grouped")
    assert "GroupNotEmpty" in tools(group, "--delete", "--group", "consumer")
    for member in members:
        member.close()
    tools(group, "--delete-offsets", "--group", "classic", "--topic", "grouped")
    assert "classic" not in rows("--describe", "--group", "classic", "--offsets")
    reset = ("--reset-offsets", "--group", "new", "--topic", "grouped", "--execute")
    for words, offset in (("--to-latest", "5"), ("--shift-by -2", "3"), ("--to-datetime 1970-01-01T00:00:01.004", "2")):
        tools(group, *reset, *words.split())
        assert rows("--describe", "--group", "new")["new"][2] == offset, words
    times = {"-1": "5", "-2": "0", "-3": "4", "-4": "0", "1004": "2", "2000": ""}
    for time, offset in times.items():
        said = tools("GetOffsetShell", "--topic-partitions", "grouped:0", "--time", time)
        assert f"grouped:0:{offset}" in said.splitlines() if offset else "grouped:0" not in said


def test_what_is_not_served_is_refused_in_words(tools: Tools) -> None:
    for tool, *words in (
        ("FeatureCommand", "upgrade", "--feature", "transaction.version=2"),
        ("consumer.group.ShareGroupCommand", "--describe", "--group", "g"),
        ("streams.StreamsGroupCommand", "--describe", "--group", "g"),
    ):
        said = tools(tool, *words, code=0 if "Share" in tool else 1)
        assert "does not support" in said, (tool, said)


def test_what_shows_a_cluster_and_measures_it(tools: Tools) -> None:
    tools.broker.create_topic("measured", 1)
    assert "usable: 13" in next(
        line for line in tools("BrokerApiVersionsCommand").splitlines() if line.strip().startswith("Produce(0)")
    )
    run = ("--topic", "measured", "--num-records", "500", "--record-size", "100", "--throughput", "-1")
    server = ("--command-property", f"bootstrap.servers={tools.broker.address}")
    assert "500 records sent" in tools.bare("ProducerPerformance", *run, *server)
    said = tools("ConsumerPerformance", "--topic", "measured", "--num-records", "500", "--timeout", "10000")
    assert said.splitlines()[-1].split(", ")[4] == "500"
    assert tools("TransactionsCommand", "list").split()[0] == "TransactionalId"
    said = tools("TransactionsCommand", "describe-producers", "--topic", "measured", "--partition", "0")
    assert len(said.splitlines()) == 2, "the producer that was measured"
    assert "No partition reassignments found." in tools("reassign.ReassignPartitionsCommand", "--list")
    assert "DESCRIBE_QUORUM" in tools("MetadataQuorumCommand", "describe", "--status", code=1)
