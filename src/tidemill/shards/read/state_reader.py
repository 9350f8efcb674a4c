"""The state of one shard, for its readers: read again, waited for, and checked for what a reader needs of it."""

from __future__ import annotations

import asyncio

from tidemill.base.errors import ClosedError, TidemillError, UnavailableError
from tidemill.shards.api import HistoryLostError
from tidemill.shards.state.apply import RejectedCommand, RejectionReason
from tidemill.shards.state.commands import Command
from tidemill.shards.state.state import ShardState
from tidemill.shards.state.state_machine import ShardMachine, rejection_error

WAIT_SLICE_S = 30.0


class StateReader:
    """Relies on one fact: `machine` yields states that only advance."""

    def __init__(self, machine: ShardMachine) -> None:
        self._machine = machine

    @property
    def state(self) -> ShardState:
        """The state as last seen; it may be old, but never contradicts the log."""
        return self._machine.state

    async def propose(self, command: Command) -> ShardState:
        result = await self._machine.propose(command)
        if isinstance(result, RejectedCommand):
            raise self.rejection_error(result)
        return result

    async def wait_beyond(self, frontier: int, timeout_s: float) -> ShardState:
        """Return the state once its upper is > frontier or the shard is closed, or after the timeout."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        state = await self.refresh()
        while state.upper <= frontier and not state.closed:
            left_s = until_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            state = self._check_not_dropped(await self._machine.wait_changed(state, left_s))
        return state

    async def refresh(self) -> ShardState:
        return self._check_not_dropped(await self._machine.refresh())

    def _check_not_dropped(self, state: ShardState) -> ShardState:
        if state.dropped:
            raise self.rejection_error(RejectedCommand(RejectionReason.DROPPED))
        return state

    async def wait_readable(self, as_of: int, timeout_s: float | None) -> ShardState:
        state = await self.refresh()
        until_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while state.upper <= as_of:
            if state.closed:
                raise ClosedError(
                    f"table was closed before this time: table={self.state.name} as_of={as_of} upper={state.upper}."
                )
            left_s = WAIT_SLICE_S if until_s is None else until_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise UnavailableError(
                    f"time is not final yet: table={self.state.name} as_of={as_of} upper={state.upper}.",
                    fix="Use a time below upper, or wait longer.",
                )
            state = self._check_not_dropped(await self._machine.wait_changed(state, left_s))
        if as_of < state.since:
            raise self._history_lost(state, as_of)
        return state

    def check_history(self, state: ShardState, frontier: int) -> None:
        """Raise HistoryLostError unless updates from `frontier` on are still distinguishable from those before it."""
        if state.since > 0 and state.since >= frontier:
            raise self._history_lost(state, frontier)

    def _history_lost(self, state: ShardState, wanted: int) -> HistoryLostError:
        return HistoryLostError(
            f"history is lost: table={self.state.name} wanted={wanted} since={state.since}.",
            fix=f"The oldest time that can be read is {state.since}; changes can be followed from there.",
        )

    def rejection_error(self, rejected: RejectedCommand) -> TidemillError:
        return rejection_error(rejected, self.state)
