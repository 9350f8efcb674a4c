"""Maps errors to responses: the only place that chooses the status of an error.

- Invariant (400 is final): 400 is only for what the client must change, as the published client stops at it.
- Invariant (503 is temporary): 503 with Retry-After and the reason is for conditions that end without the client, or by
  an operator's action; clients retry.
- Invariant (409 first): a client that holds rows of an ended shape first gets 409, even if no shape can be built in its
  place because the table is paused or no longer captured. It discards its rows, and its next requests get 400 or 503.

    error                                        the client holds rows      it starts
    TablePausedError                             409                        503
    NotCapturedError                             409                        400
    UnavailableError (OverBudgetError, …)        503                        503
    InvalidError (FieldError, BadRequestError)   400                        400
    AccessDeniedError                            its status                 its status
"""

from __future__ import annotations

import structlog
from starlette.requests import Request
from starlette.responses import Response

from tidemill.base.errors import InvalidError, MissingError, TidemillError, UnavailableError
from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.shapes.definition.permissions import AccessDeniedError, Grant
from tidemill.shapes.definition.planner import FieldError
from tidemill.shapes.http.authorization import NARROWING_PARAMS, ShapeAuthorizer
from tidemill.shapes.http.params import BadRequestError, ShapeParams
from tidemill.shapes.http.responses import error_response, must_refetch
from tidemill.shapes.memory_budget import OverBudgetError
from tidemill.shapes.service import ShapeService
from tidemill.shapes.tables.table_search import NotCapturedError, TablePausedError

_log = structlog.get_logger()

_GRANT_KEY = "tidemill.shapes.right"
_HELD_HANDLE_KEY = "tidemill.shapes.held_handle"

ROUTING_ERROR_KEY = "tidemill.shapes.routing_error"
"""Key of the scope of a request, for an error that routing found. It is raised once the request is authorized."""
NOT_CAPTURED_KEY = "tidemill.shapes.not_captured"
"""Key of the scope of a request, present if the request failed because no capture of this node has its table."""


def store_grant(request: Request, right: Grant) -> None:
    request.scope[_GRANT_KEY] = right


def stored_grant(request: Request) -> Grant | None:
    """Return the grant of a request; None if it was not determined yet."""
    found = request.scope.get(_GRANT_KEY)
    return found if isinstance(found, Grant) else None


def has_position(params: ShapeParams) -> bool:
    """Return whether the client has rows, or a position in a log, under its handle."""
    return bool(params.handle) and params.offset is not None and not params.is_initial and params.subset is None


def store_held_handle(request: Request, params: ShapeParams) -> None:
    if has_position(params):
        request.scope[_HELD_HANDLE_KEY] = params.handle


class ErrorResponder:
    def __init__(self, service: ShapeService, grants: ShapeAuthorizer) -> None:
        self._service = service
        self._grants = grants

    def respond(self, request: Request, error: BaseException) -> Response:
        """Return the response to an error. Raises the error if it is not an error of a request."""
        right = stored_grant(request) or Grant()
        held = request.scope.get(_HELD_HANDLE_KEY, "")
        if isinstance(error, NotCapturedError):
            request.scope[NOT_CAPTURED_KEY] = True
        match error:
            case AccessDeniedError():
                return error_response(error.status, str(error))
            case BadRequestError():
                return error_response(400, "Invalid request", error.errors)
            case TablePausedError() | NotCapturedError() if held:
                return must_refetch(self._service.successor_handle(held), True)
            case InvalidError():
                return self._respond_invalid(request, right, error)
            case OverBudgetError():
                return error_response(503, str(error), retry_after_s=error.retry_after_s)
            case UnavailableError():
                # The error may quote a row, which a client that does not define the rows must not see.
                said = "This shape cannot be served at the moment." if right.is_server_defined else str(error)
                after_s = error.retry_after_s if isinstance(error, TablePausedError) else 1
                return error_response(503, said, retry_after_s=after_s)
            case TidemillError():
                _log.error("shape request failed", error=str(error))
                return error_response(500, "Internal error")
        if not is_fault(error):
            raise error
        _log.error("shape request failed", error=error_sentence(error), exc_info=error)
        return error_response(500, "Internal error")

    def _respond_invalid(self, request: Request, right: Grant, error: InvalidError) -> Response:
        """Return the response to an invalid request.

        A client cannot correct a definition that it did not write, and may not always see the reason: the database may
        quote a value of a row that the shape does not show.
        """
        field = error.field if isinstance(error, FieldError) else ""
        if isinstance(error, MissingError):
            field = "table"
        elif not field:
            # The database rejected the query of the initial rows: the clause compiled, but fails on a row.
            field = "where" if request.query_params.get("where") else "table"
            if right.signed or (right.narrowed and field == "where"):
                return error_response(400, "Invalid request", {"where": ["A row cannot be read with this clause."]})
        if right.takes and field in ("where", "params"):
            return error_response(400, "Invalid request", {"params": ["The values do not fit this shape."]})
        own = field.startswith("subset__") or (right.narrowed and field in (*NARROWING_PARAMS, "params"))
        if not right.name or own:
            return error_response(400, "Invalid request", {field: [str(error)]})
        self._grants.audit.log_refusal("shape.not_as_defined", (right.name, field), shape=right.name, reason=str(error))
        return error_response(503, "This shape cannot be served as it is defined.", retry_after_s=5)
