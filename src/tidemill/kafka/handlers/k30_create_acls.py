"""Handler of CreateAcls (30), versions 1 to 3: rules that allow or deny. Adding an existing rule succeeds.

Each rule is checked independently: an invalid one is INVALID_REQUEST, and the valid ones are written.
"""

from __future__ import annotations

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.handlers.k29_describe_acls import DISABLED
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.security.acls import AclRule, Pattern, check_rule


async def handle(context: Context, request: Request, body: Body) -> Body:
    rulebook = context.access.rulebook
    if rulebook is None:
        return {"results": [_result(error_codes.SECURITY_DISABLED, DISABLED) for _ in body["creations"]]}
    rules = [_rule(each) for each in body["creations"]]
    results = [_checked(rule) for rule in rules]
    good = [rule for rule, result in zip(rules, results, strict=True) if not result["error_code"]]
    try:
        await rulebook.add(good)
    except TidemillError as error:
        code = error_codes.INVALID_REQUEST if isinstance(error, InvalidError) else error_codes.REQUEST_TIMED_OUT
        return {"results": [each if each["error_code"] else _result(code, str(error)) for each in results]}
    for rule in good:
        by, host = request.visitor.principal, request.visitor.host
        context.audit.log_change("kafka.rule_added", by=by, host=host, rule=repr(rule))
    return {"results": results}


def _rule(creation: Body) -> AclRule:
    return AclRule(
        creation["resource_type"],
        creation.get("resource_pattern_type", Pattern.LITERAL),
        creation["resource_name"],
        creation["principal"],
        creation["host"],
        creation["operation"],
        creation["permission_type"],
    )


def _checked(rule: AclRule) -> Body:
    try:
        check_rule(rule)
    except InvalidError as error:
        return _result(error_codes.INVALID_REQUEST, str(error))
    return _result(0, None)


def _result(code: int, message: str | None) -> Body:
    return {"error_code": code, "error_message": message}


def error_answer(body: Body, code: int) -> Body:
    return {"results": [_result(code, None) for _ in body["creations"]]}


API = Api(30, "create_acls", 1, 3, begin_decoded(handle, error_answer), barrier=True)
