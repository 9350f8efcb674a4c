"""Pure core of the producer queue. No clock, no I/O, no waiting: every call returns the tickets it resolved.

Q1  Tickets of one line get their turn in reservation order; lines never wait for each other. A producer id has a line
    of its own; batches without one are in the line of the connection that they came by, as every Kafka broker keeps
    their order and clients rely on it.
Q2  A producer id's ticket given up without reaching the log poisons every later one of its line, transitively,
    those that already had their turn included: nothing may leapfrog a batch its client will retry.
Q3  Ending a ticket in the middle never gives its successor a turn before its real predecessor.
Q4  In a connection's line a failed batch is answered and its successors go on: what its client sends again comes by
    the end of the line.

    reserve ──► WAITING ──(predecessor placed or ended)──► READY ──place──► PLACED ──release──► ENDED
                   └──────────────(a predecessor abandoned)──► POISONED ──release/abandon──► ENDED

`place` fixes a ticket's position in the log's input, so the successor may follow at once; `release` says
that its fate is decided in the log; `abandon` says that it will never be there.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

ProducerLine = Hashable
"""A producer id (an int), or whatever else stands for a connection."""


class TicketState(Enum):
    WAITING = "waiting"
    READY = "ready"
    PLACED = "placed"
    POISONED = "poisoned"
    ENDED = "ended"


class Ticket:
    """One place in line. Only QueueCore writes it; `then` belongs to the shell."""

    __slots__ = ("after", "before", "line", "state", "then")

    def __init__(self, line: ProducerLine) -> None:
        self.line = line
        self.state = TicketState.WAITING
        self.before: Ticket | None = None
        self.after: Ticket | None = None
        self.then: object = None

    @property
    def poisoned(self) -> bool:
        return self.state is TicketState.POISONED

    @property
    def ended(self) -> bool:
        return self.state is TicketState.ENDED


class QueueCore:
    def __init__(self) -> None:
        self._tails: dict[ProducerLine, Ticket] = {}

    def __len__(self) -> int:
        """Lines with a live ticket: 0 when nothing is left behind."""
        return len(self._tails)

    def reserve(self, line: ProducerLine) -> Ticket:
        """The next place in this line. READY at once when nobody is before it."""
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
        """Its position is fixed: the successor has its turn. Requires READY; otherwise nothing happens."""
        if ticket.state is not TicketState.READY:
            return []
        ticket.state = TicketState.PLACED
        after = ticket.after
        if after is not None and after.state is TicketState.WAITING:
            after.state = TicketState.READY
            return [after]
        return []

    def release(self, ticket: Ticket) -> list[Ticket]:
        """Its fate is decided in the log. Idempotent; also ends a waiting or poisoned ticket."""
        if ticket.state is TicketState.POISONED:
            return self.abandon(ticket)
        return self._end(ticket)

    def abandon(self, ticket: Ticket) -> list[Ticket]:
        """It will never reach the log: poison all successors (Q2, Q4). Idempotent. Returns those that were waiting."""
        if ticket.state is TicketState.ENDED:
            return []
        if not isinstance(ticket.line, int):
            return self._end(ticket)
        resolved = []
        follower = ticket.after
        while follower is not None:
            if follower.state is TicketState.WAITING:
                resolved.append(follower)
            follower.state = TicketState.POISONED
            follower = follower.after
        return resolved + self._end(ticket)

    def _end(self, ticket: Ticket) -> list[Ticket]:
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
