"""Read-only JSON API of a node: what the command line prints with --json, and what the node's page polls.

/api/overview                          counts, problems, restarts, flow, captures, processes, latencies; of bounded size
/api/places                            every table with its input, its pipeline and its delay
/api/place?name=                       one table or captured table: each part of its view, null for a missing one
/api/why?name=                         `why NAME --json`
/api/captures?capture=                 `capture list --json`
/api/tables                            `table list --json`
/api/tables/NAME                       `table describe NAME --json`
/api/latency                           `status --latency --json`
/api/rows?table=&as_of=&limit=         some rows of a table at one time                     } need READ of the topic
/api/dead-letters?table=&limit=        `dead-letters --json` of one pipeline, with reasons  } shard.TABLE, as shapes do

Lists take `limit` and `offset`; the header x-total-count has the number of all rows. An answer that is the same for
everybody is computed once per interval (`shared_answer`). An error is {"message": sentence}: 404 for what does not
exist, 410 for a time that is no longer readable, 400 for another bad request, 503 while a store does not answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.console.cluster_reader import ClusterReader, ConsoleNode
from tidemill.console.row_sample import ROWS_MAX
from tidemill.console.shared_answer import SharedAnswer, is_compressed
from tidemill.shards.api import HistoryLostError
from tidemill.shards.read.holds import as_of_ms

LIST_LIMIT = 1_000
"""Rows of one answer: the default and the maximum of `limit`."""
LETTERS_LIMIT = 200
LETTER_BYTES = 1_000
"""Bytes of a dead letter's record that an answer shows; the rest is cut."""
NAME_CHARS_MAX = 300
SECRET_HEADER = "x-tidemill-secret"
TABLES_VALID_S = 5.0
"""Validity of lists that read the log of every table."""

Handler = Callable[[Request], Awaitable[Response]]


def api_routes(node: ConsoleNode) -> list[Route]:
    api = _Api(ClusterReader(node), node)
    handlers: dict[str, Handler] = {
        "/api/overview": api.shared("overview"),
        "/api/places": api.shared("places"),
        "/api/place": api.place,
        "/api/latency": api.shared("latency"),
        "/api/tables": api.tables,
        "/api/tables/{name}": api.table,
        "/api/why": api.why,
        "/api/captures": api.captures,
        "/api/rows": api.rows,
        "/api/dead-letters": api.dead_letters,
    }
    return [Route(path, _with_error_responses(handler), methods=["GET"]) for path, handler in handlers.items()]


class _Api:
    def __init__(self, reader: ClusterReader, node: ConsoleNode) -> None:
        self._reader = reader
        self._shared = {
            "overview": SharedAnswer(reader.overview, node.clock),
            "places": SharedAnswer(reader.places, node.clock),
            "latency": SharedAnswer(reader.latency, node.clock),
            "tables": SharedAnswer(reader.tables, node.clock, TABLES_VALID_S),
        }

    def shared(self, name: str) -> Handler:
        async def answer(request: Request) -> Response:
            accepts_gzip = "gzip" in request.headers.get("accept-encoding", "")
            body = await self._shared[name].body(compressed=accepts_gzip)
            return _json(body, {"content-encoding": "gzip"} if is_compressed(body) else {})

        return answer

    async def tables(self, request: Request) -> Response:
        # Slices of one computation: pages of the list do not read the tables again.
        return _page(request, orjson.loads(await self._shared["tables"].body(compressed=False)))

    async def table(self, request: Request) -> Response:
        return _json(await self._reader.table(_name(request.path_params["name"])))

    async def place(self, request: Request) -> Response:
        return _json(await self._reader.place(_required(request, "name")))

    async def why(self, request: Request) -> Response:
        return _json(await self._reader.why(_name(request.query_params.get("name", ""))))

    async def captures(self, request: Request) -> Response:
        return _page(request, await self._reader.captured_tables(request.query_params.get("capture", "")))

    async def rows(self, request: Request) -> Response:
        if (refusal := self._refuse_secret(request)) is not None:
            return refusal
        at = as_of_ms(request.query_params.get("as_of") or None)
        table = _required(request, "table")
        found = await self._reader.rows(table, at, _number(request, "limit", 100, ROWS_MAX))
        return _json(msgspec.to_builtins(found))

    async def dead_letters(self, request: Request) -> Response:
        if (refusal := self._refuse_secret(request)) is not None:
            return refusal
        table = _required(request, "table")
        found = await self._reader.dead_letters(table, _number(request, "limit", 20, LETTERS_LIMIT))
        records = [letter | {"bytes": _letter_text(letter.get("bytes"))} for letter in found.letters]
        counts = {"total": found.total, "expired": found.expired, "examined": found.examined}
        return _json(counts | {"reasons": found.reasons, "records": records})

    def _refuse_secret(self, request: Request) -> Response | None:
        """Refuse a request without the secret of shapes: rows need it here, too."""
        given = request.headers.get(SECRET_HEADER) or request.query_params.get("secret", "")
        if self._reader.may_read_rows(given):
            return None
        return _error(401, "Rows need the secret of shapes (shapes.secret).")


def _with_error_responses(handler: Handler) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except MissingError as error:
            return _error(404, str(error))
        except HistoryLostError as error:
            return _error(410, str(error))
        except InvalidError as error:
            return _error(400, str(error))
        except TidemillError as error:
            return _error(503, str(error), {"retry-after": "1"})

    return answer


def _json(value: object, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    body = value if isinstance(value, bytes) else orjson.dumps(value, default=str)
    return Response(body, status, {"cache-control": "no-store", **(headers or {})}, "application/json")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return _json({"message": message}, headers, status)


def _page(request: Request, rows: list[dict[str, object]]) -> Response:
    limit = _number(request, "limit", LIST_LIMIT, LIST_LIMIT)
    begin = _number(request, "offset", 0, len(rows), least=0)
    return _json(rows[begin : begin + limit], {"x-total-count": str(len(rows))})


def _number(request: Request, name: str, default: int, most: int, least: int = 1) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidError(f"not a number: {name}={text[:40]!r}.", fix=f"Use {least} to {most}.")
    return max(least, min(int(text), most))


def _required(request: Request, name: str) -> str:
    given = request.query_params.getlist(name)
    if len(given) != 1 or not given[0]:
        raise InvalidError(f"the parameter is required once: {name}.", fix=f"Add ?{name}=NAME.")
    return _name(given[0])


def _name(text: str) -> str:
    if len(text) > NAME_CHARS_MAX:
        raise InvalidError(f"the name is too long: chars={len(text)} limit={NAME_CHARS_MAX}.")
    return text


def _letter_text(data: object) -> str | None:
    """Return the bytes of a record as text; bytes that are not UTF-8 are replaced."""
    if not isinstance(data, bytes):
        return None
    return data[:LETTER_BYTES].decode("utf-8", "replace") + ("…" if len(data) > LETTER_BYTES else "")
