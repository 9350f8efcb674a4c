"""docs/reference/kafka.md is checked against the code: every API with its versions, every config with its meaning."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tidemill.kafka.groups.configs import SETTINGS as GROUP_SETTINGS
from tidemill.kafka.handlers import APIS
from tidemill.topics.config.configs import SETTINGS, Setting

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/reference/kafka.md").read_text()
CLIENTS = ROOT / "tests/clients"


def test_every_api_that_is_served_has_a_row_with_its_versions_and_no_other_has_one() -> None:
    rows = {
        (int(key), name, int(low), int(high))
        for key, name, low, high in re.findall(r"^\| (\d+) \| (\w+) \| (\d+)–(\d+) \|", TEXT, re.MULTILINE)
    }
    served = {
        (api.key, "".join(part.capitalize() for part in api.name.split("_")), api.min_version, api.max_version)
        for api in APIS.values()
    }
    assert rows == served


def test_every_topic_config_has_a_row_that_says_what_describe_configs_says() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| (\w+) \| (.*) \|$", TEXT, re.MULTILINE)
    assert rows == [(name, s.default, s.meaning, s.says) for name, s in SETTINGS.items()]


def test_every_group_config_has_a_row_that_says_what_describe_configs_says() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `(\d+)` \| `([\w.]+)` to `([\w.]+)` \| (.*) \|$", TEXT, re.MULTILINE)

    def bound(which: str, setting: Setting) -> str:
        return setting.broker.replace("group.consumer.", f"group.consumer.{which}.")

    assert rows == [(name, s.default, bound("min", s), bound("max", s), s.says) for name, s in GROUP_SETTINGS.items()]


def test_every_client_of_the_suite_has_a_row_with_the_version_that_is_pinned_and_a_test() -> None:
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \| .+ \| `(.+)` \|$", TEXT, re.MULTILINE)

    def pinned(path: str, pattern: str) -> str:
        return re.findall(pattern, (CLIENTS / path).read_text())[0]

    kafka = pinned("java/kafka/pom.xml", r"<version>(\d+\..+)</version>")
    assert {client: version for client, version, _ in rows} == {
        "Apache Kafka, Java": kafka,
        "Apache Kafka, command-line tools": kafka,
        "Kafka Connect": pinned("java/connect/pom.xml", r"<version>(\d+\..+)</version>"),
        "Kafka Streams": pinned("java/streams/pom.xml", r"<version>(\d+\..+)</version>"),
        "kafkajs": json.loads((CLIENTS / "package.json").read_text())["dependencies"]["kafkajs"],
        "franz-go": pinned("go/go.mod", r"twmb/franz-go v(\S+)"),
        "sarama": pinned("go/go.mod", r"IBM/sarama v(\S+)"),
        "Spark's Kafka connector": pinned("java/spark/pom.xml", r"<version>(\d+\..+)</version>"),
    }
    assert all((ROOT / test).is_file() for _, _, test in rows)


CONFLUENT = {
    "test_abort_retry_commit_transaction", "test_abort_transaction", "test_basic_operations",
    "test_commit_transaction", "test_consume_error", "test_consume_error_commit", "test_consume_error_store_offsets",
    "test_consumer_memberid", "test_consumer_topicpartition_metadata", "test_consumer_upgrade_downgrade",
    "test_cooperative_rebalance_1", "test_cooperative_rebalance_2", "test_delete_records",
    "test_describe_consumer_groups_compatability", "test_describe_operations", "test_incremental_alter_configs",
    "test_incremental_assign", "test_list_offsets", "test_send_offsets_committed_transaction",
    "test_user_scram_credentials",
}  # fmt: skip
"""The functions of confluent-kafka-python's integration tests; the upgrade counts for each of its three assignors."""
COUNT = len(CONFLUENT) + 2


def test_every_case_of_confluents_suite_is_one_of_ours_or_is_told_with_its_reason() -> None:
    ours = set(re.findall(r"^def (test_\w+)", (ROOT / "tests/kafka/test_kafka_confluent_suite.py").read_text(), re.M))
    reported = dict(re.findall(r"^\| confluent \| `(\w+)` \((\d+)\) \| .+ \|$", TEXT, re.MULTILINE))
    assert not ours & reported.keys() and ours | reported.keys() == CONFLUENT
    floor = COUNT - sum(map(int, reported.values()))
    assert re.search(rf"^\| confluent-kafka-python, .* \| {floor} of {COUNT} \|$", TEXT, re.MULTILINE)
