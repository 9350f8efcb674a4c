"""`./dev bench faults [--only NAME,…] [--burners N]`: each fault of a store, a node or a machine under load, and the
seconds until `/readyz`, `why` and `status` name it, with the words.

Method: real processes as `tidemill up` starts them: two nodes over S3 (moto, behind a proxy that fails) and PostgreSQL
(consensus and three captured databases behind proxies, two of them with a standby), and one node over a small file
system and SQLite. A producer and a writer in each database run all the time, and `--burners` processes (2) use both
cores. Faults are injected one after another. From that moment on `/readyz`, `why MARK` and `status` are polled
concurrently, the two commands within the process of this benchmark. Then the fault ends, and the next one starts when
every node is ready and reports nothing else.

Holds when: each way names each fault within 5 s.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from faults_worlds import TOPIC, Cluster, Local, Remote, descendants, small_disk, until

# isort: split
import confluent_kafka as ck
import psycopg

from harbour import machine
from support.capture.standbys import cut_off, promote
from support.faults.served import named

PROMISED_S = 5.0
WITHIN_S = 60.0


class Row(NamedTuple):
    fault: str
    seconds: dict[str, float]
    said: str


class Faults:
    def __init__(self, only: set[str]) -> None:
        self.rows: list[Row] = []
        self._only = only

    def wanted(self, *faults: str) -> bool:
        return not self._only or any(fault in self._only for fault in faults)

    def named(
        self,
        fault: str,
        asked: Cluster,
        mark: str,
        words: str,
        since_s: float,
        ready: int | None = None,
        get: Callable[[str], tuple[int, str]] | None = None,
    ) -> None:
        """Record the seconds of each way; `inf` for a way that never names the fault."""
        try:
            found = named(
                get or asked.get, asked.config, mark, words, ready=ready, since_s=since_s, within_s=WITHIN_S
            )  # fmt: skip
            row = Row(fault, {place: s for place, (s, _) in found.items()}, _around(found["/readyz"][1], words))
        except AssertionError as error:
            row = Row(fault, dict.fromkeys(("/readyz", "why", "status"), float("inf")), str(error)[:600])
        self.rows.append(row)
        times = "  ".join(f"{place} {s:5.2f}" for place, s in row.seconds.items())
        late = "" if max(row.seconds.values()) <= PROMISED_S else "  LATE"
        print(f"{fault:32} {times}{late}  {row.said[:220]}", flush=True)

    def skip(self, fault: str, why: str) -> None:
        print(f"{fault:32} skipped: {why}", flush=True)


def _around(text: str, words: str) -> str:
    return next((line for line in text.splitlines() if words in line), text).strip()


def stores(faults: Faults, remote: Remote) -> None:
    for store, fault, words, ready in (
        ("s3", "500", "status=500 code=InternalError", 503),
        ("s3", "503", "status=503 code=SlowDown", 503),
        ("s3", "404", "status=404 code=NoSuchKey", 503),
        ("s3", "412", "status=412", 200),
        ("s3", "hang", "the object store does not answer", 503),
        ("consensus", "refused", "PostgreSQL", 503),
        ("consensus", "swallowed", "not answer", 503),
        ("consensus", "slow", "not answer", 503),
        ("shop", "refused", "PostgreSQL", 200),
        ("shop", "swallowed", "PostgreSQL does not answer", 200),
        ("shop", "slow", "PostgreSQL does not answer", 200),
    ):
        name = f"{store}: {fault}"
        if not faults.wanted(name):
            continue
        remote.well()
        asked = remote.holder_of("shop") if store == "shop" else remote.nodes[0]
        mark = {"s3": "objects@node:n1", "consensus": "consensus@node:n1", "shop": "capture:shop"}[store]
        began_s = time.monotonic()
        with remote.switched(store, fault):
            faults.named(name, asked, mark, words, began_s, ready)


def flipped(faults: Faults, remote: Remote) -> None:
    """Consumers of a node that was just started read from the store."""
    for fault, words in (
        ("flip-once", "answered a read with damaged bytes"),
        ("flip", "an object is damaged, or the object store damages its answers"),
    ):
        name = f"s3: {fault}"
        if not faults.wanted(name):
            continue
        remote.well()
        node = remote.nodes[1]
        before = node.children()["node"]
        node.signal("node", signal.SIGKILL)
        until(lambda before=before, node=node: node.children().get("node", before) != before)
        node.ready()
        over = threading.Event()
        began_s = time.monotonic()
        with remote.switched("s3", fault):
            reading = threading.Thread(target=_consume, args=(node.kafka, over), daemon=True)
            reading.start()
            faults.named(name, node, "objects@node:n2", words, began_s, 200)
            over.set()
            reading.join(10)


def _consume(kafka: str, over: threading.Event) -> None:
    consumer = ck.Consumer({"bootstrap.servers": kafka, "group.id": "f", "log_level": 0})
    consumer.assign([ck.TopicPartition(TOPIC, n, 0) for n in range(4)])
    while not over.is_set():
        consumer.poll(0.1)
    consumer.close()


def databases(faults: Faults, remote: Remote) -> None:
    if faults.wanted("shop: restarted"):
        # Also consensus, which is another database of this server.
        remote.well()
        asked, began_s = remote.holder_of("shop"), time.monotonic()
        restarting = threading.Thread(target=lambda: (remote.server.stop(), time.sleep(4), remote.server.start()))
        restarting.start()
        faults.named("PostgreSQL: restarted (4 s)", asked, f"consensus@node:{asked.name}", "PostgreSQL", began_s)
        restarting.join()
    for capture, words in (("kept", "lost"), ("lost", "went back to an earlier state")):
        name = f"failover: {'with' if capture == 'lost' else 'without'} loss"
        if not faults.wanted(name):
            continue
        remote.well()
        asked = remote.holder_of(capture)
        remote.in_step(capture)
        if capture == "lost":
            cut_off(remote.standbys[capture])
            time.sleep(3)  # rows that the standby will lack are captured
        else:
            index = list(remote.dsns).index(capture)
            remote.load.dsns[index] = remote.standbys[capture].dsn  # nothing more is committed here
            with psycopg.connect(remote.primaries[capture].dsn, autocommit=True) as control:
                control.execute("ALTER SYSTEM SET default_transaction_read_only = on")
                control.execute("SELECT pg_reload_conf()")
            time.sleep(1)
            remote.in_step(capture)
        remote.primaries[capture].stop()
        promote(remote.standbys[capture])
        remote.load.dsns[list(remote.dsns).index(capture)] = remote.standbys[capture].dsn
        began_s = time.monotonic()
        proxy = remote.proxies[capture]
        remote.world.call(lambda proxy=proxy, capture=capture: proxy.lead_to(remote.standbys[capture].dsn))
        faults.named(name, asked, f"capture:{capture}/history", words, began_s, get=remote.anywhere)


def frozen(faults: Faults, remote: Remote) -> None:
    for victim, asked in ((1, 0), (0, 1)):
        name = f"node frozen: n{victim + 1}"
        if not faults.wanted(name):
            continue
        remote.well()
        node = remote.nodes[victim]
        pid = node.children()["node"]
        began_s = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            mark = f"process:node:{node.name}"
            faults.named(name, remote.nodes[asked], mark, "has not reported for", began_s)
        finally:
            os.kill(pid, signal.SIGCONT)


def disks(faults: Faults, directory: Path) -> None:
    if not faults.wanted("disk full", "inodes gone", "descriptors gone"):
        return
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk(directory / "disk"))
        except (PermissionError, FileNotFoundError) as error:
            faults.skip("disk full, inodes gone", f"this needs the right to mount a tmpfs: {error}")
            disk = None
        local = Local(stack, directory, disk)
        if disk is not None and faults.wanted("inodes gone"):
            local.well()
            began_s, made = time.monotonic(), []
            try:
                while True:
                    path = disk / f"x{len(made)}"
                    path.touch()
                    made.append(path)
            except OSError:
                pass
            began_s = time.monotonic()
            faults.named("inodes gone", local.node, "objects@node:n1", "no free inode", began_s, 503)
            for path in made:
                path.unlink()
        if disk is not None and faults.wanted("disk full"):
            local.well()
            ballast = disk / "ballast"
            with ballast.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 16))
                except OSError:
                    pass
            began_s = time.monotonic()
            faults.named("disk full", local.node, "objects@node:n1", "found no space", began_s, 503)
            ballast.unlink()
        if faults.wanted("descriptors gone"):
            local.well()
            pid = local.node.children()["node"]
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            least = min(set(range(4096)) - {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")})
            began_s = time.monotonic()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (least, before[1]))
            faults.named("descriptors gone", local.node, "descriptors@node:n1", "No file descriptor is left", began_s)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def replaced(faults: Faults, directory: Path) -> None:
    if not faults.wanted("cluster replaced"):
        return
    with ExitStack() as stack:
        local = Local(stack, directory)
        manifests = local.objects / "metastore" / "cluster"
        until(lambda: any(manifests.glob("*")), lambda: "the cluster is in the bucket")
        time.sleep(3)
        assert local.node._process is not None
        family = descendants(local.node._process.pid)
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        (directory / "new").mkdir()
        line = [sys.executable, "-m", "tidemill", "restore", "--json", "--config", str(local.node.config)]
        done = subprocess.run(
            [*line, "--consensus", f"sqlite:///{directory}/new/c.db"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        began_s = time.monotonic()
        for pid in family:
            os.kill(pid, signal.SIGCONT)
        faults.named("cluster replaced", local.node, "node:n1", "another cluster", began_s)


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of faults, by commas")
    parser.add_argument("--burners", type=int, default=2)
    options = parser.parse_args()
    print(machine())
    faults = Faults({name.strip() for name in options.only.split(",") if name.strip()})
    directory = Path(tempfile.mkdtemp(prefix="tidemill-faults-"))
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.burners)]
    try:
        remotely: list[Callable[[Faults, Remote], None]] = [stores, frozen, flipped, databases]
        if faults.wanted(*REMOTE):
            with ExitStack() as stack:
                remote = Remote(stack, directory)
                for throw in remotely:
                    throw(faults, remote)
        for local in (disks, replaced):
            (directory / local.__name__).mkdir()
            local(faults, directory / local.__name__)
    finally:
        for burner in burners:
            burner.kill()
    late = [row.fault for row in faults.rows if max(row.seconds.values()) > PROMISED_S]
    print(f"LATE: {', '.join(late)}" if late else f"HOLDS: {len(faults.rows)} faults within {PROMISED_S:g} s")
    return 1 if late else 0


REMOTE = (
    *(f"s3: {each}" for each in ("500", "503", "404", "412", "hang", "flip", "flip-once")),
    *(f"{store}: {each}" for store in ("consensus", "shop") for each in ("refused", "swallowed", "slow")),
    "shop: restarted", "failover: with loss", "failover: without loss", "node frozen: n1", "node frozen: n2",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
