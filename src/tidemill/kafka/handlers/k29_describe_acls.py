"""Handler of DescribeAcls (29), versions 1 to 3: the rules that match a filter, grouped by resource.

Without authorization: SECURITY_DISABLED, as in Kafka. An invalid filter: INVALID_REQUEST.
"""

from __future__ import annotations

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.security.acls import Operation, Pattern, Permission, Resource, RuleFilter

DISABLED = "There are no rules: security.authorize is off."


async def handle(context: Context, request: Request, body: Body) -> Body:
    rulebook = context.access.rulebook
    if rulebook is None:
        return _answer(error_codes.SECURITY_DISABLED, DISABLED)
    try:
        found = await rulebook.find(filter_of(body))
    except InvalidError as error:
        return _answer(error_codes.INVALID_REQUEST, str(error))
    except TidemillError as error:
        return _answer(error_codes.REQUEST_TIMED_OUT, str(error))
    resources: dict[tuple[int, str, int], Body] = {}
    for rule in found:
        about = {"resource_type": rule.resource, "resource_name": rule.name, "pattern_type": rule.pattern, "acls": []}
        resources.setdefault((rule.resource, rule.name, rule.pattern), about)["acls"].append(
            {
                "principal": rule.principal,
                "host": rule.host,
                "operation": rule.operation,
                "permission_type": rule.permission,
            }
        )
    return {**_answer(0, None), "resources": list(resources.values())}


def filter_of(body: Body) -> RuleFilter:
    """Return the filter of a request. Raises InvalidError for an unknown kind, pattern, operation or permission."""
    found = RuleFilter(
        body["resource_type_filter"],
        body.get("pattern_type_filter", Pattern.LITERAL),
        body["resource_name_filter"],
        body["principal_filter"],
        body["host_filter"],
        body["operation"],
        body["permission_type"],
    )
    known = {
        "resource": (Resource, 7),
        "pattern": (Pattern, 4),
        "operation": (Operation, 15),
        "permission": (Permission, 3),
    }
    for field, (kind, last) in known.items():
        value = getattr(found, field)
        if not 1 <= value <= last:
            raise InvalidError(
                f"invalid filter: {field}={value}.", fix=f"Use one of {', '.join(each.name for each in kind)}."
            )
    return found


def _answer(code: int, message: str | None) -> Body:
    return {"error_code": code, "error_message": message, "resources": []}


def error_answer(body: Body, code: int) -> Body:
    return _answer(code, None)


API = Api(29, "describe_acls", 1, 3, begin_decoded(handle, error_answer))
