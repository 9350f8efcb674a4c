"""Throws of the chaos lane: one fault at a time, or a node's in the middle of a store's.

Each returns when the fault has ended; a killed or stopped process is back, or on its way back.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import paths  # noqa: F401
from chaos_store import Store
from nodes import Node, descendants
from support.postgres import EmbeddedPostgres
from tidemill.base.limits import LEASE_TTL_MS

LEASE_S = LEASE_TTL_MS / 1000
FROZEN_S = (LEASE_S + 1.0, LEASE_S + 4.0)
GONE_S = (LEASE_S + 2.0, LEASE_S + 5.0)
LEFT_S = (1.0, 3.0)
AWAY_S = 10.0
STORE_S = (4.0, 6.0)
REFUSE = 0.5
LOSE = 0.5
SLOW_S = 1.5


class World:
    """Everything that can be broken. `away`: intervals in which consensus was unavailable, by the monotonic clock."""

    def __init__(self, nodes: list[Node], store: Store, consensus: EmbeddedPostgres, seed: int) -> None:
        self.nodes, self.store, self.consensus = nodes, store, consensus
        self.rand = random.Random(seed)
        self.away: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def consensus_away(self) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.away.append((began_s, time.monotonic()))


def kill(world: World) -> None:
    """Send SIGKILL to a node; `tidemill up` restarts it."""
    world.rand.choice(world.nodes).signal(signal.SIGKILL)


def gone(world: World) -> None:
    """Send SIGKILL to a node and to its supervisor; restart it when its lease has expired."""
    node = world.rand.choice(world.nodes)
    node.end(signal.SIGKILL)
    time.sleep(world.rand.uniform(*GONE_S))
    node.start(wait=False)


def leave(world: World) -> None:
    """SIGTERM, and it comes back."""
    node = world.rand.choice(world.nodes)
    node.end(signal.SIGTERM)
    time.sleep(world.rand.uniform(*LEFT_S))
    node.start(wait=False)


def freeze(world: World) -> None:
    """SIGSTOP for longer than a lease; it wakes as one that believes it leads."""
    node = world.rand.choice(world.nodes)
    node.signal(signal.SIGSTOP)
    try:
        time.sleep(world.rand.uniform(*FROZEN_S))
    finally:
        node.signal(signal.SIGCONT)


def refuse(world: World) -> None:
    """The bucket answers half of the requests with 503."""
    _store(world, {"refuse": REFUSE})


def lose(world: World) -> None:
    """The bucket does what is asked and answers 503 to half of it."""
    _store(world, {"lose": LOSE})


def slow(world: World) -> None:
    """Every answer of the bucket is late."""
    _store(world, {"slow_s": SLOW_S})


def _store(world: World, faults: dict[str, float]) -> None:
    world.store.faults(faults)
    try:
        time.sleep(world.rand.uniform(*STORE_S))
    finally:
        world.store.faults({})


def away(world: World) -> None:
    """Stop consensus, and restart it."""
    with world.consensus_away():
        until_s = time.monotonic() + AWAY_S
        world.consensus.stop()
        time.sleep(max(0.0, until_s - time.monotonic()))
        world.consensus.start()


def halt(world: World) -> None:
    """Every process of consensus is frozen: connections stay, and what was sent is done late."""
    assert world.consensus.pid is not None
    with world.consensus_away():
        frozen = list(descendants(world.consensus.pid))
        try:
            for pid in frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            time.sleep(AWAY_S)
        finally:
            for pid in frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


NODES: dict[str, Callable[[World], None]] = {"kill": kill, "gone": gone, "leave": leave, "freeze": freeze}
STORES: dict[str, Callable[[World], None]] = {
    "refuse": refuse,
    "lose": lose,
    "slow": slow,
    "away": away,
    "halt": halt,
}
AT_ONCE = tuple((store, node) for store in ("refuse", "lose", "slow", "away", "halt") for node in ("kill", "freeze"))


class Throw(NamedTuple):
    name: str
    run: Callable[[World], None]


def pair(store: str, node: str) -> Throw:
    """The node's fault begins while the store's is under way."""

    def both(world: World) -> None:
        failed: list[BaseException] = []

        def first() -> None:
            try:
                STORES[store](world)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=first, daemon=True)
        thread.start()
        time.sleep(world.rand.uniform(0.5, 2.0))
        NODES[node](world)
        thread.join()
        if failed:
            raise failed[0]

    return Throw(f"{store}+{node}", both)


THROWS: dict[str, Throw] = {
    **{name: Throw(name, run) for name, run in (NODES | STORES).items()},
    **{throw.name: throw for throw in (pair(*each) for each in AT_ONCE)},
}


def deck(rand: random.Random) -> Iterator[Throw]:
    """Yield without end: every single fault once, shuffled, then as many pairs, and again."""
    singles, pairs = [*NODES, *STORES], [name for name in THROWS if "+" in name]
    while True:
        chosen = [*singles, *rand.sample(pairs, 4)]
        rand.shuffle(chosen)
        for name in chosen:
            yield THROWS[name]
