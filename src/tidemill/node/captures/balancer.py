"""Distribution of captures over nodes: each node tries for its share and hands over what exceeds it.

    free      the planned node tries immediately, the next one a pause later, and so on
    uneven    a node hands over a capture that the plan moves away, once that has persisted for a while
    unable    a node hands over a capture that it cannot run, if another node offers to (backoff.py)

All nodes compute the same plan (placement.py), so that nodes that poll at the same time do not all hand over.

Safety does not depend on this module. The lease decides which node captures; PostgreSQL's lock and the logs of the
topics ensure that only one does. Two nodes with different views both try, and one succeeds.

Invariant (liveness): every willing node eventually tries, independent of the others. No capture stays free because the
planned node does not take it.
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

TRY_INTERVAL_S = 1.5
"""Pause between the tries of two nodes: longer than a poll, so that the first one has acquired the lease before."""
HANDOVER_DELAY_S = 5.0
"""Time for which an imbalance must persist. A move costs the capture a moment and its shapes a new copy, so a node
that comes and goes quickly gets no captures."""

LeaseView = tuple[Mapping[str, str], Willing]
"""Result of one poll: (capture → holder of its lease, willing nodes). The same object is returned until the next
poll."""


def node_of(holder: str) -> str:
    """Return the name of the node whose process holds a lease."""
    return holder.partition("/")[0]


def _true_since_s(since_s: float | None, holds: bool, now_s: float) -> float | None:
    return None if not holds else now_s if since_s is None else since_s


def _unknown_health() -> str:
    """Return the health of a capture that is not set up yet, or is ending."""
    return ""


class CaptureBalancer:
    """Balancer of one process, which holds leases as `instance`: its node's name, a slash, and more.

    `look()` waits for the next poll of the leases. `withhold` publishes which captures this node may run and does not
    offer. `health[capture]` exists while a capture runs: it returns None if the capture streams or copies, otherwise
    its error, or "".
    """

    def __init__(
        self,
        instance: str,
        look: Callable[[], Awaitable[LeaseView]],
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
        self._view: LeaseView | None = None
        self._placement = Placement({}, {})

    async def wait_for_turn(self, capture: str) -> None:
        """Return when this node should try for the capture's lease. A lease that an earlier process of this node
        left behind belongs to this node."""
        free_s: float | None = None
        while True:
            holders, placement = await self._next_plan()
            holder = holders.get(capture, "")
            if holder and node_of(holder) == self._node and holder != self._instance:
                return
            if holder:  # held by this process only in an old view: it has just released the lease
                free_s = None
                continue
            now_s = self._clock.monotonic_s()
            free_s = now_s if free_s is None else free_s
            line = placement.nodes_in_try_order(capture)
            place = line.index(self._node) if self._node in line else len(line)
            if now_s - free_s >= place * TRY_INTERVAL_S:
                return

    def facts(self) -> dict[str, object]:
        """Return facts for reports: captures that this node handed over because it cannot run them."""
        return {"given_up": self._backoff.facts(self._clock.monotonic_s())}

    def with_handover(
        self, capture: str, run: Callable[[Lease], Awaitable[None]]
    ) -> Callable[[Lease], Awaitable[None]]:
        """Return the body to run under the lease: `run`, ended when another node should have the capture or this
        node cannot run it."""

        async def run_until_handover(lease: Lease) -> None:
            failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def fail(_: str, error: BaseException) -> None:
                if not failed.done():
                    failed.set_exception(error)

            async with Tasks(fail) as tasks:
                running = tasks.spawn(_as_coroutine(run, lease), name=f"capture {capture}")
                giving = tasks.spawn(self._watch_handover(capture), name=f"share of {capture}")
                await asyncio.wait([running, giving, failed], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            failed.cancel()

        return run_until_handover

    async def _next_plan(self) -> tuple[Mapping[str, str], Placement]:
        """Return the holders and the plan as of the next poll. All captures of this process wait for the same poll,
        and the plan is recomputed only if the view differs. This node's own withheld captures count immediately,
        before other nodes see them."""
        view = await self._look()
        if view is not self._view:
            holders, willing = view
            nodes, now_s = {capture: node_of(holder) for capture, holder in holders.items()}, self._clock.monotonic_s()
            self._backoff.observe_offers(nodes, willing, now_s)
            withheld = self._backoff.withheld_captures(now_s)
            if withheld != self._withheld:
                self._withhold(withheld)
            if withheld != self._withheld or view != self._view:
                own = {self._node: set(willing[self._node]) - withheld} if self._node in willing else {}
                self._placement = Placement(nodes, {**willing, **own})
            self._view, self._withheld = view, withheld
        return view[0], self._placement

    async def _watch_handover(self, capture: str) -> None:
        try:
            await self._wait_for_handover(capture)
        finally:
            self._backoff.forget_holding(capture)

    async def _wait_for_handover(self, capture: str) -> None:
        uneven_s: float | None = None
        unable_s: float | None = None
        while True:
            _, placement = await self._next_plan()
            now_s = self._clock.monotonic_s()
            self._backoff.record_health(capture, self.health.get(capture, _unknown_health)(), now_s)
            unable_s = _true_since_s(unable_s, self._backoff.is_failing(capture, now_s), now_s)
            # HANDOVER_DELAY_S later the other nodes know that this node does not offer the capture, and this node knows
            # whether they do.
            if (
                unable_s is not None
                and now_s - unable_s >= HANDOVER_DELAY_S
                and {*placement.nodes_in_try_order(capture)} - {self._node}
            ):
                error = self._backoff.start_pause(capture, now_s)
                log.warning("capture handed over: it fails on this node", capture=capture, node=self._node, error=error)
                return
            uneven_s = _true_since_s(uneven_s, capture in placement.captures_to_hand_over(self._node), now_s)
            if uneven_s is not None and now_s - uneven_s >= HANDOVER_DELAY_S:
                log.info("capture handed over: another node has fewer", capture=capture, node=self._node)
                return


async def _as_coroutine(run: Callable[[Lease], Awaitable[None]], lease: Lease) -> None:
    await run(lease)
