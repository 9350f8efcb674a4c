from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.waiting import run
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    CorruptError,
    FencedError,
    InvalidError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.consensus.api import LogHead
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.consensus.state_log import replica
from tidemill.consensus.state_log.replica import ROLLUP
from tidemill.consensus.state_log.state_log import StateLog, StateMachine

State = dict[str, int]


def proposed(log: StateLog[Any], command: bytes) -> asyncio.Future[Any]:
    return log.propose_deferred(lambda _: command)


def apply(state: State, command: bytes, position: int, term: int) -> State:
    change = json.loads(command)
    if change["delta"] < 0 and state.get(change["key"], 0) + change["delta"] < 0:
        raise ConflictError("The balance would be negative.", current=state.get(change["key"], 0))
    state[change["key"]] = state.get(change["key"], 0) + change["delta"]
    return state


def add(key: str, delta: int) -> bytes:
    return json.dumps({"key": key, "delta": delta}).encode()


def make(consensus: Any, seed: int = 1, **options: Any) -> StateLog[State]:
    return StateLog(
        consensus,
        "state",
        StateMachine(dict, options.pop("apply", apply), lambda state: json.dumps(state).encode(), json.loads),
        Rand(seed),
        **options,
    )


class Faulty(MemoryConsensus):
    """Loses, after or before the effect, the answers of chosen appends."""

    lose: list[str]

    def __init__(self, state: MemoryState | None = None) -> None:
        super().__init__(SystemClock(), state)
        self.lose = []
        self.after_append: Any = None

    async def append(self, *args: Any, **kwargs: Any) -> LogHead:
        how = self.lose.pop(0) if self.lose else ""
        if how == "before":
            raise UnknownOutcomeError("lost before")
        if how == "unavailable":
            raise UnavailableError("not sent")
        head = await super().append(*args, **kwargs)
        if self.after_append is not None:
            after, self.after_append = self.after_append, None
            await after()
        if how == "after":
            raise UnknownOutcomeError("lost after")
        return head


async def test_commands_take_effect_in_the_order_they_were_proposed() -> None:
    consensus = MemoryConsensus(SystemClock())
    log = make(consensus)
    futures = [proposed(log, add("a", 1)) for _ in range(100)]
    results = await asyncio.gather(*futures)
    assert [r.position for r in results] == list(range(100))
    assert log.state == {"a": 100} and log.position == 100
    other = make(consensus)
    assert await other.load() == {"a": 100}
    await log.aclose()


async def test_neighbouring_proposals_share_an_append() -> None:
    consensus = MemoryConsensus(SystemClock())
    log = make(consensus)
    await asyncio.gather(*[proposed(log, add("a", 1)) for _ in range(50)])
    found = await consensus.read("state", 0)
    assert len({record.nonce for record in found.records}) == 1


async def test_a_command_that_apply_refuses_changes_nothing_at_every_replay_and_its_proposer_is_told() -> None:
    consensus = MemoryConsensus(SystemClock())
    log = make(consensus)
    first, refused, last = (proposed(log, add("a", d)) for d in (1, -5, 2))
    assert (await first).position == 0
    with pytest.raises(ConflictError) as caught:
        await refused
    assert caught.value.current == 1
    assert (await last).position == 2
    assert log.state == {"a": 3}
    assert await make(consensus).load() == {"a": 3}


async def test_a_check_sees_the_state_just_before_its_command_even_when_others_race() -> None:
    state = MemoryState()
    logs = [make(MemoryConsensus(SystemClock(), state), seed) for seed in range(4)]

    def below_ten(balance: State) -> None:
        if balance.get("a", 0) >= 10:
            raise InvalidError("enough")

    async def add_until_refused(log: StateLog[State]) -> int:
        won = 0
        while True:
            try:
                await log.propose(add("a", 1), check=below_ten)
            except InvalidError:
                return won
            won += 1

    wins = await asyncio.gather(*[add_until_refused(log) for log in logs])
    assert sum(wins) == 10
    for log in logs:
        await log.catch_up()
        assert log.state == {"a": 10} and log.position == 10


async def test_a_refusal_by_stale_state_does_not_stand() -> None:
    state = MemoryState()
    mine, theirs = (make(MemoryConsensus(SystemClock(), state), seed) for seed in (1, 2))
    await mine.load()
    await theirs.propose(add("a", 1))

    def must_exist(balance: State) -> None:
        if "a" not in balance:
            raise InvalidError("missing")

    assert mine.state == {}
    assert await mine.propose(add("a", 1), check=must_exist) == 1
    assert mine.state == {"a": 2}


async def test_propose_from_makes_the_command_from_the_newest_state() -> None:
    state = MemoryState()
    mine, theirs = (make(MemoryConsensus(SystemClock(), state), seed) for seed in (1, 2))
    await mine.load()
    await theirs.propose(add("a", 5))
    applied = await mine.propose_from(lambda s: add("double", s.get("a", 0) * 2))
    assert (applied.position, dict(applied.state)) == (1, {"a": 5, "double": 10})


async def test_a_late_proposal_is_made_when_its_append_is_put_together_and_shares_it() -> None:
    consensus = MemoryConsensus(SystemClock())
    log = make(consensus)
    first = proposed(log, add("a", 1))
    collected = [1]
    late = log.propose_deferred(lambda _: add("late", sum(collected)))
    last = proposed(log, add("b", 1))
    collected.append(2)
    await asyncio.gather(first, late, last)
    assert log.state == {"a": 1, "late": 3, "b": 1}
    found = await consensus.read("state", 0)
    assert len({record.nonce for record in found.records}) == 1
    await log.aclose()


async def test_a_late_proposal_that_withdraws_holds_up_nobody() -> None:
    def withdraw(state: State) -> bytes:
        raise InvalidError("thought better of it")

    log = make(MemoryConsensus(SystemClock()))
    first, late, last = (
        proposed(log, add("a", 1)),
        log.propose_deferred(withdraw),
        proposed(log, add("b", 1)),
    )
    await asyncio.gather(first, last)
    with pytest.raises(InvalidError):
        await late
    assert log.state == {"a": 1, "b": 1} and log.position == 2
    await log.aclose()


async def test_a_late_proposal_is_made_anew_after_an_append_that_did_not_land() -> None:
    consensus = Faulty()
    log = make(consensus)
    await log.load()
    consensus.lose = ["before"]
    values = iter([1, 2])
    await log.propose_deferred(lambda _: add("a", next(values)))
    assert log.state == {"a": 2}
    await log.aclose()


@pytest.mark.parametrize("how", ["before", "after"])
async def test_an_unknown_append_is_resolved_and_its_command_counts_once(how: str) -> None:
    consensus = Faulty()
    log = make(consensus)
    consensus.lose = [how]
    results = await asyncio.gather(proposed(log, add("a", 1)), proposed(log, add("b", 1)))
    assert [r.position for r in results] == [0, 1]
    assert await make(consensus).load() == {"a": 1, "b": 1}
    assert log.state == {"a": 1, "b": 1}


async def test_an_unknown_append_that_lost_to_another_writer_is_proposed_again() -> None:
    consensus = Faulty()
    mine, theirs = make(consensus, 1), make(MemoryConsensus(SystemClock(), consensus.state), 2)
    await mine.load()
    consensus.lose = ["before"]
    future = proposed(mine, add("mine", 1))
    await theirs.propose(add("theirs", 1))
    await future
    assert await make(consensus).load() == {"mine": 1, "theirs": 1}


async def test_an_outcome_that_was_rolled_over_is_unknown_and_never_guessed() -> None:
    consensus = Faulty()
    mine, theirs = make(consensus, 1), make(MemoryConsensus(SystemClock(), consensus.state), 2)
    await mine.load()
    consensus.lose = ["after"]
    consensus.after_append = theirs.rollup
    with pytest.raises(UnknownOutcomeError):
        await mine.propose(add("a", 1))
    assert mine.state == {"a": 1}
    await mine.propose(add("a", 1))
    assert mine.state == {"a": 2}


async def test_unavailable_means_it_did_not_happen_and_the_next_one_goes_on() -> None:
    consensus = Faulty()
    log = make(consensus)
    consensus.lose = ["unavailable"]
    with pytest.raises(UnavailableError):
        await log.propose(add("a", 1))
    assert await log.propose(add("a", 1)) == 0
    assert log.state == {"a": 1}


async def test_a_rollup_forgets_the_past_and_readers_start_from_it() -> None:
    consensus = MemoryConsensus(SystemClock())
    log, follower, stale = make(consensus, 1), make(consensus, 2), make(consensus, 3)
    await stale.load()
    await asyncio.gather(*[proposed(log, add("a", 1)) for _ in range(10)])
    await follower.load()
    assert await log.rollup() == 10
    assert (await consensus.log_head("state")).start == 10
    await log.propose(add("a", 1))
    for reader in (follower, stale, make(consensus, 4)):
        await reader.catch_up()
        assert reader.state == {"a": 11} and reader.position == 12


async def test_a_rollup_larger_than_a_record_spans_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "PART_BYTES", 16)
    consensus = MemoryConsensus(SystemClock())
    log = make(consensus)
    for key in range(20):
        await log.propose(add(f"key-{key}", 1))
    await log.rollup()
    head = await consensus.log_head("state")
    assert head.next - head.start > 10
    assert await make(consensus).load() == log.state
    assert log.position == head.next


async def test_rollups_happen_by_themselves_and_races_of_them_lose_nothing() -> None:
    state = MemoryState()
    logs = [make(MemoryConsensus(SystemClock(), state), seed, rollup_after_records=7) for seed in range(3)]

    async def work(log: StateLog[State]) -> None:
        for _ in range(40):
            await log.propose(add("a", 1))

    await asyncio.gather(*[work(log) for log in logs])
    consensus = MemoryConsensus(SystemClock(), state)
    assert await make(consensus).load() == {"a": 120}
    assert (await consensus.log_head("state")).start > 0
    for log in logs:
        await log.catch_up()
        assert log.state == {"a": 120}


class NoRollups(MemoryConsensus):
    """Refuses every rollup as too large, and counts them."""

    tried = 0

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        if records[0][0] == ROLLUP:
            self.tried += 1
            raise InvalidError("The append is too large.")
        return await super().append(log, term, expected_next, records, nonce)


async def test_a_state_too_large_for_one_append_is_not_rolled_up_and_the_log_goes_on() -> None:
    consensus = NoRollups(SystemClock())
    log = make(consensus, rollup_after_records=4)
    for _ in range(20):
        await log.propose(add("a", 1))
    assert log.state == {"a": 20}
    assert 1 <= consensus.tried <= 5, "to encode such a state after every command would be dear"
    await log.aclose()


async def test_proposals_go_on_while_a_rollup_is_truncating() -> None:
    consensus = MemoryConsensus(SystemClock())
    truncate, reached, go_on = consensus.truncate, asyncio.Event(), asyncio.Event()

    async def held(log: str, before: int) -> LogHead:
        reached.set()
        await go_on.wait()
        return await truncate(log, before)

    consensus.truncate = held  # type: ignore[method-assign]
    log = make(consensus)
    await log.propose(add("a", 1))
    rolling = asyncio.ensure_future(log.rollup())
    await reached.wait()
    assert await asyncio.wait_for(log.propose(add("a", 1)), 40) == 2
    go_on.set()
    assert await rolling == 1
    assert (await consensus.log_head("state")).start == 1
    assert await make(consensus).load() == {"a": 2} == log.state


async def test_a_rollup_encoded_by_and_by_holds_one_moment_and_loses_to_whoever_wrote_meanwhile() -> None:
    consensus = MemoryConsensus(SystemClock())
    theirs = make(consensus, 2)
    encoding, go_on = asyncio.Event(), asyncio.Event()
    encoded: list[State] = []

    async def slowly(state: State) -> bytes:
        encoded.append(dict(state))
        encoding.set()
        await go_on.wait()
        return json.dumps(encoded[-1]).encode()

    async def decode(data: bytes) -> State:
        await asyncio.sleep(0)
        return dict(json.loads(data))

    mine: StateLog[State] = StateLog(consensus, "state", StateMachine(dict, apply, slowly, decode), Rand(1))
    await mine.propose(add("a", 1))
    rolling = asyncio.ensure_future(mine.rollup())
    await encoding.wait()
    await theirs.propose(add("a", 1))
    await mine.catch_up()
    go_on.set()
    assert await rolling == 2
    assert encoded == [{"a": 1}, {"a": 2}], "what another writer added would be forgotten"
    reader: StateLog[State] = StateLog(consensus, "state", StateMachine(dict, apply, slowly, decode), Rand(3))
    assert await reader.load() == {"a": 2}


async def test_a_new_leader_fences_the_old_one_and_has_everything_it_wrote() -> None:
    state = MemoryState()
    old, new = (make(MemoryConsensus(SystemClock(), state), seed) for seed in (1, 2))
    await old.lead(1)
    await old.propose(add("a", 1))
    assert await new.lead(2) == {"a": 1}
    with pytest.raises(FencedError):
        await old.propose(add("a", 1))
    with pytest.raises(FencedError):
        await old.lead(1)
    await new.propose(add("a", 1))
    assert await make(MemoryConsensus(SystemClock(), state)).load() == {"a": 2}


async def test_apply_is_told_position_and_term_of_the_record_on_both_sides() -> None:
    def note(state: State, command: bytes, position: int, term: int) -> State:
        return {**state, str(position): term}

    state = MemoryState()
    old, new = (make(MemoryConsensus(SystemClock(), state), seed, apply=note) for seed in (1, 2))
    await old.lead(3)
    await old.propose(b"")
    await new.lead(7)
    await new.propose(b"")
    await old.catch_up()
    assert old.state == new.state == {"0": 3, "1": 7}


async def test_a_follower_waits_for_a_state() -> None:
    state = MemoryState()
    consensus = MemoryConsensus(SystemClock(), state)
    log, follower = make(consensus, 1), make(consensus, 2)
    waiting = asyncio.ensure_future(follower.wait_until(lambda s: s.get("a", 0) >= 3, 20))
    for _ in range(3):
        await log.propose(add("a", 1))
    assert await waiting
    assert follower.state == {"a": 3}
    assert not await follower.wait_until(lambda s: "never" in s, 0.01)


async def test_an_apply_that_breaks_stops_the_state_log_and_everybody_hears_it() -> None:
    def broken(state: State, command: bytes, position: int, term: int) -> State:
        raise KeyError("bug")

    log = make(MemoryConsensus(SystemClock()), apply=broken)
    first, second = proposed(log, add("a", 1)), proposed(log, add("b", 1))
    for future in (first, second):
        with pytest.raises(CorruptError):
            await future
    with pytest.raises(CorruptError):
        await log.catch_up()
    with pytest.raises(CorruptError):
        await log.propose(add("a", 1))


async def test_a_closed_state_log_leaves_nobody_waiting() -> None:
    class Stuck(MemoryConsensus):
        async def append(self, *args: Any, **kwargs: Any) -> LogHead:
            await asyncio.Event().wait()
            raise AssertionError

    log = make(Stuck(SystemClock()))
    under_way = proposed(log, add("a", 1))
    for _ in range(10):
        await asyncio.sleep(0)
    waiting = proposed(log, add("b", 1))
    await log.aclose()
    with pytest.raises(UnknownOutcomeError):
        await under_way
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        proposed(log, add("c", 1))


async def test_readers_that_catch_up_during_appends_see_every_command_once() -> None:
    log = make(MemoryConsensus(SystemClock()))
    stop = asyncio.Event()

    async def read() -> None:
        while not stop.is_set():
            await log.catch_up()

    readers = [asyncio.ensure_future(read()) for _ in range(3)]
    for number in range(200):
        assert await log.propose(add("a", 1)) == number
    stop.set()
    await asyncio.gather(*readers)
    assert log.state == {"a": 200}


async def test_f515_a_proposal_cancelled_while_its_refusal_is_read_leaves_the_log_usable() -> None:
    class Slow(MemoryConsensus):
        gate: asyncio.Event | None = None

        async def read(self, *args: Any, **kwargs: Any) -> Any:
            if self.gate is not None:
                await self.gate.wait()
            return await super().read(*args, **kwargs)

    consensus = Slow(SystemClock())
    log = make(consensus)
    await log.propose(add("a", 1))

    def refuses(_: State) -> None:
        raise ConflictError("withdrawn")

    consensus.gate = asyncio.Event()
    refused = asyncio.ensure_future(log.propose(add("a", 1), check=refuses))
    await asyncio.sleep(0.01)
    refused.cancel()
    following = asyncio.ensure_future(log.propose(add("a", 1)))
    late = proposed(log, add("a", 1))
    await asyncio.sleep(0.01)
    consensus.gate.set()
    consensus.gate = None
    assert {await following, (await late).position} == {1, 2}
    assert log.state == {"a": 3} and log.failure is None


async def test_f515_a_fault_of_any_type_in_an_append_fails_that_append_and_the_log_goes_on() -> None:
    class Odd(MemoryConsensus):
        broken = False

        async def append(self, *args: Any, **kwargs: Any) -> LogHead:
            if self.broken:
                raise ZeroDivisionError("a bug")
            return await super().append(*args, **kwargs)

    consensus = Odd(SystemClock())
    log = make(consensus)
    await log.propose(add("a", 1))
    consensus.broken = True
    first, waiting = proposed(log, add("a", 1)), asyncio.ensure_future(log.propose_from(lambda _: add("a", 1)))
    with pytest.raises(UnknownOutcomeError):
        await first
    with pytest.raises(UnavailableError, match="ZeroDivisionError"):
        await waiting
    consensus.broken = False
    await log.propose(add("a", 1))
    assert log.state == {"a": 2} and log.failure is None


class Step(NamedTuple):
    """One proposal: its kind, the turns of the loop after which it is cancelled (−1: never), and how its answer is
    lost.
    """

    kind: str
    cancel_after: int
    lose: str


@given(
    st.lists(
        st.builds(
            Step,
            st.sampled_from(["plain", "late", "checked", "refused", "overdrawn", "catch_up", "rollup"]),
            st.integers(-1, 8),
            st.sampled_from(["", "", "", "before", "after", "unavailable"]),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_f515_cancellation_at_any_await_leaves_the_log_usable_and_counts_nothing_twice(
    steps: list[Step], foreign_every: int
) -> None:
    async def body() -> None:
        state = MemoryState()
        consensus = Faulty(state)
        log, other = make(consensus), make(MemoryConsensus(SystemClock(), state), seed=2)

        def refuses(_: State) -> None:
            raise ConflictError("withdrawn")

        def start(number: int, kind: str) -> asyncio.Future[Any]:
            command = add(f"k{number}", 1)
            if kind == "late":
                return proposed(log, command)
            calls: dict[str, Any] = {
                "plain": lambda: log.propose(command),
                "checked": lambda: log.propose(command, check=lambda _: None),
                "refused": lambda: log.propose(command, check=refuses),
                "overdrawn": lambda: log.propose(add(f"k{number}", -1)),
                "catch_up": log.catch_up,
                "rollup": log.rollup,
            }
            return asyncio.ensure_future(calls[kind]())

        running: list[tuple[int, Step, asyncio.Future[Any]]] = []
        for number, step in enumerate(steps):
            if step.lose:
                consensus.lose.append(step.lose)
            running.append((number, step, start(number, step.kind)))
            if step.cancel_after >= 0:
                asyncio.get_running_loop().call_soon(_cancel_after, running[-1][2], step.cancel_after)
            if foreign_every and number % foreign_every == 0:
                await other.propose(add("foreign", 1))
        outcomes = await asyncio.gather(*(future for _, _, future in running), return_exceptions=True)
        consensus.lose.clear()
        await log.propose(add("last", 1))
        fresh = await make(MemoryConsensus(SystemClock(), state), seed=3).load()
        assert fresh == log.state and fresh["last"] == 1 and log.failure is None
        for (number, step, _), outcome in zip(running, outcomes, strict=True):
            count = fresh.get(f"k{number}", 0)
            assert count in (0, 1)
            if step.kind in ("plain", "late", "checked") and not isinstance(outcome, BaseException):
                assert count == 1
            if step.kind in ("refused", "overdrawn"):
                assert count == 0
        await log.aclose()

    run(body())


def _cancel_after(future: asyncio.Future[Any], turns: int) -> None:
    if turns <= 0:
        future.cancel()
    else:
        asyncio.get_running_loop().call_soon(_cancel_after, future, turns - 1)
