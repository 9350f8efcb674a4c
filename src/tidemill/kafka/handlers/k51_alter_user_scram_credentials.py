"""Handler of AlterUserScramCredentials (51), version 0 (KIP-554).

The client salts the password, so the request contains no password.

As in Kafka, a user that the request names twice for one mechanism is DUPLICATE_RESOURCE, deleting a missing credential
is RESOURCE_NOT_FOUND, too few or too many iterations are UNACCEPTABLE_CREDENTIAL, and an unknown mechanism is
UNSUPPORTED_SASL_MECHANISM. There is one answer per user; any error leaves all credentials of its user unchanged.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.security.scram import ITERATIONS_MAX, ITERATIONS_MIN, NAMES, SIZES, credential_of
from tidemill.security.users import check_user

SALT_BYTES_MAX: Final = 1_024


async def handle(context: Context, request: Request, body: Body) -> Body:
    named = Counter((each["name"], each["mechanism"]) for each in (*body["deletions"], *body["upsertions"]))
    results = []
    for name in dict.fromkeys(name for name, _ in named):
        deletions = [each for each in body["deletions"] if each["name"] == name]
        upsertions = [each for each in body["upsertions"] if each["name"] == name]
        twice = any(count > 1 for (user, _), count in named.items() if user == name)
        refused = (error_codes.DUPLICATE_RESOURCE, "The request names a credential twice.") if twice else None
        refused = refused or next(filter(None, map(_credential_error, upsertions)), None)
        try:
            code, message = refused or await _change(context, request, name, deletions, upsertions)
        except InvalidError as error:
            code, message = error_codes.UNACCEPTABLE_CREDENTIAL, str(error)
        except TidemillError as error:
            code, message = error_codes.REQUEST_TIMED_OUT, str(error)
        results.append({"user": name, "error_code": code, "error_message": message})
    return {"results": results}


def _credential_error(upsertion: Body) -> tuple[int, str] | None:
    mechanism, iterations = upsertion["mechanism"], upsertion["iterations"]
    if mechanism not in NAMES:
        return error_codes.UNSUPPORTED_SASL_MECHANISM, f"Use one of {', '.join(NAMES.values())}."
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        return error_codes.UNACCEPTABLE_CREDENTIAL, f"Use {ITERATIONS_MIN} to {ITERATIONS_MAX} iterations."
    if len(upsertion["salted_password"]) != SIZES[mechanism] or not 0 < len(upsertion["salt"]) <= SALT_BYTES_MAX:
        return (
            error_codes.UNACCEPTABLE_CREDENTIAL,
            "The salt or the salted password has an invalid size.",
        )
    return None


async def _change(
    context: Context, request: Request, name: str, deletions: list[Body], upsertions: list[Body]
) -> tuple[int, str | None]:
    check_user(name)
    for each in deletions:
        if each["mechanism"] not in NAMES:
            return error_codes.UNSUPPORTED_SASL_MECHANISM, f"Use one of {', '.join(NAMES.values())}."
        if await context.users.credential(name, each["mechanism"]) is None:
            return error_codes.RESOURCE_NOT_FOUND, "The credential does not exist."
    put = [
        credential_of(name, each["mechanism"], bytes(each["salted_password"]), bytes(each["salt"]), each["iterations"])
        for each in upsertions
    ]
    await context.users.change(name, put, [each["mechanism"] for each in deletions])
    context.audit.log_change(
        "kafka.credentials_changed",
        by=request.visitor.principal,
        host=request.visitor.host,
        user=name,
        put=[NAMES[each["mechanism"]] for each in upsertions],
        deleted=[NAMES[each["mechanism"]] for each in deletions],
    )
    return 0, None


def error_answer(body: Body, code: int) -> Body:
    names = dict.fromkeys(each["name"] for each in (*body["deletions"], *body["upsertions"]))
    return {"results": [{"user": name, "error_code": code, "error_message": None} for name in names]}


API = Api(51, "alter_user_scram_credentials", 0, 0, begin_decoded(handle, error_answer), barrier=True)
