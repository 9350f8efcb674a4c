"""Pure core of the producer queue. No clock, no I/O, no waiting: every call returns the tickets it resolved.

Q1  Tickets of one producer get their turn in reservation order; producers never wait for each other.
Q2  A ticket given up without reaching the log poisons every later ticket of its producer, transitively,
    those that already had their turn included: nothing may leapfrog a batch its client will retry.
Q3  Ending a ticket in the middle never gives its successor a turn before its real predecessor.
Q4  Without a producer id there is no order, only a limit on how many are under way.

    reserve ──► WAITING ──(predecessor placed or ended)──► READY ──place──► PLACED ──release──► ENDED
                   └──────────────(a predecessor abandoned)──► POISONED ──release/abandon──► ENDED

`place` fixes a ticket's position in the log's input, so the successor may follow at once; `release` says
that its fate is decided in the log; `abandon` says that it will never be there.
"""

from __future__ import annotations

from collections import deque
from enum import Enum


class TicketState(Enum):
    WAITING = "waiting"
    READY = "ready"
    PLACED = "placed"
    POISONED = "poisoned"
    ENDED = "ended"


class Ticket:
    """One place in line. Only QueueCore writes it; `then` belongs to the shell."""

    __slots__ = ("after", "before", "producer_id", "state", "then")

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
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
    def __init__(self, anonymous_limit: int = 1024) -> None:
        self._tails: dict[int, Ticket] = {}
        self._anonymous_limit = anonymous_limit
        self._anonymous_running = 0
        self._anonymous_waiting: deque[Ticket] = deque()

    def __len__(self) -> int:
        """Producers with a live ticket, plus anonymous tickets: 0 when nothing is left behind."""
        return len(self._tails) + self._anonymous_running + len(self._anonymous_waiting)

    def reserve(self, producer_id: int) -> Ticket:
        """The next place of this producer; −1 = no producer id. READY at once when nobody is before it."""
        ticket = Ticket(producer_id)
        if producer_id < 0:
            if self._anonymous_running < self._anonymous_limit:
                self._anonymous_running += 1
                ticket.state = TicketState.READY
            else:
                self._anonymous_waiting.append(ticket)
            return ticket
        tail = self._tails.get(producer_id)
        self._tails[producer_id] = ticket
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
        """It will never reach the log: poison all successors. Idempotent. Returns those that were waiting."""
        if ticket.state is TicketState.ENDED:
            return []
        resolved = []
        follower = ticket.after
        while follower is not None:
            if follower.state is TicketState.WAITING:
                resolved.append(follower)
            follower.state = TicketState.POISONED
            follower = follower.after
        return resolved + self._end(ticket)

    def _end(self, ticket: Ticket) -> list[Ticket]:
        was = ticket.state
        if was is TicketState.ENDED:
            return []
        ticket.state = TicketState.ENDED
        if ticket.producer_id < 0:
            return self._end_anonymous(ticket, was)
        before, after = ticket.before, ticket.after
        ticket.before = ticket.after = None
        if before is not None:
            before.after = after
        if after is not None:
            after.before = before
        elif before is not None:
            self._tails[ticket.producer_id] = before
        else:
            del self._tails[ticket.producer_id]
        has_turn = before is None or before.state is TicketState.PLACED
        if after is not None and has_turn and after.state is TicketState.WAITING:
            after.state = TicketState.READY
            return [after]
        return []

    def _end_anonymous(self, ticket: Ticket, was: TicketState) -> list[Ticket]:
        if was is TicketState.WAITING:
            self._anonymous_waiting.remove(ticket)
            return []
        if self._anonymous_waiting:
            heir = self._anonymous_waiting.popleft()
            heir.state = TicketState.READY
            return [heir]
        self._anonymous_running -= 1
        return []
