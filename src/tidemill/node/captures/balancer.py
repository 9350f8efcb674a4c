"""Which node captures what: each tries for its share, and gives up what is more than that.

    free      the node that should have it tries at once, the next one a pause later, and so on
    uneven    a node gives up what should move from it, once that has stood a while
    unable    a node gives up what it cannot capture, where another one offers to (backoff.py)

What should be where is one plan that all make alike (placement.py), so that many who look at once do not all give.

S1  Nothing here is needed for safety: the lease says who captures, PostgreSQL's lock and the topics' logs that there is
    one. Two nodes that see it otherwise try both, and one gets it.
S2  Whoever is willing comes to try, whatever the others do: nothing stays free because of who should have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Lease
from tidemill.node.captures.backoff import CaptureBackoff
from tidemill.node.captures.placement import Placement, Willing

log = structlog.get_logger()

PAUSE_S = 1.5
"""Between the tries of two nodes: more than a look takes, so that the first one has it by then."""
UNEVEN_S = 5.0
"""Moving a capture costs it a moment, and its shapes a new copy: who comes and goes at once gets none."""

View = tuple[Mapping[str, str], Willing]
"""(capture → who holds its lease, willing nodes), as of one look; the same object until the next one."""


def node_of(holder: str) -> str:
    """The name of the node that a lease's holder is a life of."""
    return holder.partition("/")[0]


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    return None if not holds else now_s if since_s is None else since_s


def _unknown() -> str:
    """Of a capture that is not yet set up, or is just ending."""
    return ""


class CaptureBalancer:
    """Of one process, which holds leases as `instance`: its node's name, a slash, and more. `look()` waits for the next
    look at the leases; `withhold` tells the others which captures this node may run and does not offer.
    `health[capture]`, while one runs, says how it is: None, it streams or copies; else what it fails with, or ""."""

    def __init__(
        self,
        instance: str,
        look: Callable[[], Awaitable[View]],
        clock: Clock,
        withhold: Callable[[frozenset[str]], None] = lambda _: None,
    ) -> None:
        self._instance = instance
        self._node = node_of(instance)
        self._look = look
        self._clock = clock
        self._withhold = withhold
        self.health: dict[str, Callable[[], str | None]] = {}
        self._backoff = CaptureBackoff(self._node)
        self._withheld: frozenset[str] = frozenset()
        self._view: View | None = None
        self._placement = Placement({}, {})

    async def turn(self, capture: str) -> None:
        """Until this node should try for the capture's lease. What an earlier process of it left behind is its own."""
        free_s: float | None = None
        while True:
            holders, placement = await self._planned()
            holder = holders.get(capture, "")
            if holder and node_of(holder) == self._node and holder != self._instance:
                return
            if holder:  # this process itself only as it was: it has just given it up
                free_s = None
                continue
            now_s = self._clock.monotonic_s()
            free_s = now_s if free_s is None else free_s
            line = placement.line(capture)
            place = line.index(self._node) if self._node in line else len(line)
            if now_s - free_s >= place * PAUSE_S:
                return

    def facts(self) -> dict[str, object]:
        """For reports: what this node gave up because it cannot capture it."""
        return {"given_up": self._backoff.facts(self._clock.monotonic_s())}

    def fairly(self, capture: str, run: Callable[[Lease], Awaitable[None]]) -> Callable[[Lease], Awaitable[None]]:
        """The body of the lease: `run`, ended where another node should have the capture, or this one cannot."""

        async def led(lease: Lease) -> None:
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def fail(_: str, error: BaseException) -> None:
                if not failed.done():
                    failed.set_exception(error)

            async with Tasks(fail) as tasks:
                running = tasks.spawn(_as_coroutine(run, lease), name=f"capture {capture}")
                giving = tasks.spawn(self._giving(capture), name=f"share of {capture}")
                await asyncio.wait([running, giving, failed], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            failed.cancel()

        return led

    async def _planned(self) -> tuple[Mapping[str, str], Placement]:
        """As of the next look. All captures of this process wait for the same one: it is planned for once, and only
        where it is another one than before. What this node withholds it knows before the others see it."""
        view = await self._look()
        if view is not self._view:
            holders, willing = view
            nodes, now_s = {capture: node_of(holder) for capture, holder in holders.items()}, self._clock.monotonic_s()
            self._backoff.sees(nodes, willing, now_s)
            withheld = self._backoff.withheld(now_s)
            if withheld != self._withheld:
                self._withhold(withheld)
            if withheld != self._withheld or view != self._view:
                own = {self._node: set(willing[self._node]) - withheld} if self._node in willing else {}
                self._placement = Placement(nodes, {**willing, **own})
            self._view, self._withheld = view, withheld
        return view[0], self._placement

    async def _giving(self, capture: str) -> None:
        try:
            await self._until_given(capture)
        finally:
            self._backoff.ended(capture)

    async def _until_given(self, capture: str) -> None:
        uneven_s: float | None = None
        unable_s: float | None = None
        while True:
            _, placement = await self._planned()
            now_s = self._clock.monotonic_s()
            self._backoff.feels(capture, self.health.get(capture, _unknown)(), now_s)
            unable_s = _since(unable_s, self._backoff.fails(capture, now_s), now_s)
            # By then the others know that it is not offered, and this node whether another one withholds it, too.
            if unable_s is not None and now_s - unable_s >= UNEVEN_S and {*placement.line(capture)} - {self._node}:
                error = self._backoff.give_up(capture, now_s)
                log.warning("a capture is given up, for it fails here", capture=capture, node=self._node, error=error)
                return
            uneven_s = _since(uneven_s, capture in placement.to_give(self._node), now_s)
            if uneven_s is not None and now_s - uneven_s >= UNEVEN_S:
                log.info("a capture is given up, for another node has fewer", capture=capture, node=self._node)
                return


async def _as_coroutine(run: Callable[[Lease], Awaitable[None]], lease: Lease) -> None:
    await run(lease)
