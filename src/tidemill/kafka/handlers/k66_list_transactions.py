"""Handler of ListTransactions (66), versions 0 to 2: transactions that this node coordinates, also by a pattern of ids
(KIP-1152).
"""

from __future__ import annotations

import asyncio

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.groups.topic_patterns import match_patterns
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.kafka.transactions.state import State

_NAMES = {state.kafka_name for state in State}


async def handle(context: Context, request: Request, body: Body) -> Body:
    states, ids = set(body["state_filters"]), set(body["producer_id_filters"])
    duration_ms, pattern = body.get("duration_filter", -1), body.get("transactional_id_pattern")
    try:
        found = await context.transactions.all()
    except TidemillError:
        return error_answer(body, error_codes.COORDINATOR_NOT_AVAILABLE)
    if pattern:
        matches, error = await asyncio.to_thread(match_patterns, {pattern}, list(found))
        if error is not None:
            return error_answer(body, error_codes.INVALID_REGULAR_EXPRESSION)
        found = {each: found[each] for each in sorted(matches[pattern])}
    now_ms = context.clock.now_ms()
    answers = []
    for transactional_id, each in found.items():
        if context.pace.is_used_up:
            await context.pace.wait_for_turn()
        if (states and each.state.kafka_name not in states) or (ids and each.producer_id not in ids):
            continue
        if duration_ms >= 0 and not 0 <= each.started_ms < now_ms - duration_ms:
            continue
        if context.owners.coordinates_transaction(transactional_id):
            answers.append(
                {
                    "transactional_id": transactional_id,
                    "producer_id": each.producer_id,
                    "transaction_state": each.state.kafka_name,
                }
            )
    return {"error_code": 0, "unknown_state_filters": sorted(states - _NAMES), "transaction_states": answers}


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "unknown_state_filters": [], "transaction_states": []}


API = Api(66, "list_transactions", 0, 2, begin_decoded(handle, error_answer))
