"""The peer in `./dev bench versus`: Debezium in Kafka Connect, one Kafka broker, and a Spark job that merges into Delta
or Iceberg tables. `versus/install` fetches all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import confluent_kafka as ck
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka.admin import AdminClient, NewTopic

import paths
import versus_processes
from support.ports import free_port
from versus_processes import command
from versus_stack import FILES, HERE, TABLES, Keeper, configuration_lines, wait_for

INSTALLED = paths.ROOT / ".venv" / "versus"
CLUSTER_ID = "4L6g3nShT-eMCtK--X86sw"
HEAPS = {"kafka": ("-Xms1g", "-Xmx1g"), "connect": ("-Xms256m", "-Xmx2g")}
"""Heaps of the start scripts of Kafka and of Connect."""
COLLECTOR = ("-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
"""Further settings of these scripts."""
DUMP_S = 900.0


def absent(lake: str) -> str:
    """Return in a sentence why the peer cannot run here; empty if it can."""
    if shutil.which("java") is None:
        return "there is no java"
    wanted = [INSTALLED / part / "pom.xml" for part in ("kafka", "debezium", lake)]
    if not all(path.exists() for path in (*wanted, INSTALLED / "spark" / "pyspark.txt")):
        return f"not installed: run benchmarks/versus/install {lake}"
    return ""


class Peer:
    def __init__(self, home: Path, dsn: str, lake: str, trigger_s: float) -> None:
        self.name = lake
        self.keeper = Keeper(home / "logs")
        self.reader = [sys.executable, str(HERE / "versus_reader.py"), lake, str(home)]
        self._home, self._lake, self._trigger_s = home, lake, trigger_s
        self._kafka_port = free_port(2)
        self._bootstrap = f"127.0.0.1:{self._kafka_port}"
        values: Mapping[str, object] = {
            "home": home,
            "kafka": self._kafka_port,
            "controller": self._kafka_port + 1,
            "connect": free_port(),
            "plugins": INSTALLED / "debezium",
            "postgres": psycopg.conninfo.conninfo_to_dict(dsn)["port"],
            "tables": ",".join(f"public.{table}" for table in TABLES),
        }
        for name in ("kafka", "worker", "connector"):
            self._file(name).write_text((FILES / f"{name}.properties").read_text().format(**values))

    def start(self) -> None:
        broker = [*_java("kafka"), "kafka.Kafka", str(self._file("kafka"))]
        formatted = [*_java("kafka"), "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c"]
        subprocess.run([*formatted, str(self._file("kafka"))], check=True, stdout=subprocess.DEVNULL)
        self.keeper.start("kafka", broker)
        admin = AdminClient({"bootstrap.servers": self._bootstrap, "log_level": 0})
        wait_for("the broker answers", lambda: _answers(admin), self.keeper)
        topics = [NewTopic(f"shop.public.{table}", 1, 1) for table in TABLES]
        for created in admin.create_topics(topics).values():
            created.result()
        connect = [*_java("connect"), "org.apache.kafka.connect.cli.ConnectStandalone"]
        self.keeper.start("connect", [*connect, str(self._file("worker")), str(self._file("connector"))])
        job = [sys.executable, str(FILES / "job.py"), self._lake, self._bootstrap, str(self._home)]
        self.keeper.start("spark-python", [*job, f"{self._trigger_s:g}"], self._spark())

    def stop(self) -> None:
        self.keeper.stop()

    def wait_drained(self, limit_s: float) -> None:
        """Wait until every query has committed the end of its topic. Raises TimeoutError.

        The caller has seen the last row of the load, so the topics are complete.
        """
        consumer = ck.Consumer({"bootstrap.servers": self._bootstrap, "group.id": "versus", "log_level": 0})
        until_s = time.monotonic() + limit_s
        for table in TABLES:
            topic = f"shop.public.{table}"
            _, end = consumer.get_watermark_offsets(ck.TopicPartition(topic, 0), timeout=30)
            while committed_offset(self._home / "checkpoints" / table, topic) < end:
                if time.monotonic() > until_s:
                    raise TimeoutError(f"a query did not reach the end of its topic: table={table} end={end}")
                time.sleep(0.2)
        consumer.close()

    def contents(self) -> dict[str, pa.Table]:
        """Read the tables with a separate Spark."""
        target = self._home / "contents"
        done = subprocess.run(
            [sys.executable, str(FILES / "dump.py"), self._lake, str(self._home), str(target)],
            env={**os.environ, **self._spark()}, capture_output=True, text=True, timeout=DUMP_S,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"the tables could not be read: error={done.stderr[-2_000:]}")
        return {table: pq.read_table(target / table) for table in TABLES}

    def disk_mib(self) -> dict[str, int]:
        return {name: versus_processes.disk_mib(self._home / name) for name in ("tables", "kafka", "checkpoints")}

    def lines(self) -> dict[str, int]:
        files = [self._file(name) for name in ("kafka", "worker", "connector")]
        files += [FILES / "job.py", FILES / f"{self._lake}.py"]
        return {file.name: configuration_lines(file.read_text()) for file in files}

    def role(self, pid: int, parent: str) -> str:
        return "spark" if parent == "spark-python" and "bin/java" in command(pid) else ""

    def _file(self, name: str) -> Path:
        return self._home / f"{name}.properties"

    def _spark(self) -> dict[str, str]:
        """Return the environment of PySpark 4.1, which shares all other packages with this process."""
        jars = INSTALLED / self._lake / "jars" / "*"
        return {
            "PYTHONPATH": str(INSTALLED / "spark"),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": f"--driver-class-path {jars} pyspark-shell",
            "SPARK_LOCAL_DIRS": str(self._home / "scratch"),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }


def committed_offset(checkpoint: Path, topic: str) -> int:
    """Return the offset up to which a query's last committed batch read partition 0; -1 before the first one."""
    done = [int(path.name) for path in (checkpoint / "commits").glob("*") if path.name.isdigit()]
    if not done:
        return -1
    last = (checkpoint / "offsets" / str(max(done))).read_text().splitlines()[-1]
    return int(json.loads(last)[topic]["0"])


def _answers(admin: AdminClient) -> bool:
    try:
        return bool(admin.list_topics(timeout=2).brokers)
    except ck.KafkaException:
        return False  # it does not listen yet


def _java(program: str) -> list[str]:
    return ["java", *HEAPS[program], *COLLECTOR, "-cp", f"{INSTALLED / 'kafka' / 'jars'}/*"]
