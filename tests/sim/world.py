"""One seeded world: its loop, its stores with their faults, its actors, its trace.

An actor is a process: `start` builds a new node from the stores, `crash` ends everything that it runs, and `Link`
carries requests to it in order, over connections that break when it dies. Code of the scenario itself belongs to no
actor and survives.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping, Sequence
from functools import cached_property, partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import msgspec
from structlog import DropEvent

from sim.clock import SimClock
from sim.faults import Faults, FaultyConsensus, FaultyObjects, Rates
from sim.loop import LIFE, Life, SimLoop
from tidemill.base.clock import Rand
from tidemill.base.errors import TidemillError
from tidemill.consensus.api import LogHead, LogRecord, Versioned
from tidemill.consensus.change_journal import ChangeJournal
from tidemill.consensus.engine_state import UNWRITTEN, LeaseRow
from tidemill.consensus.memory import MemoryConsensus
from tidemill.consensus.rollback_detection import RollbackDetector
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.retrying import RetryingObjects
from tidemill.objects.store import ObjectStore

VIRTUAL_LIMIT_S = 600.0
"""Virtual time after which an unfinished scenario is not live: every scenario heals its faults."""

Node = TypeVar("Node")
T = TypeVar("T")


class Violated(AssertionError):
    """Raised by an oracle for a broken invariant."""


class NotLive(AssertionError):
    """Raised when something that must happen after healing did not happen within the virtual time limit."""


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of one seed. `error` is empty when the seed is clean; `digest` is the hash of the whole trace."""

    error: str
    digest: str
    steps: int
    virtual_s: float
    trace: list[str]
    faults: dict[str, int]

    @property
    def ok(self) -> bool:
        return not self.error


@contextlib.contextmanager
def swapped(module: ModuleType | type, name: str, value: object) -> Iterator[None]:
    """Replace a constant or pure function of a room for one world: makes rare events common, or costly work cheap."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


class Engine(MemoryConsensus):
    """Memory engine that also stores every record that ever landed, so that oracles see records that were truncated."""

    def __init__(self, clock: SimClock) -> None:
        super().__init__(clock)
        self.landed: dict[str, list[bytes]] = {}
        self.placed: dict[str, list[LogRecord]] = {}
        """The records of `landed`, with the position and term of each."""
        self.lives = 0
        """Number of times that commits were lost."""

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        head = await super().append(log, term, expected_next, records, nonce)
        self.landed.setdefault(log, []).extend(records)
        placed = self.placed.setdefault(log, [])
        placed += [LogRecord(expected_next + i, term, nonce, data) for i, data in enumerate(records)]
        return head

    def snapshot(self) -> Snapshot:
        """Return the state that a standby has now."""
        state = self.state
        records = {log: list(found) for log, found in state.records.items()}
        return Snapshot(dict(state.registers), dict(state.heads), records, dict(state.leases))

    def lose_commits(self, standby: Snapshot) -> None:
        """Fail over to a standby that is behind: later commits are lost, and all connections break."""
        self.lives += 1
        self.seen = RollbackDetector("sim")  # of the engine itself, which oracles call
        state = self.state
        state.registers, state.heads, state.leases = dict(standby.registers), dict(standby.heads), dict(standby.leases)
        state.records = {log: list(found) for log, found in standby.records.items()}
        state.journal = ChangeJournal(f"memory-{self.lives}")
        for log, placed in self.placed.items():
            end = state.heads.get(log, UNWRITTEN).next
            self.placed[log] = [record for record in placed if record.position < end]
            self.landed[log] = [record.data for record in self.placed[log]]


class Snapshot(NamedTuple):
    registers: dict[str, Versioned]
    heads: dict[str, LogHead]
    records: dict[str, list[LogRecord]]
    leases: dict[str, LeaseRow]


class World:
    def __init__(self, seed: int, *, rates: Rates | None = None) -> None:
        self.seed = seed
        self.loop = SimLoop(random.Random(f"loop {seed}"), fifo=random.Random(f"fifo {seed}").random() < 0.1)
        self.source = random.Random(f"scenario {seed}")
        """Source of the scenario's choices: sizes, counts, pauses."""
        self.clock = SimClock(self.loop)
        self.trace_lines: list[str] = []
        self._ids = random.Random(f"ids {seed}")
        self.context = contextvars.copy_context()
        drawn = Rates.drawn(random.Random(f"rates {seed}")) if rates is None else rates
        self.faults = Faults(random.Random(f"faults {seed}"), drawn, self.trace, self.background)
        self.objects = MemoryObjects(self.clock)
        self.consensus = Engine(self.clock)
        """Engine without faults, like `objects`; oracles read these two."""
        self.actors: list[Actor[Any]] = []
        self.blind = False
        """Planted fault: no client notices that consensus lost commits."""

    @cached_property
    def filler(self) -> str:
        """20 KB of text that does not compress, to make objects large."""
        return random.Random(f"filler {self.seed}").randbytes(10_000).hex()

    def rand(self) -> Rand:
        """Return a separate random source for one component."""
        return Rand(self._ids.getrandbits(64))

    def trace(self, event: str) -> None:
        self.trace_lines.append(f"{self.loop.time():.6f} {event}")

    def background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as part of the world: no crash of an actor ends it."""
        self.loop.create_task(coroutine, context=self.context.copy())

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace_lines).encode()).hexdigest()

    def run(self, scenario: Callable[[World], Awaitable[None]]) -> Outcome:
        """Run the scenario to its end, and return the outcome even if it fails."""

        async def main() -> None:
            self.trace(f"seed {self.seed} rates {msgspec.json.encode(self.faults.rates).decode()}")
            try:
                async with asyncio.timeout(VIRTUAL_LIMIT_S):
                    await scenario(self)
            except TimeoutError as error:
                if self.loop.time() < VIRTUAL_LIMIT_S:
                    raise
                raise NotLive(f"not done after {VIRTUAL_LIMIT_S:.0f} s of virtual time; {self.waiting()}") from error

        error = ""
        token = CURRENT.set(self)
        try:
            self.loop.run_until_complete(main())
            if self.loop.failures:
                error = f"UnhandledError: {self.loop.failures[0]}"
        except Exception as failure:
            while isinstance(failure, ExceptionGroup):
                failure = failure.exceptions[0]
            error = f"{type(failure).__name__}: {failure}"
        finally:
            CURRENT.reset(token)
            self.trace(f"end {error or 'clean'}")
            outcome = Outcome(
                error,
                self.digest(),
                self.loop.steps,
                self.loop.time(),
                self.trace_lines,
                {str(fault): count for fault, count in self.faults.counts.items()},
            )
            self.loop.dispose()
        return outcome

    async def until(self, condition: Callable[[], bool], every_s: float = 0.1) -> None:
        """Wait, in virtual time, until the condition of the scenario is true."""
        while True:
            if condition():
                return
            await asyncio.sleep(every_s)

    async def answered(self, within_s: float = 60.0) -> None:
        """Check liveness in a healed world without new requests: every request ends, even if its client hung up."""
        try:
            async with asyncio.timeout(within_s):
                await self.until(lambda: not any(actor.requests for actor in self.actors))
        except TimeoutError as error:
            open_requests = {str(actor.life): len(actor.requests) for actor in self.actors if actor.requests}
            raise NotLive(f"after healing requests are not answered: {open_requests}; {self.waiting()}") from error

    def waiting(self) -> str:
        return self.loop.who_waits()

    async def heal(self) -> None:
        """End all faults, and start every actor that is down. From here on everything must complete."""
        self.trace("heal")
        self.faults.heal()
        for actor in self.actors:
            actor.clock.skew_ms = 0
            if not actor.up:
                await actor.start()


CURRENT: contextvars.ContextVar[World | None] = contextvars.ContextVar("tidemill_sim_world", default=None)


def log_to_trace(_: Any, method: str, event: MutableMapping[str, Any]) -> NoReturn:
    """Add a warning or error to the current world's trace, as a structlog processor. Nothing is printed."""
    world = CURRENT.get()
    if world is not None and method in ("warning", "error", "exception", "critical"):
        life = LIFE.get()
        world.trace(f"{life or 'world'} log {event.get('event')} {event.get('error', '')}".rstrip())
    raise DropEvent


class Actor(Generic[Node]):
    """Process that can die. `build` makes its node from the actor's own handles (`objects`, `consensus`)."""

    def __init__(self, world: World, name: str, build: Callable[[Actor[Node]], Awaitable[Node]]) -> None:
        self.world = world
        self.name = name
        self.clock = SimClock(world.loop)
        self.life = Life(name, 0)
        self.life.alive = False
        self.links: list[Link[Node]] = []
        self.clients: list[FaultyConsensus] = []
        """Consensus clients of this life."""
        self.requests: set[asyncio.Future[Any]] = set()
        """Requests that this life has not answered yet, even if their client no longer waits."""
        self._build = build
        self._node: Node | None = None
        self._building: asyncio.Future[Node] | None = None
        self._context = contextvars.copy_context()
        world.actors.append(self)

    @property
    def up(self) -> bool:
        return self.life.alive

    @property
    def ready(self) -> bool:
        """True if the actor is up and its node is built."""
        return self.life.alive and self._node is not None

    @property
    def node(self) -> Node:
        """Running node. Raises Down."""
        if self._node is None or not self.life.alive:
            raise Down(f"the actor is down: actor={self.name}.")
        return self._node

    def objects(self) -> ObjectStore:
        """Return a new handle on the world's objects, with faults, and in every second world with retries."""
        faulty = FaultyObjects(self.world.objects, self.world.faults, str(self.life))
        if self.world.seed % 2:
            return faulty
        return RetryingObjects(faulty, self.clock, self.world.rand(), store="sim", budget_s=5.0)

    def consensus(self) -> FaultyConsensus:
        client = FaultyConsensus(self.world.consensus, self.world.faults, str(self.life), blind=self.world.blind)
        self.clients.append(client)
        return client

    @property
    def ended(self) -> bool:
        """True if a client found that consensus went back. The process then ends, and a supervisor starts another."""
        return any(client.seen.lost is not None for client in self.clients)

    def freeze(self, for_s: float) -> None:
        """Stop the process (SIGSTOP) for `for_s` seconds: nothing of this life runs, but its clocks continue."""
        if self.life.alive:
            self.world.trace(f"{self.life} frozen for {for_s:.3f}")
            self.life.frozen_until_s = self.world.loop.time() + for_s

    async def start(self) -> None:
        """Begin a new life. A start that fails because a store is unavailable is repeated, as by a supervisor.

        Returns when the node is up, or when it was crashed before that.
        """
        while True:
            self.life = life = Life(self.name, self.life.number + 1)
            self.clients = []
            self._context = contextvars.copy_context()
            self._context.run(LIFE.set, life)
            self.world.trace(f"{life} start")
            built = self._building = self.world.loop.create_future()
            task = self.world.loop.create_task(self._run_build(), context=self._context)
            task.add_done_callback(partial(_pass_on, built), context=self.world.context)
            try:
                self._node = await built
                return
            except Down:
                return
            except TidemillError as error:
                self.world.trace(f"{life} start failed {type(error).__name__}")
                self.crash()
                await asyncio.sleep(0.2)

    async def _run_build(self) -> Node:
        return await self._build(self)

    def crash(self) -> None:
        """End this life: nothing of it runs any more, and its links break."""
        if self.life.alive:
            self.world.trace(f"{self.life} crash")
            self.world.loop.kill(self.life)
        self._node = None
        if self._building is not None and not self._building.done():
            self._building.set_exception(Down(f"the actor died while it started: actor={self.name}."))
        for link in self.links:
            link.broken()
        self.links.clear()
        self.requests.clear()

    def enter(self, work: Callable[[Node], Awaitable[T]]) -> asyncio.Future[T]:
        """Run `work` as part of this life. The future fails with Down if the actor dies first."""
        link = Link(self)
        future = link.request_nowait(work)
        future.add_done_callback(lambda _: link.close())
        return future


def _retrieved(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _pass_on(to: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
    error = None if done.cancelled() else done.exception()
    if to.done():
        return
    if done.cancelled():
        to.set_exception(Down("the start was cancelled."))
    elif error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


class Crew(asyncio.TaskGroup):
    """Tasks of the scenario itself, which belong to no actor. The first failure ends the world."""

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.create_task(coroutine)


class Down(Exception):
    """Raised when the connection is gone. Requests without an answer may or may not have been served."""


class Link(Generic[Node]):
    """Connection to an actor: requests arrive in the order sent, answers in any order, each delayed.

    `request_nowait` sends synchronously. When the connection breaks, every request without an answer fails with Down.
    """

    def __init__(self, actor: Actor[Node], delay_s: float = 0.0) -> None:
        self._actor = actor
        self.life = actor.life
        self._context = actor._context
        self._delay_s = delay_s
        self._sent: list[tuple[Callable[[Node], Awaitable[Any]], asyncio.Future[Any]]] = []
        self._open: dict[asyncio.Future[Any], None] = {}
        self._closed = not actor.up
        if not self._closed:
            actor.links.append(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def request_nowait(self, work: Callable[[Node], Awaitable[T]]) -> asyncio.Future[T]:
        loop = self._actor.world.loop
        future: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(_retrieved)  # a client that hung up does not read its answers
        if self._closed:
            future.set_exception(Down(f"the connection is closed: actor={self._actor.name}."))
            return future
        self._sent.append((work, future))
        self._open[future] = None
        # The first timer delivers the oldest request: a stall may swap timers, never requests.
        loop.call_later(self._drawn(), self._arrive, context=self._context)
        return future

    async def request(self, work: Callable[[Node], Awaitable[T]]) -> T:
        return await self.request_nowait(work)

    def broken(self) -> None:
        self._closed = True
        open_requests, self._open = list(self._open), {}
        self._sent.clear()
        for future in open_requests:
            if not future.done():
                future.set_exception(Down(f"the connection broke: actor={self._actor.name}."))

    def close(self) -> None:
        """Hang up. The actor continues with the requests that it already received."""
        if self in self._actor.links:
            self._actor.links.remove(self)
        self.broken()

    def _drawn(self) -> float:
        return self._actor.world.source.uniform(0, self._delay_s) if self._delay_s else 0.0

    def _arrive(self) -> None:
        # Runs in the actor's life: tasks that the node starts here die with it.
        if self._closed or not self._sent:
            return
        work, future = self._sent.pop(0)
        loop = self._actor.world.loop
        try:
            answer = work(self._actor.node)
        except Exception as error:
            self._answer(future, None, error)
            return
        task = asyncio.ensure_future(answer, loop=loop)
        self._actor.requests.add(task)
        task.add_done_callback(lambda done: self._ended(done, future))

    def _ended(self, done: asyncio.Future[Any], future: asyncio.Future[Any]) -> None:
        self._actor.requests.discard(done)
        if done.cancelled():
            self._answer(future, None, Down(f"the actor cancelled the request: actor={self._actor.name}."))
        else:
            error = done.exception()
            self._answer(future, None if error else done.result(), error)

    def _answer(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        def deliver() -> None:
            self._open.pop(future, None)
            if not future.done():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        self._actor.world.loop.call_later(self._drawn(), deliver, context=self._actor.world.context)
