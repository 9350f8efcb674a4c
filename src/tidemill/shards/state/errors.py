"""Why a shard refused a command, as the error its proposer gets."""

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
from tidemill.shards.parts.schema_evolution import CAN
from tidemill.shards.state.apply import Reason, Rejected
from tidemill.shards.state.state import ShardState


def refusal(rejected: Rejected, state: ShardState) -> TidemillError:
    """`state`: what the refusal rests on."""
    said = f"shard={state.name} {rejected.detail}".rstrip().removesuffix(".")
    match rejected.reason:
        case Reason.UPPER:
            return ConflictError(f"upper is not where this append begins: {said}.", current=state.upper)
        case Reason.CLOSED:
            return ClosedError(f"shard is closed to writes: {said}.")
        case Reason.FENCED:
            return FencedError(f"a newer epoch owns this hold: {said}.", current=state.holds)
        case Reason.EVOLVED:
            return SchemaEvolvedError(
                f"the shard's schema is a newer one: {said}.", current=state.schema, fix="Open the shard again."
            )
        case Reason.SCHEMA:
            return InvalidError(f"schema change refused: {said}.", fix=CAN)
        case Reason.HISTORY:
            return HistoryLostError(f"history is lost: {said}.", fix="Hold a time from since on.")
        case Reason.MOVED:
            return ConflictError(f"batches moved meanwhile: {said}.", current=state.upper)
        case Reason.ABSENT | Reason.DROPPED:
            return MissingError(f"no such shard: {said}.", fix="It was dropped: open it by name again.")
        case Reason.STALE:
            return UnavailableError(f"parts are too old to be shown: {said}.", fix="Write them again.")
        case Reason.FULL:
            return UnavailableError(f"too many at once: {said}.", fix="Try again when some have ended.")
        case Reason.BROKEN:
            return CorruptError(f"refused, for it would break an invariant: {said}.", fix="Report it with the log.")
        case _:
            return InvalidError(f"refused ({rejected.reason}): {said}.")
