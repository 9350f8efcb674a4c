"""Clients on registers and a log, under faults and crashes.

Faults: every store fault; clients die at any step and begin again without memory.
Oracle: the history of each register and of the log is linearizable, including outcomes that were never learned; a
record submitted with `resolve_append` after every lost answer is in the log at most once, and exactly once if this was
reported to its client.
Replay: ./dev sim --room consensus --seed K --trace
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sim.oracles.linearizable import NEVER, Call, linearizable, log_model, register_model
from sim.world import Actor, Crew, Violated, World
from tidemill.base.errors import ConflictError, FencedError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import Consensus, LogHead, Versioned, resolve_append

REGISTERS = ("r/0", "r/1")
LOG = "log/shared"
SUBMITTED = "log/submitted"


class History:
    def __init__(self, world: World) -> None:
        self.world = world
        self._moments = 0
        self.calls: dict[str, list[Call]] = {name: [] for name in (*REGISTERS, LOG)}
        self.submitted: dict[bytes, bool] = {}
        """Record → whether its client learned that it is in the log."""

    async def record(self, client: str, name: str, operation: Any, call: Callable[[], Awaitable[Any]]) -> None:
        """Run one call and record what its caller learned. An unavailable call did not happen, and is not recorded."""
        entry = Call(client, operation, start=self._moment())
        self.calls[name].append(entry)
        try:
            result = await call()
        except UnavailableError:
            self.calls[name].remove(entry)
            return
        except UnknownOutcomeError:
            return
        entry.end, entry.result, entry.known = self._moment(), result, True

    def _moment(self) -> int:
        """Return the next moment, a count: two calls at the same virtual time still have an order."""
        self._moments += 1
        return self._moments


class Client:
    """Client that does a drawn number of random operations, one after another."""

    def __init__(self, world: World, actor: Actor[Any], history: History, fault: str) -> None:
        self._world = world
        self._who = str(actor.life)
        self._consensus: Consensus = actor.consensus()
        self._rand = world.rand()
        self._history = history
        self._fault = fault
        self._remembered: dict[str, Any] = {}

    async def work(self) -> None:
        source = self._world.source
        for _ in range(source.randint(2, 6)):
            action = source.choice((self._read, self._cas, self._cas, self._read_log, self._append, self._submit))
            await action()
            await asyncio.sleep(source.uniform(0, 0.05) if source.random() < 0.3 else 0)

    async def _read(self) -> None:
        key = self._world.source.choice(REGISTERS)

        async def call() -> Any:
            if self._fault == "stale-read" and key in self._remembered and self._world.source.random() < 0.5:
                return self._remembered[key]
            found = _register(await self._consensus.head(key))
            self._remembered[key] = found
            return found

        await self._history.record(self._who, key, ("read",), call)

    async def _cas(self) -> None:
        key = self._world.source.choice(REGISTERS)
        expected = self._remembered.get(key, (0, b""))[0]
        data = self._rand.nonce()[:8].encode()

        async def call() -> Any:
            try:
                version = await self._consensus.cas(key, expected, data, self._rand.nonce())
            except ConflictError as conflict:
                current = conflict.current
                assert current is None or isinstance(current, Versioned)
                self._remembered[key] = _register(current)
                return ("conflict", _register(current))
            self._remembered[key] = (version.seq, data)
            return ("ok", version.seq)

        await self._history.record(self._who, key, ("cas", expected, data), call)

    async def _read_log(self) -> None:
        async def call() -> Any:
            found = await self._consensus.read(LOG, 0)
            return (found.head.term, tuple(record.data for record in found.records))

        await self._history.record(self._who, LOG, ("read",), call)

    async def _append(self) -> None:
        """Append to the shared log, sometimes in a new term, at a position that may be stale."""
        source = self._world.source
        try:
            head = await self._consensus.log_head(LOG)
        except UnavailableError:
            return
        term = head.term
        if source.random() < 0.3:
            term += 1
            await self._history.record(self._who, LOG, ("fence", term), lambda: self._fence(term))
        records = tuple(self._rand.nonce()[:6].encode() for _ in range(source.randint(1, 3)))

        async def call() -> Any:
            try:
                grown = await self._consensus.append(LOG, term, head.next, records, self._rand.nonce())
            except (ConflictError, FencedError) as refused:
                return _refusal(refused)
            return ("ok", grown.next)

        await self._history.record(self._who, LOG, ("append", term, head.next, records), call)

    async def _fence(self, term: int) -> Any:
        try:
            return ("ok", (await self._consensus.fence(LOG, term)).term)
        except FencedError as refused:
            return _refusal(refused)

    async def _submit(self) -> None:
        """Append one record to a log exactly once, in spite of lost answers, as every writer in the rooms must."""
        record = self._rand.nonce().encode()
        self._history.submitted[record] = False
        while True:
            try:
                head = await self._consensus.log_head(SUBMITTED)
                nonce = self._rand.nonce()
                try:
                    await self._consensus.append(SUBMITTED, 0, head.next, [record], nonce)
                except UnknownOutcomeError:
                    if self._fault == "blind-retry" or not await self._landed(head.next, nonce):
                        continue
                break
            except ConflictError:
                continue
            except UnavailableError:
                await asyncio.sleep(0.01)
        self._history.submitted[record] = True

    async def _landed(self, position: int, nonce: str) -> bool:
        while True:
            try:
                return await resolve_append(self._consensus, SUBMITTED, position, nonce)
            except UnavailableError:
                await asyncio.sleep(0.01)


def _register(version: Versioned | None) -> tuple[int, bytes]:
    return (version.seq, version.data) if version else (0, b"")


def _refusal(refused: ConflictError | FencedError) -> tuple[str, int]:
    head = refused.current
    assert isinstance(head, LogHead)
    return ("fenced", head.term) if isinstance(refused, FencedError) else ("conflict", head.next)


async def run(world: World, fault: str = "") -> None:
    history = History(world)
    source = world.source

    async def build(actor: Actor[Client]) -> Client:
        return Client(world, actor, history, fault)

    async def life(actor: Actor[Client]) -> None:
        for _ in range(source.randint(1, 2)):
            await actor.start()
            if not actor.up:
                continue
            working = actor.enter(lambda node: node.work())
            doomed = source.random() < 0.4
            await asyncio.wait([working], timeout=source.uniform(0, 0.3) if doomed else None)
            if doomed:
                actor.crash()
            await asyncio.gather(working, return_exceptions=True)
            if working.exception() is not None and not doomed:
                raise working.exception()  # type: ignore[misc]

    clients = [Actor(world, f"client-{i}", build) for i in range(source.randint(2, 4))]
    async with Crew() as crew:
        for client in clients:
            crew.spawn(life(client))
    await check(world, history)


async def check(world: World, history: History) -> None:
    for name, calls in history.calls.items():
        log = name == LOG
        initial: Any = (0, ()) if log else (0, b"")
        if not linearizable(calls, initial, log_model if log else register_model):
            shown = "; ".join(
                f"{c.client} {c.operation} [{c.start:.0f}, {'…' if c.end == NEVER else int(c.end)}] → {c.result}"
                for c in calls
            )
            raise Violated(f"not linearizable: object={name} history={shown}")
    try:
        standing = [record.data for record in (await world.consensus.read(SUBMITTED, 0)).records]
    except TidemillError as error:
        raise Violated(f"the submitted log cannot be read: {error}") from error
    for record, reported in history.submitted.items():
        count = standing.count(record)
        if count > 1 or (reported and count != 1):
            raise Violated(f"a submitted record stands {count} times: record={record!r} told={reported}")
