"""A node that cannot capture hands its captures over, and tries again ever more rarely: simulations of several nodes in
virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from tidemill.consensus.api import Lease
from tidemill.node.captures.backoff import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    LOST_LIMIT_S,
    NEVER_WORKED_LIMIT_S,
    CaptureBackoff,
)
from tidemill.node.captures.balancer import HANDOVER_DELAY_S, CaptureBalancer, LeaseView
from tidemill.node.captures.placement import Placement

LEASE = Lease("capture/x", "n1/1", 1, 1, 60_000, True)
SEEN_AFTER_S = 3.0
"""Seconds until a change of a node's report is seen: it is renewed with its lease and read once a second."""


class Game:
    """Real balancers over leases in a dict. `works(node, capture, now_s)` decides each try; they check once a
    second."""

    def __init__(self, nodes: list[str], captures: list[str], works: Callable[[str, str, float], bool]) -> None:
        self.now_s = 0.0
        self.works = works
        self.captures = captures
        self.holders: dict[str, str] = {}
        self.offers = {node: frozenset(captures) for node in nodes}
        self.reported: list[tuple[float, str, frozenset[str]]] = []
        self.moves: list[tuple[float, str, str]] = []
        self.held_s: dict[tuple[str, str], int] = {}
        self._ticked = asyncio.Event()
        self._view: LeaseView = ({}, {})
        self.spreads = {node: CaptureBalancer(f"{node}/1", self._look, self, self._telling(node)) for node in nodes}  # type: ignore[arg-type]
        self._tasks = [asyncio.ensure_future(self._share(node, each)) for node in nodes for each in captures]

    def monotonic_s(self) -> float:
        return self.now_s

    def _telling(self, node: str) -> Callable[[frozenset[str]], None]:
        def tell(withheld: frozenset[str]) -> None:
            self.reported.append((self.now_s + SEEN_AFTER_S, node, frozenset(self.captures) - withheld))

        return tell

    async def _look(self) -> LeaseView:
        await self._ticked.wait()
        return self._view

    async def _share(self, node: str, capture: str) -> None:
        spread = self.spreads[node]

        async def run(_: Lease) -> None:
            await asyncio.Event().wait()

        while True:
            await spread.wait_for_turn(capture)
            if capture in self.holders:
                continue
            self.holders[capture] = f"{node}/1"
            self.moves.append((self.now_s, capture, node))
            spread.health[capture] = lambda: None if self.works(node, capture, self.now_s) else "it is away"
            await spread.with_handover(capture, run)(LEASE)
            del spread.health[capture], self.holders[capture]

    async def play(self, for_s: int) -> None:
        for _ in range(for_s):
            self.now_s += 1
            for reported in [reported for reported in self.reported if reported[0] <= self.now_s]:
                self.reported.remove(reported)
                self.offers[reported[1]] = reported[2]
            self._view = dict(self.holders), {node: tuple(sorted(offers)) for node, offers in self.offers.items()}
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()
            for _ in range(6):
                await asyncio.sleep(0)
            for capture, holder in self.holders.items():
                key = capture, holder.partition("/")[0]
                self.held_s[key] = self.held_s.get(key, 0) + 1
        for task in self._tasks:
            assert not task.done()

    async def over(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def taken_s(self, node: str, capture: str) -> list[float]:
        return [at_s for at_s, each, by in self.moves if (each, by) == (capture, node)]


def play(
    captures: list[str], works: Callable[[str, str, float], bool], for_s: int, nodes: tuple[str, ...] = ("n1", "n2")
) -> Game:
    async def scenario() -> Game:
        game = Game(list(nodes), captures, works)
        await game.play(for_s)
        await game.over()
        return game

    return asyncio.run(scenario())


def test_f614_a_node_that_cannot_capture_gives_back_what_it_was_given_and_tries_more_and_more_rarely() -> None:
    hours = 4
    game = play(["x", "y"], lambda node, *_: node == "n1", hours * 3600)
    tried = sorted([*game.taken_s("n2", "x"), *game.taken_s("n2", "y")])
    assert 2 <= len(tried) <= 2 * 8, tried
    for capture in "xy":
        mine = game.taken_s("n2", capture)
        pauses = [after - before for before, after in pairwise(mine)]
        assert all(pause >= FIRST_PAUSE_S * 2**n for n, pause in enumerate(pauses)), pauses
        assert game.held_s.get((capture, "n2"), 0) <= len(mine) * (NEVER_WORKED_LIMIT_S + HANDOVER_DELAY_S + 5)
        assert game.held_s[capture, "n1"] > 0.95 * hours * 3600, game.held_s
    assert game.holders == {"x": "n1/1", "y": "n1/1"}


def test_where_no_node_can_capture_it_moves_at_a_slowing_pace_and_is_even_soon_after_it_works_again() -> None:
    back_s = 4 * 3600
    game = play(["x", "y"], lambda _node, _capture, now_s: now_s >= back_s, back_s + 60)
    for capture in "xy":
        moved = [at_s for at_s, each, _ in game.moves if each == capture and at_s < back_s]
        assert len(moved) <= 16, moved
    assert sorted(game.holders.values()) == ["n1/1", "n2/1"]


def test_an_outage_of_two_minutes_moves_nothing_for_moving_would_help_nothing() -> None:
    game = play(["x", "y"], lambda _node, _capture, now_s: not 60 <= now_s < 60 + LOST_LIMIT_S, 600)
    assert len(game.moves) == 2, game.moves


def test_who_lost_a_database_that_another_node_reaches_gives_its_capture_up_and_is_given_it_when_it_works() -> None:
    lost_s, back_s = 100, 1000
    game = play(["x", "y"], lambda node, _, now_s: node == "n2" or not lost_s <= now_s < back_s, 3600)
    assert sum(game.held_s.get((each, "n2"), 0) for each in "xy") > 3600 + (back_s - lost_s - LOST_LIMIT_S) * 0.7
    assert sorted(game.holders.values()) == ["n1/1", "n2/1"]


def test_s2_a_node_that_gave_up_takes_what_nobody_else_runs_and_never_moves_what_runs_nowhere_else() -> None:
    game = play(["x"], lambda *_: False, 3600, nodes=("n1",))
    assert [each[1:] for each in game.moves] == [("x", "n1")] and game.spreads["n1"].facts() == {"given_up": {}}

    backoff = CaptureBackoff("n1")
    backoff.record_health("x", "it is away", 0)
    backoff.record_health("x", "it is away", NEVER_WORKED_LIMIT_S)
    backoff.start_pause("x", NEVER_WORKED_LIMIT_S)
    backoff.forget_holding("x")
    assert backoff.withheld_captures(NEVER_WORKED_LIMIT_S) == {"x"} and backoff.facts(NEVER_WORKED_LIMIT_S) == {
        "x": {"for_s": FIRST_PAUSE_S, "error": "it is away"}
    }
    assert Placement({}, {"n1": ()}).nodes_in_try_order("x") == [], "so it tries at once where nobody else is there"


def test_pauses_are_bounded_and_forgotten_once_it_works() -> None:
    backoff, now_s = CaptureBackoff("n1"), 0.0
    for _ in range(30):
        backoff.record_health("x", "it is away", now_s)
        now_s += NEVER_WORKED_LIMIT_S
        assert backoff.is_failing("x", now_s)
        backoff.start_pause("x", now_s)
        backoff.forget_holding("x")
    assert "x" in backoff.withheld_captures(now_s + LONGEST_PAUSE_S - 1) and "x" not in backoff.withheld_captures(
        now_s + LONGEST_PAUSE_S
    )
    backoff.record_health("x", None, now_s)
    assert not backoff.withheld_captures(now_s)
    backoff.record_health("x", "lost", now_s)
    assert not backoff.is_failing("x", now_s + NEVER_WORKED_LIMIT_S) and backoff.is_failing("x", now_s + LOST_LIMIT_S)
    backoff.record_health("x", "", now_s + LOST_LIMIT_S)
    assert not backoff.is_failing("x", now_s + LOST_LIMIT_S), "it waits for somebody, and does not fail"


@pytest.mark.parametrize("withheld_before", [False, True])
def test_y2_a_pause_ends_where_who_took_over_failed_and_then_works(withheld_before: bool) -> None:
    backoff = CaptureBackoff("n1")
    backoff.record_health("x", "it is away", 0)
    backoff.start_pause("x", NEVER_WORKED_LIMIT_S)
    backoff.forget_holding("x")
    if withheld_before:
        backoff.observe_offers({"x": "n2"}, {"n2": ()}, NEVER_WORKED_LIMIT_S + 1)
        assert "x" in backoff.withheld_captures(NEVER_WORKED_LIMIT_S + 1)
    backoff.observe_offers({"x": "n2"}, {"n2": ("x",)}, NEVER_WORKED_LIMIT_S + 2)
    assert ("x" in backoff.withheld_captures(NEVER_WORKED_LIMIT_S + 2)) != withheld_before
