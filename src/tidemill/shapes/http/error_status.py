"""What a request that cannot be served is answered: the one place that chooses the status of an error.

RF1  400 is for what the client must change, and for nothing else: the published client stops at it.
RF2  503 with Retry-After and the reason is for what heals, by itself or by what an operator does: clients ask again.
RF3  A client that holds rows whose shape is over is answered 409 first, also while no shape can be built in its place:
     the table is parked, or captured no more. It lets go of its rows, and is answered by RF1 or RF2 from then on.

    error                                        the client holds rows      it begins
    Parked                                       409                        503
    NotCapturedError                                  409                        400
    Unavailable (Full, Passing, Starting, …)     503                        503
    Invalid (FieldError, BadRequestError, …)          400                        400
    Denied                                       its status                 its status
"""

from __future__ import annotations

import structlog
from starlette.requests import Request
from starlette.responses import Response

from tidemill.base.errors import InvalidError, MissingError, TidemillError, UnavailableError
from tidemill.base.runtime.tasks import is_fault, sentence
from tidemill.shapes.definition.permissions import AccessDeniedError, Grant
from tidemill.shapes.definition.planner import FieldError
from tidemill.shapes.http.authorization import NARROWING, Grants
from tidemill.shapes.http.params import BadRequestError, ShapeParams
from tidemill.shapes.http.responses import error_response, must_refetch
from tidemill.shapes.memory_budget import OverBudgetError
from tidemill.shapes.service import ShapeService
from tidemill.shapes.tables.table_shapes import NotCapturedError, TablePausedError

_log = structlog.get_logger()

_RIGHT = "tidemill.shapes.right"
_HELD_HANDLE = "tidemill.shapes.held_handle"


def note_right(request: Request, right: Grant) -> None:
    request.scope[_RIGHT] = right


def right_of(request: Request) -> Grant | None:
    """None: it was not looked at yet."""
    found = request.scope.get(_RIGHT)
    return found if isinstance(found, Grant) else None


def holds(params: ShapeParams) -> bool:
    """Whether the client has rows, or the place of a log, under its handle (RF3)."""
    return bool(params.handle) and params.offset is not None and not params.initial and params.subset is None


def note_holder(request: Request, params: ShapeParams) -> None:
    if holds(params):
        request.scope[_HELD_HANDLE] = params.handle


class Refusing:
    def __init__(self, service: ShapeService, grants: Grants) -> None:
        self._service = service
        self._grants = grants

    def answer(self, request: Request, error: BaseException) -> Response:
        """Raises what is no error of a request."""
        right = right_of(request) or Grant()
        held = request.scope.get(_HELD_HANDLE, "")
        match error:
            case AccessDeniedError():
                return error_response(error.status, str(error))
            case BadRequestError():
                return error_response(400, "Invalid request", error.errors)
            case TablePausedError() | NotCapturedError() if held:
                return must_refetch(self._service.successor(held), True)
            case InvalidError():
                return self._invalid(request, right, error)
            case OverBudgetError():
                return error_response(503, str(error), retry_after_s=error.retry_after_s)
            case UnavailableError():
                # A fault may quote a row, which is not for a client that does not say which rows there are.
                said = "This shape cannot be served just now." if right.defined else str(error)
                after_s = error.retry_after_s if isinstance(error, TablePausedError) else 1
                return error_response(503, said, retry_after_s=after_s)
            case TidemillError():
                _log.error("shape request failed", error=str(error))
                return error_response(500, "Internal error")
        if not is_fault(error):
            raise error
        _log.error("shape request failed", error=sentence(error), exc_info=error)
        return error_response(500, "Internal error")

    def _invalid(self, request: Request, right: Grant, error: InvalidError) -> Response:
        """A definition that its client did not write is not the client's to mend, and why it fails not always its to
        know: of a row that the shape does not show, the database may quote a value."""
        field = error.field if isinstance(error, FieldError) else ""
        if isinstance(error, MissingError):
            field = "table"
        elif not field:
            # What the database refuses while it reads the initial rows: the clause compiled, a row breaks it.
            field = "where" if request.query_params.get("where") else "table"
            if right.signed or (right.narrowed and field == "where"):
                return error_response(400, "Invalid request", {"where": ["A row cannot be read with this clause."]})
        if right.takes and field in ("where", "params"):
            return error_response(400, "Invalid request", {"params": ["The values do not fit this shape."]})
        own = field.startswith("subset__") or (right.narrowed and field in (*NARROWING, "params"))
        if not right.name or own:
            return error_response(400, "Invalid request", {field: [str(error)]})
        self._grants.audit.refused("shape.not_as_defined", (right.name, field), shape=right.name, reason=str(error))
        return error_response(503, "This shape cannot be served as it is defined.", retry_after_s=5)
