"""A node of `quick_node.py` in a separate process, over a directory and SQLite, and the operations of its clients."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from support.ports import free_port
from support.waiting import DEADLINE_S, eventually
from tidemill.base.config.config import parse

QUIET = {"log_level": 0, "reconnect.backoff.max.ms": 200, "retry.backoff.ms": 20, "retry.backoff.max.ms": 200}
PARTITIONS = 2


class Quick:
    """A quick node and its clients. `kafka`: that section of its configuration."""

    def __init__(self, root: Path, kafka: Mapping[str, Any] | None = None) -> None:
        self.root = root
        self.address, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._config = root / "node.json"
        sections = {
            "node": {"name": "n1", "data": str(root / "data"), "http": http, "kafka": self.address},
            "objects": {"url": f"file://{root}/objects"},
            "consensus": {"url": f"sqlite://{root}/consensus.db"},
            "metastore": {"checkpoint_interval_s": 0.2, "persist_interval_s": 0.2},
            "retention": {"collect_after_s": 1.0},
            "storage": {"l1": True, "l1_object_mb": 1, "l1_min_s": 0.2, "l1_max_s": 0.5},
            "kafka": dict(kafka or {}),
        }
        self._config.write_text(parse(sections, origin="").model_dump_json())
        self.start()

    def start(self) -> None:
        with (self.root / "node.log").open("ab") as log:
            program = Path(__file__).parent / "quick_node.py"
            self._process = subprocess.Popen([sys.executable, str(program), str(self._config)], stdout=log, stderr=log)
        self.admin = AdminClient({"bootstrap.servers": self.address, **QUIET})
        eventually(self._is_up, "the node did not start")

    def _is_up(self) -> bool:
        try:
            return bool(self.admin.list_topics(timeout=2).brokers)
        except ck.KafkaException:
            return False

    def end(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)
        self._process.wait(DEADLINE_S)

    def make(self, topic: str, partitions: int = PARTITIONS, **config: str) -> None:
        configs = {name.replace("_", "."): value for name, value in config.items()}
        [made] = self.admin.create_topics([NewTopic(topic, partitions, config=configs)]).values()
        made.result(DEADLINE_S)

    def alter(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        self.admin.incremental_alter_configs([resource])[resource].result(DEADLINE_S)

    def producer(self, **more: Any) -> ck.Producer:
        return ck.Producer({"bootstrap.servers": self.address, "enable.idempotence": True, **QUIET, **more})

    def consumer(self) -> ck.Consumer:
        return ck.Consumer(
            {"bootstrap.servers": self.address, "group.id": "g", "enable.auto.commit": False,
             "enable.partition.eof": True, "fetch.wait.max.ms": 50, **QUIET}
        )  # fmt: skip

    def stored(self, prefix: str) -> list[Path]:
        return [path for path in (self.root / "objects" / prefix).rglob("*") if path.is_file()]

    def only_in_l1(self) -> None:
        """Wait until the node has deleted every L0 object."""
        eventually(lambda: not self.stored("l0"), "L0 objects are left")
        assert self.stored("l1")

    def read(self, topic: str, partitions: int = PARTITIONS) -> dict[int, list[tuple[int, bytes | None, bytes | None]]]:
        """Return all committed records, up to the end of each partition."""
        client = self.consumer()
        found: dict[int, list[tuple[int, bytes | None, bytes | None]]] = defaultdict(list)
        ended: set[int] = set()
        try:
            client.assign([ck.TopicPartition(topic, p, ck.OFFSET_BEGINNING) for p in range(partitions)])
            until_s = time.monotonic() + DEADLINE_S
            while len(ended) < partitions:
                assert time.monotonic() < until_s, f"no end: {ended}"
                for message in client.consume(500, 0.2):
                    error = message.error()
                    if error is not None and error.code() == ck.KafkaError._PARTITION_EOF:
                        ended.add(message.partition())
                        continue
                    assert error is None, error
                    found[message.partition()].append((message.offset(), message.key(), message.value()))
        finally:
            client.close()
        return dict(found)
