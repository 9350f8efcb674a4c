"""The producer queue: every row of its acceptance table, and a model."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidemill.base.errors import UnavailableError
from tidemill.topics.produce import ProducerLine, ProducerQueue, ProducerQueueCore, Ticket, TicketState


def test_basic_the_first_ticket_redeems_at_once() -> None:
    queue = ProducerQueueCore()
    ticket = queue.reserve(1)
    assert ticket.state is TicketState.READY
    assert queue.release(ticket) == []
    assert len(queue) == 0


def test_ordering_enforced_the_second_has_its_turn_only_after_the_first_is_released() -> None:
    queue = ProducerQueueCore()
    first, second = queue.reserve(1), queue.reserve(1)
    assert second.state is TicketState.WAITING
    assert queue.release(first) == [second]
    assert second.state is TicketState.READY


def test_the_second_may_follow_as_soon_as_the_first_is_placed() -> None:
    queue = ProducerQueueCore()
    first, second = queue.reserve(1), queue.reserve(1)
    assert queue.place(first) == [second]
    assert queue.reserve(1).state is TicketState.WAITING
    queue.place(second)
    assert queue.reserve(1).state is TicketState.WAITING


def test_without_a_producer_id_a_connection_is_a_line() -> None:
    queue = ProducerQueueCore()
    first, second, elsewhere = queue.reserve(("c", 1)), queue.reserve(("c", 1)), queue.reserve(("c", 2))
    assert [t.state for t in (first, second, elsewhere)] == [TicketState.READY, TicketState.WAITING, TicketState.READY]
    assert queue.place(first) == [second]


def test_a_failed_batch_of_a_connection_poisons_nothing_and_its_successors_go_on() -> None:
    queue = ProducerQueueCore()
    first, second, third = (queue.reserve(("c", 1)) for _ in range(3))
    assert queue.abandon(second) == []
    assert third.state is TicketState.WAITING
    assert queue.abandon(first) == [third]
    queue.release(third)
    assert len(queue) == 0


def test_multiple_producers_do_not_block_each_other() -> None:
    queue = ProducerQueueCore()
    queue.reserve(1)
    assert queue.reserve(2).state is TicketState.READY


def test_release_of_the_middle_does_not_free_the_third_before_the_first() -> None:
    queue = ProducerQueueCore()
    first, second, third = (queue.reserve(1) for _ in range(3))
    assert queue.release(second) == []
    assert third.state is TicketState.WAITING
    assert queue.release(first) == [third]


def test_release_of_the_tail_makes_its_predecessor_the_tail() -> None:
    queue = ProducerQueueCore()
    first, second = queue.reserve(1), queue.reserve(1)
    queue.release(second)
    third = queue.reserve(1)
    assert third.state is TicketState.WAITING
    assert queue.release(first) == [third]


def test_continuation_cleanup_drop_the_second_release_the_first_and_no_link_dangles() -> None:
    queue = ProducerQueueCore()
    first, second = queue.reserve(1), queue.reserve(1)
    queue.abandon(second)
    assert queue.release(first) == []
    assert len(queue) == 0
    assert (first.before, first.after, second.before, second.after) == (None, None, None, None)


def test_release_is_idempotent() -> None:
    queue = ProducerQueueCore()
    first, second, third = (queue.reserve(1) for _ in range(3))
    queue.release(first)
    assert queue.release(first) == []
    assert queue.abandon(first) == []
    assert second.state is TicketState.READY
    assert third.state is TicketState.WAITING


def test_poison_an_abandoned_predecessor_poisons_its_successors_transitively() -> None:
    queue = ProducerQueueCore()
    first, second, third = (queue.reserve(1) for _ in range(3))
    assert queue.abandon(first) == [second, third]
    assert second.is_poisoned and third.is_poisoned
    assert queue.reserve(1).is_poisoned, "a later arrival behind a poisoned ticket is poisoned too"


def test_poison_reaches_a_successor_that_already_had_its_turn() -> None:
    queue = ProducerQueueCore()
    first, second = queue.reserve(1), queue.reserve(1)
    queue.place(first)
    queue.place(second)
    assert queue.abandon(first) == []
    assert second.is_poisoned


def test_poison_ends_with_the_last_poisoned_ticket() -> None:
    queue = ProducerQueueCore()
    first, second = queue.reserve(1), queue.reserve(1)
    queue.abandon(first)
    queue.release(second)
    assert queue.reserve(1).state is TicketState.READY


async def test_redeem_with_abort_is_an_error_while_waiting_and_leaves_nothing() -> None:
    queue = ProducerQueue()
    first, second = queue.reserve(1), queue.reserve(1)
    waiting = asyncio.ensure_future(queue.wait_turn(second))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    queue.release(first)
    assert len(queue) == 0


async def test_redeem_with_abort_afterwards_does_nothing() -> None:
    queue = ProducerQueue()
    ticket = queue.reserve(1)
    waiting = asyncio.ensure_future(queue.wait_turn(ticket))
    await waiting
    waiting.cancel()
    assert ticket.state is TicketState.READY
    queue.release(ticket)
    assert len(queue) == 0


async def test_redeeming_a_poisoned_ticket_raises_and_ends_it() -> None:
    queue = ProducerQueue()
    first, second = queue.reserve(1), queue.reserve(1)
    waiting = asyncio.ensure_future(queue.wait_turn(second))
    await asyncio.sleep(0)
    queue.abandon(first)
    with pytest.raises(UnavailableError):
        await waiting
    assert len(queue) == 0


@pytest.mark.parametrize(("producers", "batches", "drop"), [(3, 50, 0.0), (3, 500, 0.3)])
async def test_concurrent_producers_keep_their_order_and_leave_nothing(
    producers: int, batches: int, drop: float
) -> None:
    source = random.Random(producers * batches)
    queue = ProducerQueue()
    order: list[tuple[int, int]] = []

    async def one(producer: int, number: int, ticket: Ticket) -> None:
        for _ in range(source.randrange(4)):
            await asyncio.sleep(0)
        if source.random() < drop:
            queue.release(ticket)
            return
        await queue.wait_turn(ticket)
        order.append((producer, number))
        queue.place(ticket)
        await asyncio.sleep(0)
        queue.release(ticket)

    jobs = [one(p, n, queue.reserve(p)) for n in range(batches) for p in range(producers)]
    source.shuffle(jobs)
    await asyncio.gather(*jobs)
    for producer in range(producers):
        numbers = [n for p, n in order if p == producer]
        assert numbers == sorted(numbers)
        assert drop or len(numbers) == batches
    assert len(queue) == 0


def test_a_chain_of_thousands_does_not_nest() -> None:
    queue = ProducerQueue()
    tickets = [queue.reserve(1) for _ in range(5000)]
    turned: list[Ticket] = []

    def placed(ticket: Ticket) -> None:
        turned.append(ticket)
        queue.place(ticket)

    for ticket in tickets[1:]:
        queue.redeem(ticket, placed)
    queue.redeem(tickets[0], placed)
    assert turned == tickets


class QueueModel(RuleBasedStateMachine):
    """The rules without links: a list of (ticket, fate) per producer, oldest first."""

    @initialize()
    def empty(self) -> None:
        self.queue = ProducerQueueCore()
        self.lines: dict[ProducerLine, list[Ticket]] = {}
        self.placed: set[Ticket] = set()
        self.poisoned: set[Ticket] = set()

    def tickets(self) -> list[Ticket]:
        return [t for line in self.lines.values() for t in line]

    @rule(producer=st.sampled_from([0, 1, ("c", 0), ("c", 1)]))
    def reserve(self, producer: ProducerLine) -> None:
        ticket = self.queue.reserve(producer)
        line = self.lines.setdefault(producer, [])
        if line and line[-1] in self.poisoned:
            self.poisoned.add(ticket)
        line.append(ticket)

    @precondition(lambda self: self.tickets())
    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets()))
        if ticket.state is TicketState.READY:
            self.placed.add(ticket)
        self.queue.place(ticket)

    @precondition(lambda self: self.tickets())
    @rule(data=st.data(), abandon=st.booleans())
    def end(self, data: st.DataObject, abandon: bool) -> None:
        ticket = data.draw(st.sampled_from(self.tickets()))
        line = self.lines[ticket.line]
        position = line.index(ticket)
        if isinstance(ticket.line, int) and (abandon or ticket in self.poisoned):
            self.poisoned |= set(line[position + 1 :])
        before = {t for t in self.tickets() if t.state is TicketState.WAITING}
        resolved = self.queue.abandon(ticket) if abandon else self.queue.release(ticket)
        line.remove(ticket)
        if not line:
            del self.lines[ticket.line]
        after = {t for t in self.tickets() if t.state is TicketState.WAITING}
        assert set(resolved) == before - after - {ticket}
        assert ticket.is_ended

    @invariant()
    def states_follow_the_line(self) -> None:
        assert len(self.queue) == len(self.lines)
        for line in self.lines.values():
            for index, ticket in enumerate(line):
                if ticket in self.poisoned:
                    expected = TicketState.POISONED
                elif ticket in self.placed:
                    expected = TicketState.PLACED
                elif all(t in self.placed and t not in self.poisoned for t in line[:index]):
                    expected = TicketState.READY
                else:
                    expected = TicketState.WAITING
                assert ticket.state is expected


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
