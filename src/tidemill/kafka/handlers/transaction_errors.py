"""Error codes of the transaction handlers: is an id coordinated here, and which codes do older clients know."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.transactions.state import key_of

_KEY_BYTES_MAX: Final = 900


def coordinator_error(context: Context, transactional_id: str) -> int:
    """Return the error code if this node cannot serve the id, else 0."""
    if not transactional_id or len(key_of(transactional_id)) > _KEY_BYTES_MAX:
        return error_codes.INVALID_REQUEST
    return 0 if context.owners.coordinates_transaction(transactional_id) else error_codes.NOT_COORDINATOR


async def code_of_work(work: Awaitable[int], *, too_large: int = error_codes.INVALID_REQUEST) -> int:
    """Return the code of `work`, or COORDINATOR_NOT_AVAILABLE if it failed.

    Clients retry after that code even if the work was done: the repeated request finds its result.
    """
    try:
        return await work
    except InvalidError:
        return too_large
    except TidemillError:
        return error_codes.COORDINATOR_NOT_AVAILABLE


def fenced_code(code: int, *, known: bool) -> int:
    """Return the code for the request's version: before KIP-588, which added PRODUCER_FENCED, it was
    INVALID_PRODUCER_EPOCH.
    """
    return error_codes.INVALID_PRODUCER_EPOCH if code == error_codes.PRODUCER_FENCED and not known else code
