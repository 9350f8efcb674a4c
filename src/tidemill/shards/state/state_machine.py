"""The async seam of a shard's state: commands in, states out, over a fenced log with rollups; and the error for the
proposer of a rejected command.

Invariant (exact state): `state` is the result of `apply` over the log up to some position, and only advances.

Invariant (decided writes): a command lands only if `apply` accepted it on exactly the state before its position; a
rejection rests on a linearizable read. So the loser of a race gets the true reason, and wrote nothing.
"""

from __future__ import annotations

from tidemill.base.clock import Rand
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    CorruptError,
    FencedError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
)
from tidemill.consensus.api import Consensus
from tidemill.consensus.state_log.replica import Replica
from tidemill.consensus.state_log.state_log import StateLog, StateMachine
from tidemill.shards.api import HistoryLostError, SchemaEvolvedError
from tidemill.shards.parts.schema_evolution import EVOLUTION_FIX
from tidemill.shards.state.apply import RejectedCommand, RejectionReason, apply
from tidemill.shards.state.codec import decode_command, decode_state, encode_command, encode_state
from tidemill.shards.state.commands import Command, Create
from tidemill.shards.state.state import ShardState

ROLLUP_AFTER_RECORDS = 512
"""Commits between rollups. A rollup of 10,000 batches is about 2 MB, so this adds a few kilobytes to each commit."""


class _RejectedError(InvalidError):
    """Carrier of a rejection through the log's proposer back to `propose`."""

    def __init__(self, rejected: RejectedCommand) -> None:
        super().__init__(f"rejected: {rejected.reason}")
        self.rejected = rejected


class ShardMachine:
    def __init__(self, log: StateLog[ShardState | None]) -> None:
        self._log = log

    @property
    def state(self) -> ShardState:
        state = self._log.state
        assert state is not None, "the machine is opened before it is used"
        return state

    async def refresh(self) -> ShardState:
        """Return the current state by a linearizable read."""
        await self._log.catch_up()
        return self.state

    async def wait_changed(self, seen: ShardState, timeout_s: float) -> ShardState:
        """Return the state once it is no longer `seen`, or after the timeout."""
        if self._log.state is seen:
            await self._log.wait(timeout_s)
        return self.state

    async def propose(self, command: Command) -> ShardState | RejectedCommand:
        """Return the state right after `command`, or its rejection.

        Raises UnavailableError, UnknownOutcomeError, ClosedError, CorruptError.
        """
        data = encode_command(command)

        def decide(state: ShardState | None) -> bytes:
            result = apply(state, command)
            if isinstance(result, RejectedCommand):
                raise _RejectedError(result)
            return data

        try:
            applied = await self._log.propose_from(decide)
        except _RejectedError as refused:
            return refused.rejected
        assert applied.state is not None
        return applied.state

    async def rollup(self) -> None:
        await self._log.rollup()

    async def aclose(self) -> None:
        await self._log.aclose()


def shard_log_name(shard_id: str) -> str:
    return f"shard/{shard_id}"


def shard_replica(consensus: Consensus, shard_id: str) -> Replica[ShardState | None]:
    """Follow a shard's log without ever writing it; None until the log has its creation."""
    return Replica(consensus, shard_log_name(shard_id), lambda: None, _apply_record, decode_state)


async def open_machine(consensus: Consensus, rand: Rand, created: Create) -> ShardMachine:
    """Load the shard that `created` names; if its log is empty, write that command first."""
    log: StateLog[ShardState | None] = StateLog(
        consensus,
        shard_log_name(created.shard_id),
        StateMachine(lambda: None, _apply_record, _encode_rollup, decode_state),
        rand,
        rollup_after_records=ROLLUP_AFTER_RECORDS,
    )
    machine = ShardMachine(log)
    await log.load()
    if log.state is None:
        result = await machine.propose(created)
        if isinstance(result, RejectedCommand) and result.reason is not RejectionReason.EXISTS:
            raise CorruptError(f"table could not be created: table={created.name} reason={result.reason}.")
    if machine.state.shard_id != created.shard_id:
        raise CorruptError(f"log of another table: table={created.name} id={machine.state.shard_id}.")
    return machine


def _apply_record(state: ShardState | None, data: bytes, position: int, term: int) -> ShardState | None:
    result = apply(state, decode_command(data))
    if isinstance(result, RejectedCommand):
        # A proposer checks on exactly this state, so only a process with other rules gets here: a no-op.
        raise ConflictError(f"rejected at replay: position={position} reason={result.reason} {result.detail}.")
    return result


def _encode_rollup(state: ShardState | None) -> bytes:
    assert state is not None, "a rollup follows records, and the first record creates"
    return encode_state(state)


def rejection_error(rejected: RejectedCommand, state: ShardState) -> TidemillError:
    """Return the error for `rejected`; `state` is the one on which the rejection is based."""
    said = f"table={state.name} {rejected.detail}".rstrip().removesuffix(".")
    match rejected.reason:
        case RejectionReason.UPPER:
            return ConflictError(f"the append does not start at the table's upper: {said}.", current=state.upper)
        case RejectionReason.CLOSED:
            return ClosedError(f"table is closed to writes: {said}.")
        case RejectionReason.FENCED:
            return FencedError(f"a newer epoch owns this hold: {said}.", current=state.holds)
        case RejectionReason.EVOLVED:
            return SchemaEvolvedError(
                f"the table's schema is newer: {said}.", current=state.schema, fix="Reopen the table."
            )
        case RejectionReason.SCHEMA:
            return InvalidError(f"schema change rejected: {said}.", fix=EVOLUTION_FIX)
        case RejectionReason.HISTORY:
            return HistoryLostError(f"history is lost: {said}.", fix="Hold a time from since on.")
        case RejectionReason.MOVED:
            return ConflictError(f"batches moved in the meantime: {said}.", current=state.upper)
        case RejectionReason.ABSENT | RejectionReason.DROPPED:
            return MissingError(f"no such table: {said}.", fix="It was dropped: open it by name again.")
        case RejectionReason.STALE:
            return UnavailableError(f"parts are too old to be appended: {said}.", fix="Write them again.")
        case RejectionReason.FULL:
            return UnavailableError(f"too many holds or too much garbage: {said}.", fix="Retry later.")
        case RejectionReason.BROKEN:
            return CorruptError(f"the command would break an invariant: {said}.", fix="Report it with the log.")
        case _:
            return InvalidError(f"rejected ({rejected.reason}): {said}.")
