"""Handler of DescribeUserScramCredentials (50), version 0: mechanisms and iterations of users (KIP-554), never a key.

Null or no users requests all. A user without a credential is RESOURCE_NOT_FOUND, one that is named twice
DUPLICATE_RESOURCE.
"""

from __future__ import annotations

from collections import Counter

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.security.scram import Credential


async def handle(context: Context, request: Request, body: Body) -> Body:
    try:
        found: dict[str, list[Credential]] = {}
        for credential in await context.users.list():
            found.setdefault(credential.user, []).append(credential)
    except TidemillError as error:
        return {"error_code": error_codes.COORDINATOR_NOT_AVAILABLE, "error_message": str(error), "results": []}
    named = Counter(user["name"] for user in body["users"] or ())
    results = []
    for name in named or found:
        if named[name] > 1:
            results.append(_result(name, error_codes.DUPLICATE_RESOURCE, "The request names the user twice."))
        elif name not in found:
            results.append(
                _result(name, error_codes.RESOURCE_NOT_FOUND, "The user does not exist or has no credential.")
            )
        else:
            infos = [{"mechanism": each.mechanism, "iterations": each.iterations} for each in found[name]]
            results.append({**_result(name, 0, None), "credential_infos": infos})
    return {"error_code": 0, "error_message": None, "results": results}


def _result(name: str, code: int, message: str | None) -> Body:
    return {"user": name, "error_code": code, "error_message": message, "credential_infos": []}


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "error_message": None, "results": []}


API = Api(50, "describe_user_scram_credentials", 0, 0, begin_decoded(handle, error_answer))
