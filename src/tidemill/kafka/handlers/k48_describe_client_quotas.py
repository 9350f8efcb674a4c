"""Handler of DescribeClientQuotas (48), versions 0 and 1: the quotas of entities that match a filter (KIP-546).

A component matches an entity's user or client id by name, the default, or any. With `strict`, an entity that has
further components does not match. Kinds of entities that have no quotas here (ip) are UNSUPPORTED_VERSION.
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.security.quotas import DEFAULT, NO_ENTITY, Quota, stored_name

USER: Final = "user"
CLIENT: Final = "client-id"
EXACT: Final = 0
OF_DEFAULT: Final = 1
ANY: Final = 2


async def handle(context: Context, request: Request, body: Body) -> Body:
    asked = {each["entity_type"]: each for each in body["components"]}
    if len(asked) < len(body["components"]):
        return error_answer(body, error_codes.INVALID_REQUEST, "The request names an entity type twice.")
    if not set(asked) <= {USER, CLIENT}:
        return error_answer(body, error_codes.UNSUPPORTED_VERSION, f"Only {USER} and {CLIENT} have quotas.")
    if any(each["match_type"] not in (EXACT, OF_DEFAULT, ANY) for each in asked.values()):
        return error_answer(body, error_codes.INVALID_REQUEST, "The match type must be exact, default or any.")
    try:
        quotas = await context.quotas.list()
    except TidemillError as error:
        return error_answer(body, error_codes.REQUEST_TIMED_OUT, str(error))
    entities: dict[tuple[str, str], list[Quota]] = {}
    for quota in quotas:
        if _matches_filter(quota.user, asked.get(USER), body["strict"]) and _matches_filter(
            quota.client, asked.get(CLIENT), body["strict"]
        ):
            entities.setdefault((quota.user, quota.client), []).append(quota)
    entries = [
        {
            "entity": entity_parts(user, client),
            "values": [{"key": quota.name, "value": quota.value} for quota in of_it],
        }
        for (user, client), of_it in entities.items()
    ]
    return {"error_code": 0, "error_message": None, "entries": entries}


def _matches_filter(part: str, asked: Body | None, strict: bool) -> bool:
    if asked is None:
        return not (strict and part)
    if part == NO_ENTITY:
        return False
    if asked["match_type"] == ANY:
        return True
    return part == (DEFAULT if asked["match_type"] == OF_DEFAULT else stored_name(asked["match"] or ""))


def entity_parts(user: str, client: str) -> list[Body]:
    parts = ((USER, user), (CLIENT, client))
    return [{"entity_type": kind, "entity_name": None if part == DEFAULT else part[1:]} for kind, part in parts if part]


def error_answer(body: Body, code: int, message: str | None = None) -> Body:
    return {"error_code": code, "error_message": message, "entries": None}


API = Api(48, "describe_client_quotas", 0, 1, begin_decoded(handle, error_answer))
