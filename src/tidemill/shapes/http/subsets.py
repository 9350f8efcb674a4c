"""Responses with a subset of a shape's rows: {"metadata": …, "data": [rows]}, for requestSnapshot and fetchSnapshot.

The offset in the response determines what its client follows from there:

    now       the end of the log before the rows were read: later changes follow it, and the rows may show them already
    -1        -1: nothing was read yet, so the client reads everything
    another   none for a GET; for a POST the offset of the request, as the client has read no further

A handle that has ended gets 409 with the new one, as the protocol requires, if the client has no position yet. A client
with a position would use the new handle for the rest of its old log, and miss the changes in between (the published
client does). It gets its rows with its own handle instead: its stream then uses that handle, and gets 409.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.shapes.definition.planner import FieldError, Plan
from tidemill.shapes.definition.subset import SubsetMetadata
from tidemill.shapes.http.connections import DisconnectWatcher, wait_any
from tidemill.shapes.http.params import BadRequestError, ShapeParams
from tidemill.shapes.http.responses import BASE_HEADERS, ItemsResponse, must_refetch
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import ResponseMemory
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.service import ShapeService

MARK_LIMIT = 1 << 31
HANDLE_PATTERN = re.compile(r"[0-9]{1,20}-[0-9]{1,50}")
CLIENT_CLOSED_STATUS = 499


async def respond_subset(
    service: ShapeService, request: Request, params: ShapeParams, rows: ResponseMemory
) -> Response:
    """Respond with a subset. The caller releases `rows` after the response is sent. Raises as other shape requests
    do."""
    plan = await service.plan_request(params.request)
    starts = params.offset is None or params.is_initial
    live = service.find_current(plan.definition)
    if starts or not HANDLE_PATTERN.fullmatch(params.handle) or (live is not None and live.handle == params.handle):
        live = service.open_shape(plan)  # another shape, if the table was replaced
    if live is not None and params.handle in ("", live.handle):
        if not await live.wait_loaded(service.settings.load_timeout_s):
            raise UnavailableError("the initial rows are not ready yet.")
        params.right.check_valid(service.clock.now_ms())
        if live.error is not None:
            raise live.error
        if live.has_ended:
            return must_refetch(
                service.open_shape(await service.plan_request(params.request)).handle, bool(params.handle)
            )
        handle, place = live.handle, _response_offset(request, params, live)
    elif live is not None and (starts or not HANDLE_PATTERN.fullmatch(params.handle)):
        return must_refetch(live.handle, True)
    else:
        handle, place = params.handle, _response_offset(request, params, None)
    metadata = await _read_subset(service, request, plan, params, rows)
    if metadata is None:
        return Response(status_code=CLIENT_CLOSED_STATUS)
    params.right.check_valid(service.clock.now_ms())
    return _subset_response(plan, handle, place, metadata, rows)


def _response_offset(request: Request, params: ShapeParams, live: LiveShape | None) -> LogOffset | None:
    if params.offset is None:
        return None if live is None else live.log.end
    return params.offset if params.is_initial or request.method == "POST" else None


async def _read_subset(
    service: ShapeService, request: Request, plan: Plan, params: ShapeParams, rows: ResponseMemory
) -> SubsetMetadata | None:
    """Read the rows; return None if the client disconnected.

    Raises BadRequestError if the database rejects the query, TimeoutError if it takes too long.
    """
    assert params.subset is not None
    async with DisconnectWatcher(request) as disconnect, Tasks(lambda *_: None) as tasks:
        reading = tasks.spawn(plan.read(params.subset, rows, service.rand.below(MARK_LIMIT)), name="subset")
        await wait_any({reading, disconnect.future}, service.settings.load_timeout_s)
        if not reading.done():
            if disconnect.has_happened:
                return None
            raise TimeoutError
        try:
            found: SubsetMetadata = reading.result()
        except (FieldError, MissingError):
            raise
        except InvalidError as error:
            # A clause that the client did not write may have failed on a row that it must not see.
            said = "A row cannot be read with these clauses." if params.right.is_server_defined else str(error)
            raise BadRequestError({"subset": [said]}) from error
        return found


def _subset_response(
    plan: Plan, handle: str, place: LogOffset | None, metadata: SubsetMetadata, rows: ResponseMemory
) -> Response:
    headers: Mapping[str, str] = {
        **BASE_HEADERS,
        "electric-handle": handle,
        **({} if place is None else {"electric-offset": str(place)}),
        "electric-schema": plan.schema_json.decode("utf-8"),
        "electric-snapshot": "true",
        "cache-control": "no-cache",
    }
    opening = b'{"metadata":' + msgspec.json.encode(metadata) + b',"data":['
    return ItemsResponse(rows.pieces, 200, headers, opening, b"]}")
