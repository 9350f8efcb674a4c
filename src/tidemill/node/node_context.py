"""State that all parts of one node share while it is assembled and while it serves.

The context owns the tasks of the node, the stack of parts to close, the stage statuses of the process, and the reason
why the node is not ready. It builds no part: assembly.py does.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import structlog
from starlette.routing import BaseRoute

from tidemill.base.address import Address
from tidemill.base.clock import Clock, Rand
from tidemill.base.config.config import Config, advertised_addresses
from tidemill.base.errors import UnavailableError
from tidemill.base.runtime.daemon_threads import call_in_daemon_thread
from tidemill.base.runtime.memory_budget import MemoryBudget
from tidemill.base.runtime.tasks import Tasks, open_with_retry, run_unit
from tidemill.base.status.status import StatusReport, StatusTracker
from tidemill.consensus.api import Consensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.lsm.compaction.executor import CompactionExecutor
from tidemill.metastore.metastore import Metastore
from tidemill.node.http.auth import AuthMiddleware
from tidemill.node.settings_from_config import build_grants
from tidemill.node.silent_peers import SilentPeers
from tidemill.node.status_publisher import StatusPublisher
from tidemill.objects.retrying import RetryingObjects
from tidemill.topics.membership import Membership

MoreRoutes = Callable[["NodeContext"], Sequence[BaseRoute]]
"""Factory of routes to serve next to the shapes."""

STARTING = "the node is starting."

log = structlog.get_logger()


class Storage(msgspec.Struct, frozen=True):
    """Stores that all rooms above use. `merger` runs the compactions of the metastore."""

    consensus: Consensus
    objects: RetryingObjects
    metastore: Metastore
    catalogue: Catalogue
    merger: CompactionExecutor


class NodeContext:
    """Shared state of one node. `process` names its stage status and its report; `instance` names this process in
    leases. The assembly builds `board`, `published`, `stores`, `membership` and `peers`. `guard` authenticates HTTP
    requests; without it, no request has to authenticate."""

    def __init__(
        self,
        config: Config,
        more_routes: MoreRoutes,
        clock: Clock,
        rand: Rand,
        on_failure: Callable[[str, BaseException], None],
    ) -> None:
        self.config = config
        self.clock = clock
        self.rand = rand
        self.tracker = StatusTracker(int(config.freshness.budget_s * 1000))
        self.budget = MemoryBudget()
        self.grants = build_grants(config, clock)
        self.tasks = Tasks(on_failure)
        self.stack = AsyncExitStack()
        self.process = f"node:{config.node.name}"
        self.instance = f"{config.node.name}/{os.getpid()}/{rand.nonce()[:8]}"
        self.waiting = STARTING
        self.advertised: dict[str, Address] = {}
        """Addresses to which clients are sent, by the key of the bound address; see `resolve_addresses`."""
        self.board: StatusBoard | None = None
        self.stores: Storage | None = None
        """The stores, once the catalogue can be read."""
        self.guard: AuthMiddleware | None = None
        self.membership: Membership | None = None
        self.peers: SilentPeers | None = None
        self.published: StatusPublisher | None = None
        self._more_routes = more_routes

    async def resolve_addresses(self) -> None:
        """Find the addresses to which clients of this node are sent. A wildcard needs the name of this machine, which
        may wait for DNS."""
        self.advertised = await call_in_daemon_thread(partial(advertised_addresses, self.config), "own name")
        node = self.config.node
        bound = [address for address in (node.http, node.kafka) if address]
        if not node.advertised_host and any(Address.parse(address).is_wildcard for address in bound):
            log.warning(
                "clients are sent to the name of this machine; node.advertised_host sets another one",
                addresses={key: str(address) for key, address in self.advertised.items()},
            )

    @property
    def url(self) -> str:
        """Return the address at which other nodes and clients reach the HTTP server."""
        scheme = "https" if self.config.http.tls else "http"
        return f"{scheme}://{self.advertised['node.http']}"

    @property
    def reporting(self) -> StatusPublisher:
        """Return the status publisher of a node whose consensus is open."""
        assert self.published is not None
        return self.published

    def not_ready_reason(self) -> str:
        """Return why this node is not ready, in a sentence, or ""."""
        troubles = self.published.troubles.values() if self.published is not None else ()
        return self.waiting or next((found for ask in troubles if (found := ask())), "")

    def current_problems(self) -> Sequence[str]:
        """Return the problems of this process although it is ready, and which other nodes are silent: a sentence
        each."""
        own = self.published.current_problems() if self.published is not None else []
        return [*own, *self.peers.silent_peer_lines()] if self.peers is not None else own

    async def read_reports(self) -> Sequence[StatusReport]:
        if self.board is None:
            raise UnavailableError(self.waiting or STARTING)
        return await self.board.reports_or_raise(self.not_ready_reason)

    def console_routes(self) -> Sequence[BaseRoute]:
        return self._more_routes(self)

    def record_wait(self, what: str, sentence: str) -> None:
        """Record what the node waits for. `what` is a stage of this process: the status of its store, as shown in
        the reports and by /readyz."""
        self.waiting = f"waiting for {what}: {sentence}" if sentence else STARTING
        self.tracker.set_foundation(what, sentence, now_ms=self.clock.now_ms())

    async def start_part(self, part: str, start: Callable[[], Awaitable[object]]) -> None:
        """Start one part. If a store becomes unavailable, wait for it, as at the start of the node: every `start`
        may be called again after UnavailableError or UnknownOutcomeError."""
        await open_with_retry(start, self.clock, waiting=partial(self._record_start_failure, part))

    def _record_start_failure(self, part: str, sentence: str) -> None:
        """Record why a part cannot start under the node's own stage, blocked by the store that reports a problem, if
        there is one."""
        self.waiting = f"{part} cannot start: {sentence}" if sentence else STARTING
        if not sentence:
            self.tracker.clear_failure(self.process)
            return
        store = next((name for name, ask in self.reporting.troubles.items() if ask()), "")
        blocker = f"{store}@{self.process}" if store else ""
        self.tracker.fail(self.process, self.waiting, now_ms=self.clock.now_ms(), held_by=blocker)

    def spawn_supervised(self, stage: str, body: Callable[[], Awaitable[None]]) -> None:
        """Run a task of the node that is restarted after a failure and reports it under `stage`."""
        self.tasks.spawn(run_unit(stage, body, tracker=self.tracker, clock=self.clock), name=stage)
