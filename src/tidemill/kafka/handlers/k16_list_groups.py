"""Handler of ListGroups (16), versions 0 to 5: the groups that this node coordinates; clients ask every node.

Filters by state (v4) and type (v5) ignore case, as in Kafka.
"""

from __future__ import annotations

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.groups.classic.state import Phase
from tidemill.kafka.groups.group_records import kind_of
from tidemill.kafka.schema.codec_compiler import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    states = {state.lower() for state in body.get("states_filter") or ()}
    types = {kind.lower() for kind in body.get("types_filter") or ()}
    try:
        heads = await context.groups.rows.heads()
    except TidemillError:
        return error_answer(body, error_codes.COORDINATOR_NOT_AVAILABLE)
    groups: list[Body] = []
    for head in heads:
        if context.pace.is_used_up:
            await context.pace.wait_for_turn()
        if not context.owners.coordinates_group(head.group):
            continue
        led = context.groups.loaded_group(head.group)
        phase = led.group.phase if led is not None else Phase.STABLE if head.members else Phase.EMPTY
        protocol_type = led.group.protocol_type if led is not None else head.protocol_type
        kind = kind_of(led.group) if led is not None else head.kind
        if (states and phase.value.lower() not in states) or (types and kind not in types):
            continue
        groups.append(
            {
                "group_id": head.group,
                "protocol_type": protocol_type,
                "group_state": phase.value,
                "group_type": kind,
            }
        )
    return {"error_code": 0, "groups": groups}


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "groups": []}


API = Api(16, "list_groups", 0, 5, begin_decoded(handle, error_answer))
