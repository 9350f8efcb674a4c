"""What the handlers of transactions share: who coordinates, and which code older clients know."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.transactions.state import key_of

_KEY_BYTES_MAX: Final = 900


def refusal(context: Context, transactional_id: str) -> int:
    """Why this node does nothing for the id, or 0."""
    if not transactional_id or len(key_of(transactional_id)) > _KEY_BYTES_MAX:
        return error_codes.INVALID_REQUEST
    return 0 if context.owners.coordinates(transactional_id) else error_codes.NOT_COORDINATOR


async def coded(work: Awaitable[int], *, too_large: int = error_codes.INVALID_REQUEST) -> int:
    """The code of `work`; clients ask again after COORDINATOR_NOT_AVAILABLE, whatever became of it: what is repeated
    finds what was done."""
    try:
        return await work
    except InvalidError:
        return too_large
    except TidemillError:
        return error_codes.COORDINATOR_NOT_AVAILABLE


def fenced(code: int, *, known: bool) -> int:
    """PRODUCER_FENCED came with KIP-588; before it a fenced producer was told INVALID_PRODUCER_EPOCH."""
    return error_codes.INVALID_PRODUCER_EPOCH if code == error_codes.PRODUCER_FENCED and not known else code
