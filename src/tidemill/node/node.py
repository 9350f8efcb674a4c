"""One node: its HTTP server, its assembly from a configuration, and its end.

HTTP (health and status) starts before everything else, so that a node whose stores are unavailable can report it. The
other rooms start in the order of assembly.py. A client that can connect gets an answer; parts that are not ready answer
"retry". Stop order is the reverse.

Units of failure: each capture and each housekeeping task is restarted by `base.runtime.tasks`. The node itself ends
only when HTTP or its assembly cannot continue, or when another process took its name.
"""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from tidemill.base.address import Address
from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.config.config import Config
from tidemill.base.errors import ClusterReplacedError
from tidemill.base.runtime import file_descriptors
from tidemill.base.runtime.tasks import Tasks, error_sentence
from tidemill.node.assembly import assemble
from tidemill.node.http.auth import AuthMiddleware
from tidemill.node.http.server import HttpServer, SwitchableApp, build_application, starting_routes
from tidemill.node.node_context import STARTING, MoreRoutes, NodeContext
from tidemill.node.settings_from_config import http_limits
from tidemill.node.status_publisher import LEAVE_S

log = structlog.get_logger()

HTTP_CERTIFICATES = "http:certificates"


class Node:
    """Node of one process: its HTTP server, its assembly, and its end."""

    def __init__(
        self, config: Config, more_routes: MoreRoutes, clock: Clock | None = None, rand: Rand | None = None
    ) -> None:
        self._context = NodeContext(
            config, more_routes, clock or SystemClock(), rand or Rand(), on_failure=self._task_failed
        )
        self._failed: asyncio.Future[None] | None = None

    @property
    def has_served(self) -> bool:
        """Return whether all rooms of this node have started."""
        return not self._context.waiting

    def not_ready_reason(self) -> str:
        """Return why this node is not ready, in a sentence, or ""."""
        return self._context.not_ready_reason()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set or the node as a whole fails. Raises the error that failed."""
        self._failed = asyncio.get_running_loop().create_future()
        node = self._context
        file_descriptors.raise_limit()
        early = build_application([*node.console_routes(), *starting_routes(STARTING)])
        app = SwitchableApp(early)
        http = self._build_http_server(app)
        async with node.stack as stack:
            await http.start()
            stack.push_async_callback(http.aclose)
            if node.config.http.tls:
                clear = partial(node.tracker.clear_failure, HTTP_CERTIFICATES)
                node.spawn_supervised(HTTP_CERTIFICATES, partial(http.watch_certificates, clear))
            node.tasks.spawn(assemble(node, app), name="assembly")
            try:
                await self._wait_until_stopped(stop)
            except ClusterReplacedError as error:
                if node.published is not None:  # no supervisor restarts this node: its last report gives the reason
                    await node.published.end(error_sentence(error))
                raise
            finally:
                app.app = early
                await self._leave_membership()
                await node.tasks.aclose()
            if node.published is not None:
                await node.published.publish_leaving_report()

    def _build_http_server(self, app: SwitchableApp) -> HttpServer:
        node, section = self._context, self._context.config.http
        if section.authenticate:
            node.guard = AuthMiddleware(app, node.clock, within_tls=section.tls, grants=node.grants)
        host, port = Address.parse(node.config.node.http)
        return HttpServer(
            node.guard or app,
            host,
            port,
            on_failure=self._task_failed,
            limits=http_limits(section),
            tls=node.config.security.tls if section.tls else None,
            origins=node.config.shapes.allowed_origins,
        )

    async def _leave_membership(self) -> None:
        """Leave the membership before the rest of this node ends, so that other nodes already serve its partitions."""
        if self._context.membership is not None:
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._context.membership.leave_cluster()
            except TimeoutError:
                log.info("leave not announced to other nodes: consensus does not answer")

    async def _wait_until_stopped(self, stop: asyncio.Event) -> None:
        assert self._failed is not None
        async with Tasks(lambda *_: None) as tasks:
            stopping = tasks.spawn(stop.wait(), name="until-stop")  # never fails
            await asyncio.wait([stopping, self._failed], return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()

    def _task_failed(self, name: str, error: BaseException) -> None:
        log.error("part of the node failed", part=name, error=str(error))
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
