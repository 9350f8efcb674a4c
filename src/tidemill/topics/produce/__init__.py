"""Produce, stage 1: the order of a producer's batches, and their validation.

    batch ─► order_queue (reserve a slot, in a plain call) ─► validator_pool (inline or in a thread) ─► L0 writer
    order_queue_async: completion in the order of the slots, though uploads finish in any order

Owns the queue slot of each batch and its validation. Does not upload or append.
"""

from __future__ import annotations

from tidemill.topics.produce.order_queue import ProducerLine, ProducerQueueCore, Ticket, TicketState
from tidemill.topics.produce.order_queue_async import ProducerQueue

__all__ = ["ProducerLine", "ProducerQueue", "ProducerQueueCore", "Ticket", "TicketState"]
