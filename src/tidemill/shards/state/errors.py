"""Translate a shard's rejection of a command into the error for its proposer."""

from __future__ import annotations

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
from tidemill.shards.api import HistoryLostError, SchemaEvolvedError
from tidemill.shards.parts.schema_evolution import EVOLUTION_FIX
from tidemill.shards.state.apply import RejectedCommand, RejectionReason
from tidemill.shards.state.state import ShardState


def rejection_error(rejected: RejectedCommand, state: ShardState) -> TidemillError:
    """Return the error for `rejected`; `state` is the one on which the rejection is based."""
    said = f"shard={state.name} {rejected.detail}".rstrip().removesuffix(".")
    match rejected.reason:
        case RejectionReason.UPPER:
            return ConflictError(f"the append does not start at the shard's upper: {said}.", current=state.upper)
        case RejectionReason.CLOSED:
            return ClosedError(f"shard is closed to writes: {said}.")
        case RejectionReason.FENCED:
            return FencedError(f"a newer epoch owns this hold: {said}.", current=state.holds)
        case RejectionReason.EVOLVED:
            return SchemaEvolvedError(
                f"the shard's schema is newer: {said}.", current=state.schema, fix="Reopen the shard."
            )
        case RejectionReason.SCHEMA:
            return InvalidError(f"schema change rejected: {said}.", fix=EVOLUTION_FIX)
        case RejectionReason.HISTORY:
            return HistoryLostError(f"history is lost: {said}.", fix="Hold a time from since on.")
        case RejectionReason.MOVED:
            return ConflictError(f"batches moved in the meantime: {said}.", current=state.upper)
        case RejectionReason.ABSENT | RejectionReason.DROPPED:
            return MissingError(f"no such shard: {said}.", fix="It was dropped: open it by name again.")
        case RejectionReason.STALE:
            return UnavailableError(f"parts are too old to be appended: {said}.", fix="Write them again.")
        case RejectionReason.FULL:
            return UnavailableError(f"too many holds or too much garbage: {said}.", fix="Retry later.")
        case RejectionReason.BROKEN:
            return CorruptError(f"the command would break an invariant: {said}.", fix="Report it with the log.")
        case _:
            return InvalidError(f"rejected ({rejected.reason}): {said}.")
