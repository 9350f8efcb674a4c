"""Parses one clause of a SELECT with PostgreSQL's own parser, and converts all errors of compiling to one type.

Locations in messages are counted as PostgreSQL does, from the start of the statement that contains the clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tidemill.base.pgtypes.text import InvalidTextError
from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.shapes.where.types import WhereError

T = TypeVar("T")

MAX_WHERE_BYTES = 64 << 10


def compile_guarded(compiling: Callable[[], T]) -> T:
    """Call `compiling`; raise any exception of it as WhereError (invariant of compiler.py: one error type)."""
    try:
        return compiling()
    except WhereError:
        raise
    except InvalidTextError as error:  # a constant part fails for every row
        raise WhereError(f"the clause can never be evaluated: {error}.") from error
    except RecursionError as error:
        raise WhereError("where clause is nested too deeply.") from error
    except BaseException as error:
        if not is_fault(error):
            raise
        raise WhereError(f"the clause cannot be compiled: error={error_sentence(error)}.") from error


def parse_clause(prefix: str, text: str, what: str, field: str) -> Any:
    """Return the SELECT that `prefix` and `text` form; it must have only `field` and its target. Raises WhereError."""
    import postgast
    from google.protobuf.message import DecodeError

    if len(text.encode()) > MAX_WHERE_BYTES:
        raise WhereError(f"{what} is too long: limit_bytes={MAX_WHERE_BYTES}.")
    if "\0" in text:
        raise WhereError(f"{what} contains a zero byte.")
    try:
        parsed = postgast.parse(prefix + text)
    except postgast.PgQueryError as error:
        raise WhereError(f"At location {max(error.cursorpos - 1, 0)}: {error.message}") from error
    except DecodeError as error:
        raise WhereError(f"{what} is nested too deeply.") from error
    if len(parsed.stmts) != 1 or parsed.stmts[0].stmt.WhichOneof("node") != "select_stmt":
        raise WhereError(f"a {what} must be one expression.")
    select = parsed.stmts[0].stmt.select_stmt
    set_fields = {found.name for found, _ in select.ListFields()}
    if set_fields - {"target_list", "limit_option", "op"} != {field} or len(select.target_list) != 1:
        raise WhereError(f"a {what} must be one expression, without other clauses.")
    return select
