"""Handler of DescribeTransactions (65), version 0: transactional ids that this node coordinates."""

from __future__ import annotations

from functools import partial

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context, coordinator_error
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items
from tidemill.kafka.schema.codec_compiler import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    return {
        "transaction_states": await map_items(
            body["transactional_ids"], partial(_describe_transaction, context), context.pace
        )
    }


def _answer(transactional_id: str, code: int) -> Body:
    return {
        "error_code": code,
        "transactional_id": transactional_id,
        "transaction_state": "",
        "transaction_timeout": 0,
        "transaction_start_time": 0,
        "producer_id": -1,
        "producer_epoch": -1,
        "topics": [],
    }


async def _describe_transaction(context: Context, transactional_id: str) -> Body:
    code = coordinator_error(context, transactional_id)
    if code:
        return _answer(transactional_id, code)
    try:
        found = await context.transactions.read(transactional_id)
    except TidemillError:
        return _answer(transactional_id, error_codes.COORDINATOR_NOT_AVAILABLE)
    if found is None:
        return _answer(transactional_id, error_codes.TRANSACTIONAL_ID_NOT_FOUND)
    return {
        **_answer(transactional_id, 0),
        "transaction_state": found.state.kafka_name,
        "transaction_timeout": found.timeout_ms,
        "transaction_start_time": found.started_ms,
        "producer_id": found.producer_id,
        "producer_epoch": found.epoch,
        "topics": [
            {"topic": row.name, "partitions": list(partitions)}
            for topic_id, partitions in found.partitions.items()
            if (row := context.cache.by_id(topic_id)) is not None
        ],
    }


def error_answer(body: Body, code: int) -> Body:
    return {"transaction_states": [_answer(each, code) for each in body["transactional_ids"]]}


API = Api(65, "describe_transactions", 0, 0, begin_decoded(handle, error_answer))
