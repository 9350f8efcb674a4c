"""Seats are given and taken by any thread: none gets lost, and none comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.base.clock import SystemClock
from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.base.status.histogram import StageHistograms
from tidemill.spark.ingest.table_schedule import SLOWEST_RETRY_S, ScheduledTable, TableSchedule

LETS_IN_S = 0.3
"""Time that another thread gets during one change. A thread that is still locked out after it comes later."""


class Interrupted(dict[str, ScheduledTable]):
    """Seats whose first change, after its read, waits until `other` has run in another thread or is locked out."""

    def __init__(self, seats: dict[str, ScheduledTable], other: Callable[[], None]) -> None:
        super().__init__(seats)
        self.thread = threading.Thread(target=other, daemon=True)

    def _let_in(self) -> None:
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join(LETS_IN_S)

    def get(self, name: str, default: Any = None) -> Any:
        found = super().get(name, default)
        self._let_in()
        return found

    def items(self) -> Any:
        found = list(super().items())
        self._let_in()
        return found

    def keys(self) -> Any:
        found = list(super().keys())
        self._let_in()
        return found

    def __iter__(self) -> Any:
        return iter(self.keys())


def table(name: str) -> Any:
    return SimpleNamespace(name=name)


def seats(names: Iterable[str]) -> TableSchedule:
    found = TableSchedule(SystemClock(), StageHistograms(), 1.0)
    for name in names:
        found.attach(table(name))
    return found


def meanwhile(found: TableSchedule, change: Callable[[], None], other: Callable[[], None]) -> str:
    """Return the seated tables after `change`, during which another thread does `other`."""
    interrupted = Interrupted(found._seats, other)
    found._seats = interrupted
    change()
    interrupted.thread.join(20)
    assert not interrupted.thread.is_alive()
    return "".join(sorted(found._seats))


@pytest.mark.parametrize("change", ["attach", "detach"])
@pytest.mark.parametrize("other", ["attach", "detach"])
def test_two_who_give_and_take_seats_at_one_time_both_have_their_way(change: str, other: str) -> None:
    found = seats("ab")
    calls = {
        "attach": lambda name: lambda: found.attach(table(name)),
        "detach": lambda name: lambda: found.detach(name),
    }
    taken = {"attach": ("c", "d"), "detach": ("a", "b")}
    after = meanwhile(found, calls[change](taken[change][0]), calls[other](taken[other][1]))
    expected = set("ab")
    for call, name in ((change, taken[change][0]), (other, taken[other][1])):
        expected = expected | {name} if call == "attach" else expected - {name}
    assert set(after) == expected


def test_a_table_that_leaves_does_not_take_the_seat_that_it_was_given_meanwhile() -> None:
    found = seats("ab")
    left = found._seats["a"]

    def anew() -> None:
        found.detach("a")
        found.attach(table("a"))

    assert meanwhile(found, lambda: found.handle_failure(left, CorruptError("broken.")), anew) == "ab"
    assert found._seats["a"] is not left


class Time:
    """A clock by hand."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


def test_who_is_due_and_when_is_told_without_looking_again_and_again() -> None:
    clock: Any = Time()
    found = TableSchedule(clock, StageHistograms(), 1.0)
    assert found.due_in_s(10) is None and not found.changed.is_set()
    found.attach(SimpleNamespace(name="a", upper=5))  # type: ignore[arg-type]
    assert found.changed.is_set()
    assert (found.due_in_s(5), found.due_in_s(6)) == (None, 0)
    seat = found._seats["a"]

    found.handle_failure(seat, UnavailableError("away."))
    pause_s = found.due_in_s(6)
    assert pause_s is not None and 0 < pause_s <= SLOWEST_RETRY_S and found.due_tables(6) == []
    clock.now_s += pause_s
    assert found.due_in_s(6) == 0 and found.due_tables(6) == [seat]

    seat.nothing_until, seat.moved_s = 6, clock.now_s  # it got nothing, and moved a moment ago
    assert (found.due_in_s(6), found.due_in_s(7), found.due_tables(6)) == (1.0, 0, [])
    clock.now_s += 0.75
    assert found.due_in_s(6) == 0.25
    clock.now_s += 0.25
    assert found.due_in_s(6) == 0 and found.due_tables(6) == [seat]

    seat.aside = True
    assert found.due_in_s(6) is None and found.due_tables(6) == []
