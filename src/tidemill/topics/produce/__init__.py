"""The producer queue: the place in line of every batch, taken in a plain call before anything waits (seed 000)."""

from __future__ import annotations

from tidemill.topics.produce.order_queue import Line, QueueCore, Ticket, TicketState
from tidemill.topics.produce.order_queue_async import ProducerQueue

__all__ = ["Line", "ProducerQueue", "QueueCore", "Ticket", "TicketState"]
