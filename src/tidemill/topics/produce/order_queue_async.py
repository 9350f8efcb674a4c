"""Async shell of the producer queue: calls, or wakes, the owner of a ticket when its turn comes.

Callbacks run one after another from a worklist, never nested: a chain of a thousand waiting batches must not become a
thousand stack frames.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tidemill.base.errors import UnavailableError
from tidemill.topics.produce.order_queue import ProducerLine, ProducerQueueCore, Ticket, TicketState

TurnCallback = Callable[[Ticket], None]


class ProducerQueue:
    """Queue of one partition. Single-threaded: all calls come from the event loop's thread."""

    def __init__(self) -> None:
        self._core = ProducerQueueCore()
        self._due: deque[Ticket] = deque()
        self._draining = False

    def __len__(self) -> int:
        return len(self._core)

    def reserve(self, line: ProducerLine) -> Ticket:
        """Reserve the next slot in this line. The caller must end the ticket."""
        return self._core.reserve(line)

    def redeem(self, ticket: Ticket, then: TurnCallback) -> None:
        """Call `then(ticket)` once the ticket is READY or POISONED; immediately if it already is."""
        ticket.then = then
        if ticket.state is not TicketState.WAITING:
            self._run_callbacks([ticket])

    def place(self, ticket: Ticket) -> None:
        self._run_callbacks(self._core.place(ticket))

    def release(self, ticket: Ticket) -> None:
        self._run_callbacks(self._core.release(ticket))

    def abandon(self, ticket: Ticket) -> None:
        self._run_callbacks(self._core.abandon(ticket))

    async def wait_turn(self, ticket: Ticket) -> None:
        """Wait for the turn. Raises UnavailableError if a predecessor was abandoned.

        A cancellation before or during the wait abandons the ticket; a later one has no effect on it.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_turn(_: Ticket) -> None:
            if not future.done():
                future.set_result(None)

        self.redeem(ticket, on_turn)
        try:
            await future
        except asyncio.CancelledError:
            self.abandon(ticket)
            raise
        if ticket.is_poisoned:
            self.abandon(ticket)
            raise UnavailableError(f"an earlier batch of this producer failed: line={ticket.line}.")

    def _run_callbacks(self, resolved: list[Ticket]) -> None:
        self._due.extend(resolved)
        if self._draining:
            return
        self._draining = True
        try:
            while self._due:
                ticket = self._due.popleft()
                then, ticket.then = ticket.then, None
                if then is not None:
                    then(ticket)  # type: ignore[operator]
        finally:
            self._draining = False
