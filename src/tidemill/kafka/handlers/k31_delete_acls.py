"""Handler of DeleteAcls (31), versions 1 to 3: deletes and returns the rules that match any of several filters."""

from __future__ import annotations

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.handlers.k29_describe_acls import DISABLED, filter_of
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.security.acl_cache import AclCache
from tidemill.security.acls import AclRule


async def handle(context: Context, request: Request, body: Body) -> Body:
    rulebook = context.access.rulebook
    if rulebook is None:
        return {"filter_results": [_result(error_codes.SECURITY_DISABLED, DISABLED) for _ in body["filters"]]}
    return {"filter_results": [await _delete(context, request, rulebook, each) for each in body["filters"]]}


async def _delete(context: Context, request: Request, rulebook: AclCache, asked: Body) -> Body:
    try:
        found = await rulebook.find(filter_of(asked))
        await rulebook.delete(found)
    except InvalidError as error:
        return _result(error_codes.INVALID_REQUEST, str(error))
    except TidemillError as error:
        return _result(error_codes.REQUEST_TIMED_OUT, str(error))
    for rule in found:
        by, host = request.visitor.principal, request.visitor.host
        context.audit.log_change("kafka.rule_deleted", by=by, host=host, rule=repr(rule))
    return {**_result(0, None), "matching_acls": [_matching(rule) for rule in found]}


def _matching(rule: AclRule) -> Body:
    return {
        "error_code": 0,
        "error_message": None,
        "resource_type": rule.resource,
        "resource_name": rule.name,
        "pattern_type": rule.pattern,
        "principal": rule.principal,
        "host": rule.host,
        "operation": rule.operation,
        "permission_type": rule.permission,
    }


def _result(code: int, message: str | None) -> Body:
    return {"error_code": code, "error_message": message, "matching_acls": []}


def error_answer(body: Body, code: int) -> Body:
    return {"filter_results": [_result(code, None) for _ in body["filters"]]}


API = Api(31, "delete_acls", 1, 3, begin_decoded(handle, error_answer), barrier=True)
