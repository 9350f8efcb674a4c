"""The coordinator's rules alone: random sequences of requests from producers that start, stop, are slow and return."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from tidemill.kafka import error_codes
from tidemill.kafka.transactions import transitions
from tidemill.kafka.transactions.state import (
    EPOCH_LAST,
    GroupOffset,
    State,
    Transaction,
    decode,
    encode,
    id_of,
    key_of,
)
from tidemill.kafka.transactions.transitions import Decision

REFUSALS = {
    error_codes.INVALID_PRODUCER_ID_MAPPING,
    error_codes.PRODUCER_FENCED,
    error_codes.CONCURRENT_TRANSACTIONS,
    error_codes.INVALID_TXN_STATE,
}


class Coordinated(RuleBasedStateMachine):
    """Several clients that believe to own the id. The model holds the additions of the latest owner, and the decision
    of each transaction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored: Transaction | None = None
        self.now_ms = 1_000
        self.fresh = 100
        self.owners: list[tuple[int, int]] = []
        """identities in the order in which they were handed out"""
        self.added: set[tuple[str, int]] = set()
        self.offsets: dict[tuple[str, int], int] = {}
        self.decided: State | None = None

    def take(self, decision: Decision) -> int:
        before = self.stored
        if decision.next is not None:
            self.stored = decode(encode(decision.next), "id")
            assert self.stored == decision.next
            if before is not None and before.state.prepared:
                # TX2: only its end may change it
                assert self.stored.state in (before.state, State(before.state + 2))
                kept = (before.producer_id, before.epoch) if self.stored.state.prepared else before.identity
                assert (self.stored.producer_id, self.stored.epoch) == kept
        else:
            assert self.stored == before
        return decision.code

    def identity(self, data: Any) -> tuple[int, int]:
        return data.draw(st.sampled_from([*self.owners, (1, 0)]))

    @rule(data=st.data(), asks_with=st.booleans())
    def init(self, data: Any, asks_with: bool) -> None:
        self.fresh += 1
        producer_id, epoch = self.identity(data) if asks_with else (-1, -1)
        before = self.stored
        code = self.take(
            transitions.init(
                before, fresh_id=self.fresh, timeout_ms=500, producer_id=producer_id, epoch=epoch, now_ms=self.now_ms
            )
        )
        assert self.stored is not None
        if code:
            assert code in (error_codes.PRODUCER_FENCED, error_codes.CONCURRENT_TRANSACTIONS)
            if self.stored.state is State.PREPARE_ABORT and before is not None and before.state is State.ONGOING:
                self.decided = State.PREPARE_ABORT
            return
        given = (self.stored.producer_id, self.stored.epoch)
        if before is not None and given == (before.producer_id, before.epoch):
            assert asks_with  # a lost answer, repeated
        else:
            assert given not in self.owners
        self.owners.append(given)
        self.added, self.offsets, self.decided = set(), {}, None

    @rule(data=st.data(), topic=st.sampled_from("ab"), partition=st.integers(0, 2))
    def add(self, data: Any, topic: str, partition: int) -> None:
        identity = self.identity(data)
        code = self.take(transitions.add(self.stored, *identity, partitions={topic: (partition,)}, now_ms=self.now_ms))
        self._checked(code, identity)
        if not code:
            if self.decided is not None:
                self.added, self.offsets, self.decided = set(), {}, None
            self.added.add((topic, partition))

    @rule(data=st.data(), group=st.sampled_from("gh"), offset=st.integers(0, 9), named=st.booleans())
    def commit_offsets(self, data: Any, group: str, offset: int, named: bool) -> None:
        identity = self.identity(data)
        offsets = {"a": {0: GroupOffset(offset)}}
        if named:
            code = self.take(transitions.add(self.stored, *identity, groups=(group,), now_ms=self.now_ms))
            self._checked(code, identity)
            if not code and self.decided is not None:
                self.added, self.offsets, self.decided = set(), {}, None
        adds = not named
        code = self.take(
            transitions.commit_offsets(self.stored, *identity, group, offsets, adds=adds, now_ms=self.now_ms)
        )
        self._checked(code, identity)
        if not code:
            if self.decided is not None:
                self.added, self.offsets, self.decided = set(), {}, None
            self.offsets[group, 0] = offset

    @rule(data=st.data(), commit=st.booleans())
    def end(self, data: Any, commit: bool) -> None:
        identity = self.identity(data)
        before = self.stored
        code = self.take(transitions.end(before, *identity, commit=commit, now_ms=self.now_ms))
        self._checked(code, identity)
        wanted = State.PREPARE_COMMIT if commit else State.PREPARE_ABORT
        if not code and before is not None and before.state is State.ONGOING:
            self.decided = wanted
        if not code:
            nothing = before is not None and before.state is State.EMPTY and not commit
            assert nothing or self.decided is wanted  # and never the other way round

    @rule(data=st.data(), commit=st.booleans())
    def end_bumping(self, data: Any, commit: bool) -> None:
        identity = self.identity(data)
        before = self.stored
        self.fresh += 1
        ending = transitions.end_bumping(before, *identity, commit=commit, fresh_id=self.fresh, now_ms=self.now_ms)
        code = self.take(ending)
        if code:
            assert code in REFUSALS
            return
        assert before is not None and self.stored is not None
        wanted = State.PREPARE_COMMIT if commit else State.PREPARE_ABORT
        if ending.next is None:  # a lost answer, repeated
            assert identity == (before.last_id, before.last_epoch)
            assert self.decided is wanted
        else:
            assert identity == (before.producer_id, before.epoch)
            assert self.stored.identity not in self.owners
            if before.state is not State.ONGOING:
                assert not commit
                self.added, self.offsets = set(), {}
            self.decided = wanted
        self.owners.append(self.stored.identity)

    @rule(by_ms=st.integers(0, 600))
    def time_passes(self, by_ms: int) -> None:
        self.now_ms += by_ms
        before = self.stored
        assert self.take(transitions.expire(before, self.now_ms)) == 0
        if before is not None and before.state is State.ONGOING:
            late = self.now_ms >= before.started_ms + 500
            assert (self.stored is not None and self.stored.state is State.PREPARE_ABORT) == late
            if late:
                self.decided = State.PREPARE_ABORT

    @precondition(lambda self: self.stored is not None and self.stored.state.prepared)
    @rule(data=st.data())
    def settle(self, data: Any) -> None:
        seen = self.stored
        assert seen is not None
        places = [(t, p) for t, several in seen.partitions.items() for p in several]
        some = data.draw(st.lists(st.sampled_from(places), unique=True)) if places else []
        groups = data.draw(st.lists(st.sampled_from(sorted(seen.offsets)), unique=True)) if seen.offsets else []
        marked: dict[str, list[int]] = {}
        for topic, partition in some:
            marked.setdefault(topic, []).append(partition)
        self.take(transitions.record_progress(seen, seen, marked, groups, self.now_ms))
        assert self.stored is not None
        if not self.stored.state.prepared:
            assert len(some) == len(places) and set(groups) == set(seen.offsets)
        assert (
            self.take(transitions.record_progress(self.stored, replace(seen, epoch=seen.epoch + 9), marked, groups, 0))
            == 0
        )

    def _checked(self, code: int, identity: tuple[int, int]) -> None:
        """Check that only the newest identity succeeds, and that a fenced one gets an error."""
        assert code == 0 or code in REFUSALS
        assert self.stored is None or code or identity == (self.stored.producer_id, self.stored.epoch)

    @invariant()
    def a_decided_transaction_holds_what_was_added_and_an_open_one_is_bounded(self) -> None:
        found = self.stored
        if found is None:
            return
        held = {(t, p) for t, several in found.partitions.items() for p in several}
        if found.state is State.ONGOING:
            assert held == self.added
            assert {g: o["a"][0].offset for g, o in found.offsets.items() if o} == {
                g: offset for (g, _), offset in self.offsets.items()
            }
        elif found.state.prepared:
            assert held <= self.added and found.state is self.decided
            if found.state is State.PREPARE_ABORT:
                assert not found.offsets
        else:
            assert not held and not found.offsets and found.started_ms == -1
        assert found.epoch <= EPOCH_LAST + 1


Coordinated.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestCoordinated = Coordinated.TestCase


def test_the_last_epoch_gives_way_to_another_producer_id() -> None:
    last = Transaction(7, EPOCH_LAST, State.COMPLETE_COMMIT, 500)
    for identity in ((-1, -1), (7, EPOCH_LAST)):
        decision = transitions.init(
            last, fresh_id=8, timeout_ms=500, producer_id=identity[0], epoch=identity[1], now_ms=1
        )
        assert decision.next is not None
        assert (decision.code, decision.next.producer_id, decision.next.epoch) == (0, 8, 0)
    fenced = transitions.init(
        replace(last, state=State.ONGOING), fresh_id=8, timeout_ms=1, producer_id=-1, epoch=-1, now_ms=1
    )
    assert fenced.next is not None and fenced.next.epoch == EPOCH_LAST + 1 < 2**15


@pytest.mark.parametrize("state", [State.ONGOING, State.EMPTY])
def test_a_transaction_in_the_last_epoch_ends_in_it_and_its_producer_goes_on_with_another_id(state: State) -> None:
    last = Transaction(7, EPOCH_LAST, state, 500, partitions={"a": (0,)} if state is State.ONGOING else {})
    asked = transitions.end_bumping(last, 7, EPOCH_LAST, commit=False, fresh_id=-1, now_ms=1)
    assert (asked.code, asked.next) == (transitions.NEEDS_ID, None)
    ending = transitions.end_bumping(last, 7, EPOCH_LAST, commit=False, fresh_id=8, now_ms=1).next
    assert ending is not None and ending.identity == (8, 0)
    if state is State.ONGOING:
        assert (ending.producer_id, ending.epoch, ending.state) == (7, EPOCH_LAST + 1, State.PREPARE_ABORT)
        assert transitions.end_bumping(ending, 7, EPOCH_LAST, commit=False, fresh_id=-1, now_ms=1) == transitions.OK
        ending = transitions.record_progress(ending, ending, {"a": (0,)}, (), 2).next
    assert ending is not None
    assert (ending.producer_id, ending.epoch, ending.state) == (8, 0, State.COMPLETE_ABORT)
    assert transitions.end_bumping(ending, 7, EPOCH_LAST, commit=False, fresh_id=-1, now_ms=3) == transitions.OK
    assert transitions.end_bumping(ending, 7, EPOCH_LAST, commit=True, fresh_id=-1, now_ms=3).code


def test_any_transactional_id_has_a_key_of_its_own() -> None:
    ids = ["a", "a/b", "a%2Fb", "ü", "\n", " ", "x" * 200, "🦈"]
    assert [id_of(key_of(each)) for each in ids] == ids
    assert len({key_of(each) for each in ids}) == len(ids)
