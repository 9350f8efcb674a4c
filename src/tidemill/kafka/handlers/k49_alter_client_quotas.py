"""Handler of AlterClientQuotas (49), versions 0 and 1 (KIP-546): each entity's changes are made together or not at all.

Supported are `producer_byte_rate`, `consumer_byte_rate` and `request_percentage` of users and client ids. Kafka's other
quotas are INVALID_REQUEST, with a list of the supported ones, and so is an entity that is named twice. Removing a quota
that does not exist succeeds.
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.handlers.k48_describe_client_quotas import CLIENT, USER
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.security.quotas import NO_ENTITY, Quota, check_quota, stored_name

NOT_SERVED: Final = ("controller_mutation_rate", "connection_creation_rate")
"""Quotas of Kafka that cannot be set here. They never exist, so removing one changes nothing (KIP-599, KIP-612)."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    seen: set[tuple[str, str]] = set()
    entries = []
    for entry in body["entries"]:
        code, message = error_codes.NONE, None
        try:
            user, client = _entity(entry["entity"])
            if (user, client) in seen:
                raise InvalidError("the request names an entity twice.")
            seen.add((user, client))
            put, removed = _changes(user, client, entry["ops"])
            if not body["validate_only"]:
                await context.quotas.change(put, removed)
                by, host = request.visitor.principal, request.visitor.host
                context.audit.log_change(
                    "kafka.quotas_changed",
                    by=by,
                    host=host,
                    put=[repr(q) for q in put],
                    removed=[repr(q) for q in removed],
                )
        except InvalidError as error:
            code, message = error_codes.INVALID_REQUEST, str(error)
        except TidemillError as error:
            code, message = error_codes.REQUEST_TIMED_OUT, str(error)
        entries.append({"error_code": code, "error_message": message, "entity": entry["entity"]})
    return {"entries": entries}


def _entity(parts: list[Body]) -> tuple[str, str]:
    """Return the user and client id of an entity. Raises InvalidError if the entity is invalid."""
    found = {part["entity_type"]: stored_name(part["entity_name"]) for part in parts}
    if not found or len(found) < len(parts) or not set(found) <= {USER, CLIENT}:
        raise InvalidError(f"invalid entity: it must be a {USER}, a {CLIENT}, or both.")
    if "=" in found.values():
        raise InvalidError("the entity name is empty.", fix="Use null for the default.")
    return found.get(USER, NO_ENTITY), found.get(CLIENT, NO_ENTITY)


def _changes(user: str, client: str, ops: list[Body]) -> tuple[list[Quota], list[Quota]]:
    """Return the quotas to set and to remove. Raises InvalidError for an unknown or duplicate quota."""
    if len({op["key"] for op in ops}) < len(ops):
        raise InvalidError("the request names a quota twice.")
    put = [Quota(user, client, op["key"], op["value"]) for op in ops if not op["remove"]]
    removed = [Quota(user, client, op["key"], 1.0) for op in ops if op["remove"] and op["key"] not in NOT_SERVED]
    for quota in (*put, *removed):
        check_quota(quota)
    return put, removed


def error_answer(body: Body, code: int) -> Body:
    return {
        "entries": [{"error_code": code, "error_message": None, "entity": each["entity"]} for each in body["entries"]]
    }


API = Api(49, "alter_client_quotas", 0, 1, begin_decoded(handle, error_answer), barrier=True)
