"""Handler of DeleteGroups (42), versions 0 to 2: deletes groups without members.

Their offsets are deleted too, including those that an open transaction has yet to commit.
"""

from __future__ import annotations

from functools import partial

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.schema.codec_compiler import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    async def one(group: str) -> Body:
        return {"group_id": group, "error_code": await _delete(context, group)}

    return {"results": await map_items(body["groups_names"], one, context.pace)}


async def _delete(context: Context, group: str) -> int:
    try:
        if group and context.owners.coordinates_group(group) and await context.groups.rows.head(group) is None:
            return error_codes.GROUP_ID_NOT_FOUND
        return await (await context.groups.get(group)).delete(partial(context.transactions.drop_group_offsets, group))
    except GroupUnavailableError as refused:
        return refused.code
    except TidemillError:
        return error_codes.COORDINATOR_NOT_AVAILABLE


def error_answer(body: Body, code: int) -> Body:
    return {"results": [{"group_id": group, "error_code": code} for group in body["groups_names"]]}


API = Api(42, "delete_groups", 0, 2, begin_decoded(handle, error_answer), barrier=True)
