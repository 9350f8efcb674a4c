"""`./dev bench chaos [--for S] [--seed N]`: three nodes under producers, transactions and groups while nodes are
killed, frozen and stopped, the bucket refuses, loses answers and is slow, and consensus is unavailable.

Method. Three nodes as `tidemill up` runs them, on PostgreSQL as consensus and an S3 API (moto's). Producers:
librdkafka, kafka-python and aiokafka, idempotent and without an id; librdkafka and kafka-python with transactions,
every fourth aborted; a copier that reads, writes and commits offsets as one. Three groups, of members of the three
libraries (eager, cooperative, and assigned by the broker), which are killed, leave and return throughout; one reader at
read_committed. One throw after another from a deck that the seed shuffles, single faults and a node's in the middle of
a store's; then all partitions must acknowledge again before the next. At the end everything drains, librdkafka and
kafka-python read everything, and both must have read the same.

Holds when: no acknowledged record is lost or has another offset than the acknowledged one; none of an idempotent
producer is duplicated; the order of every producer is preserved (not judged for librdkafka's without an id, which
resends failed records after later ones, however few it may have in flight); committed transactions are present whole
and once, aborted ones not at all, for the reader that followed and for the last one; the copy equals its source; no
group gets an offset below one whose commit was acknowledged, and each got every record; leadership ends spread over all
nodes; no producer dropped a record; the longest pause between two acknowledgements in one partition, less the time in
which consensus was unavailable, is at most the lease and STALL_OVER_LEASE_S. That last figure is judged over the
acknowledgements of all producers, and for librdkafka's idempotent producer alone: the other libraries wait for a silent
node longer than the lease even if another one leads, and a producer with one request in flight waits for its time limit
before it sends the next.

Every wait has a time limit; an unfinished one is a failure with its name. A run that hangs nevertheless is ended with
its process, after the stacks of its threads and a verdict from the known facts. Every 10 s a line reports the progress.
Ctrl-C ends the throws, and the run so far is judged. --throws a,b+c throws only these, once each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from chaos_clients import Clients, until
from chaos_judge import Stall
from chaos_member import HEARTBEAT_MS, SESSION_MS
from chaos_store import Store
from chaos_throws import LEASE_S, THROWS, Throw, World, deck
from chaos_watch import Watch, end_process
from harbour import machine
from nodes import Node
from support.postgres import EmbeddedPostgres

NODES = 3
STALL_OVER_LEASE_S = 2.0
RECOVER_S = 60.0
START_S, END_S = 240.0, 900.0
"""Time limits of a run before its first throw, and after its last."""
PAUSE_S = (0.5, 2.0)
GROUPS = f"""
[kafka]
group_consumer_session_timeout_ms = {SESSION_MS}
group_consumer_heartbeat_interval_ms = {HEARTBEAT_MS}
"""


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


class Chaos:
    """One run in `directory`. `transactions`: with transactional producers."""

    def __init__(self, directory: Path, seed: int, *, transactions: bool = True) -> None:
        self.directory = directory
        self.seed = seed
        self.rand = random.Random(seed)
        self.transactions = transactions
        self.failures: list[str] = []
        self._throws: list[tuple[str, float]] = []
        self.phase = "the start"
        self.clients: Clients | None = None
        self.world: World | None = None
        self.bucket: dict[str, int] = {}
        self._made_s = self._began_s = self._ended_s = time.monotonic()

    def run(self, seconds: float, throws: Sequence[str] = ()) -> dict[str, Any]:
        """Return what `found` returns; its `failures` are empty when everything holds. The stall is not judged here."""
        with self._world() as world:
            self.world = world
            addresses = ",".join(node.address for node in world.nodes)
            clients = Clients(addresses, self.directory, self.seed, transactions=self.transactions)
            self.clients = clients
            clients.start()
            try:
                self._recover("the start")
                clients.groups.start()
                self._throw_all(seconds, throws)
                self._spread()
                clients.drain(self._during)
                with self._during("the bucket tells"):
                    self.bucket = world.store.faults({})
            finally:
                clients.groups.end()
            self.phase = "nodes end"
        self.phase = "judges"
        self.failures += clients.judge()
        clients.keep()
        return self.found()

    def progress(self) -> None:
        clients = self.clients
        reported = clients.progress() if clients is not None else ""
        say(f"{time.monotonic() - self._made_s:.0f} s, {self.phase}: {reported}")

    @contextlib.contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        """Add an exception to the failures; the next phase continues with the rest."""
        self.phase = phase
        try:
            yield
        except Exception as error:
            reported = f"{phase}: {error!r}"
            say(reported)
            self.failures.append(reported)

    # the world ------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _world(self) -> Iterator[World]:
        with contextlib.ExitStack() as stack:
            consensus = stack.enter_context(EmbeddedPostgres(self.directory / "consensus"))
            store = Store(self.seed, self.directory / "store.log")
            stack.callback(store.stop)
            nodes = [
                Node(
                    self.directory,
                    f"n{n}",
                    objects=store.url,
                    consensus=consensus.dsn,
                    more=GROUPS,
                    environ=store.environ,
                )
                for n in range(NODES)
            ]
            for node in nodes:
                stack.callback(self._end, node)
                node.start(wait=False)
            for node in nodes:
                node.serves()
            yield World(nodes, store, consensus, self.seed)

    def _end(self, node: Node) -> None:
        with self._during(f"{node.name} ends"):
            node.end(15)

    # throwing -------------------------------------------------------------------------------------
    def _throw_all(self, seconds: float, throws: Sequence[str]) -> None:
        self._began_s = time.monotonic()
        try:
            for throw in (THROWS[name] for name in throws) if throws else deck(self.rand):
                if not throws and time.monotonic() - self._began_s >= seconds:
                    break
                self._throw(throw)
                time.sleep(self.rand.uniform(*PAUSE_S))
        except KeyboardInterrupt:
            say("no more throws: drains and judges")
        self._ended_s = time.monotonic()

    def _throw(self, throw: Throw) -> None:
        assert self.world is not None
        began_s = time.monotonic()
        self._throws.append((throw.name, began_s))
        with self._during(throw.name):
            throw.run(self.world)
        over_s = time.monotonic()
        self._recover(throw.name)
        back_s = time.monotonic() - over_s
        said = ", ".join(
            f"{name} {stall.net_s:.1f}" + f" ({stall.raw_s:.1f})" * (stall.raw_s > stall.net_s)
            for name, stall in self._stalls(began_s, time.monotonic()).items()
        )
        say(f"{throw.name}: for {over_s - began_s:.1f} s, all acknowledge {back_s:.1f} s later; stalls, s: {said}")

    def _recover(self, name: str) -> None:
        """Every node serves, and every producer is acknowledged in every partition."""
        assert self.world is not None and self.clients is not None
        clients, since_s = self.clients, time.monotonic()
        with self._during(f"after {name}"):
            for node in self.world.nodes:
                node.serves()
            try:
                until(lambda: not clients.silent(since_s), RECOVER_S)
            except TimeoutError as late:
                raise TimeoutError(f"{late}: {clients.silent(since_s)}") from None

    def _spread(self) -> None:
        """All nodes lead again."""
        assert self.clients is not None
        leaders = self.clients.leaders
        with self._during("leadership is spread"):
            until(lambda: len(leaders()) == NODES, RECOVER_S)

    def _stalls(self, began_s: float, ended_s: float) -> dict[str, Stall]:
        if self.clients is None or self.world is None:
            return {}
        return self.clients.stalls(began_s, ended_s, self.world.away)

    # the verdict ----------------------------------------------------------------------------------
    def found(self) -> dict[str, Any]:
        """Figures and failures, as far as the run has come."""
        ended_s = self._ended_s if self._ended_s > self._began_s else time.monotonic()
        stalls = self._stalls(self._began_s, ended_s)
        judged = self.clients.judged_stalls if self.clients is not None else set()
        stall = max((each for name, each in stalls.items() if name in judged), default=Stall(0.0, 0.0, 0.0, ""))
        return {
            "machine": machine(),
            "seed": self.seed,
            "seconds": round(ended_s - self._began_s, 1),
            "thrown": [name for name, _ in self._throws],
            "throws": Counter(part for name, _ in self._throws for part in name.split("+")),
            **(self.clients.figures() if self.clients is not None else {}),
            "bucket": self.bucket,
            "stall_s": round(stall.net_s, 2),
            "stall_limit_s": LEASE_S + STALL_OVER_LEASE_S,
            "stall_of": stall.whose,
            "stall_in": self._in_throw(stall.at_s),
            "stalls_s": {name: [round(each.net_s, 2), round(each.raw_s, 2)] for name, each in stalls.items()},
            "failures": self.failures,
        }

    def _in_throw(self, at_s: float) -> str:
        """The throw that was last when something began."""
        return next((name for name, began_s in reversed(self._throws) if began_s <= at_s), "")

    def hung(self) -> None:
        """Give the verdict of a run that does not end."""
        clients = self.clients
        self.failures.append(f"it does not end: {self.phase}")
        if clients is not None:
            self.failures += [f"{worker.name}: it does not end" for worker in clients.workers if worker.runs]
            self.failures += clients.judge()
        tell(self.found(), self.directory)


def tell(found: dict[str, Any], directory: Path) -> bool:
    """True: it holds."""
    late = found["stall_s"] > found["stall_limit_s"]
    print(json.dumps(found))
    if found["failures"] or late:
        print(f"BROKEN: {len(found['failures']) + late} failures; logs: {directory}", flush=True)
        return False
    print(f"HOLDS: longest stall {found['stall_s']} s, limit {found['stall_limit_s']} s", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--throws", default="", help=f"by commas, of: {', '.join(THROWS)}")
    parser.add_argument("--without-transactions", action="store_true")
    options = parser.parse_args()
    throws = [name for name in options.throws.split(",") if name]
    if unknown := [name for name in throws if name not in THROWS]:
        parser.error(f"no such throw: {', '.join(unknown)}")
    print(f"chaos: {machine()}", file=sys.stderr, flush=True)
    directory = Path(tempfile.mkdtemp(prefix="tidemill-chaos-"))
    chaos = Chaos(directory, options.seed, transactions=not options.without_transactions)
    throwing_s = (len(throws) * RECOVER_S) if throws else options.seconds
    with Watch(START_S + throwing_s + END_S, chaos.progress, chaos.hung):
        holds = tell(chaos.run(options.seconds, throws), directory)
    if not holds:
        end_process()  # a thread of a library that hangs would keep the interpreter
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
