"""Pure core of the producer queue. No clock, no I/O, no waiting: every call returns the tickets that it resolved.

Invariant (order per line): tickets of one line get their turn in reservation order; lines never wait for each other. A
producer id has its own line. Batches without one are in the line of their connection: every Kafka broker preserves
their order, and clients rely on it.

Invariant (poisoning): a producer id's ticket that is abandoned before it reaches the log poisons every later ticket of
its line, including those that already had their turn. So no batch overtakes one that its client will retry.

Invariant (no early turn): ending a ticket in the middle never gives its successor a turn before its real predecessor.

In a connection's line a failed batch does not poison its successors: a retry joins the end of the line.

    reserve ──► WAITING ──(predecessor placed or ended)──► READY ──place──► PLACED ──release──► ENDED
                   └──────────────(a predecessor abandoned)──► POISONED ──release/abandon──► ENDED

`place` fixes a ticket's position in the log's input, so that the successor may follow immediately. `release` means that
its outcome is decided in the log. `abandon` means that it will never be in the log.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

ProducerLine = Hashable
"""A producer id (an int), or any other value for a connection."""


class TicketState(Enum):
    WAITING = "waiting"
    READY = "ready"
    PLACED = "placed"
    POISONED = "poisoned"
    ENDED = "ended"


class Ticket:
    """One slot in a line. Only ProducerQueueCore writes it; `then` belongs to the async shell."""

    __slots__ = ("after", "before", "line", "state", "then")

    def __init__(self, line: ProducerLine) -> None:
        self.line = line
        self.state = TicketState.WAITING
        self.before: Ticket | None = None
        self.after: Ticket | None = None
        self.then: object = None

    @property
    def is_poisoned(self) -> bool:
        return self.state is TicketState.POISONED

    @property
    def is_ended(self) -> bool:
        return self.state is TicketState.ENDED


class ProducerQueueCore:
    def __init__(self) -> None:
        self._tails: dict[ProducerLine, Ticket] = {}

    def __len__(self) -> int:
        """Return the number of lines with a live ticket."""
        return len(self._tails)

    def reserve(self, line: ProducerLine) -> Ticket:
        """Reserve the next slot in this line. It is READY immediately if no unplaced ticket precedes it."""
        ticket = Ticket(line)
        tail = self._tails.get(line)
        self._tails[line] = ticket
        if tail is None:
            ticket.state = TicketState.READY
        else:
            tail.after, ticket.before = ticket, tail
            if tail.state is TicketState.POISONED:
                ticket.state = TicketState.POISONED
            elif tail.state is TicketState.PLACED:
                ticket.state = TicketState.READY
        return ticket

    def place(self, ticket: Ticket) -> list[Ticket]:
        """Fix the ticket's position, which gives its successor the turn. Does nothing unless the ticket is READY."""
        if ticket.state is not TicketState.READY:
            return []
        ticket.state = TicketState.PLACED
        after = ticket.after
        if after is not None and after.state is TicketState.WAITING:
            after.state = TicketState.READY
            return [after]
        return []

    def release(self, ticket: Ticket) -> list[Ticket]:
        """End a ticket whose outcome is decided in the log. Idempotent; also ends a waiting or poisoned ticket."""
        if ticket.state is TicketState.POISONED:
            return self.abandon(ticket)
        return self._end_ticket(ticket)

    def abandon(self, ticket: Ticket) -> list[Ticket]:
        """End a ticket that will never reach the log, and poison its successors in a producer id's line.

        Idempotent. Returns the tickets that were waiting.
        """
        if ticket.state is TicketState.ENDED:
            return []
        if not isinstance(ticket.line, int):
            return self._end_ticket(ticket)
        resolved = []
        follower = ticket.after
        while follower is not None:
            if follower.state is TicketState.WAITING:
                resolved.append(follower)
            follower.state = TicketState.POISONED
            follower = follower.after
        return resolved + self._end_ticket(ticket)

    def _end_ticket(self, ticket: Ticket) -> list[Ticket]:
        if ticket.state is TicketState.ENDED:
            return []
        ticket.state = TicketState.ENDED
        before, after = ticket.before, ticket.after
        ticket.before = ticket.after = None
        if before is not None:
            before.after = after
        if after is not None:
            after.before = before
        elif before is not None:
            self._tails[ticket.line] = before
        else:
            del self._tails[ticket.line]
        has_turn = before is None or before.state is TicketState.PLACED
        if after is not None and has_turn and after.state is TicketState.WAITING:
            after.state = TicketState.READY
            return [after]
        return []
