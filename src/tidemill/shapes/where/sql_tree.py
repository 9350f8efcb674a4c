"""Parses clauses with PostgreSQL's own parser, and prints checked trees as SQL.

Parsing: one clause of a SELECT. Locations in messages are counted as PostgreSQL does, from the start of the statement
that contains the clause.

Printing: every operand in parentheses, every operator, function and type with its schema. libpg_query's own printer is
not used, as it omits parentheses that matter (`(a IS NULL) = b`). Only trees that `compiler` accepted are printed, so a
node of another kind is a defect.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from tidemill.base.pgtypes.text import InvalidTextError
from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.shapes.where.expressions import start_building
from tidemill.shapes.where.types import WhereError

T = TypeVar("T")

MAX_WHERE_BYTES = 64 << 10


def compile_guarded(compiling: Callable[[], T]) -> T:
    """Call `compiling`; raise any exception of it as WhereError (invariant of compiler.py: one error type)."""
    start_building()
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


_BOOLEAN_TESTS = {
    1: "IS TRUE",
    2: "IS NOT TRUE",
    3: "IS FALSE",
    4: "IS NOT FALSE",
    5: "IS UNKNOWN",
    6: "IS NOT UNKNOWN",
}


@cache
def _enums() -> Any:
    """Return the module with the enumerations of the tree; loaded with the parser."""
    return importlib.import_module("postgast.pg_query_pb2")


def print_sql(node: Any) -> str:
    """Print a node. Raises NotImplementedError for nodes that `compiler` should have rejected."""
    kind = node.WhichOneof("node")
    printer = _PRINTERS.get(kind)
    if printer is None:
        raise NotImplementedError(f"cannot print {kind}")
    return printer(getattr(node, kind))


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Quote a literal so that it is correct under both settings of standard_conforming_strings."""
    quoted = "'" + text.replace("'", "''") + "'"
    return " E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted


def _column(node: Any) -> str:
    return ".".join(identifier(field.string.sval) for field in node.fields)


def _constant(node: Any) -> str:
    kind = node.WhichOneof("val")
    if node.isnull or kind is None:
        return "NULL"
    if kind == "ival":
        return f"({node.ival.ival})"
    if kind == "boolval":
        return "true" if node.boolval.boolval else "false"
    if kind == "sval":
        return literal(node.sval.sval)
    if kind == "fval":
        return f"({node.fval.fval})"
    raise NotImplementedError(f"cannot print a constant of kind {kind}")


def _cast(node: Any) -> str:
    name = identifier(node.type_name.names[-1].string.sval)
    return f"CAST({print_sql(node.arg)} AS pg_catalog.{name}{'[]' * len(node.type_name.array_bounds)})"


def _collate(node: Any) -> str:
    return f"({print_sql(node.arg)} COLLATE pg_catalog.{identifier(node.collname[-1].string.sval)})"


def _bool(node: Any) -> str:
    pb = _enums()

    parts = [print_sql(argument) for argument in node.args]
    if node.boolop == pb.NOT_EXPR:
        return f"(NOT {parts[0]})"
    return "(" + (" AND " if node.boolop == pb.AND_EXPR else " OR ").join(parts) + ")"


def _is_untyped_param(node: Any) -> bool:
    """Return whether the node is a parameter whose type follows only from its context."""
    while node.WhichOneof("node") == "collate_clause":
        node = node.collate_clause.arg
    return bool(node.WhichOneof("node") == "param_ref")


def _print_typed(node: Any) -> str:
    """Print a node with a type if its context gives none: PostgreSQL rejects a parameter without a type."""
    return f'CAST({print_sql(node)} AS pg_catalog."text")' if _is_untyped_param(node) else print_sql(node)


def _null_test(node: Any) -> str:
    pb = _enums()

    return f"({_print_typed(node.arg)} IS {'' if node.nulltesttype == pb.IS_NULL else 'NOT '}NULL)"


def _boolean_test(node: Any) -> str:
    return f"({print_sql(node.arg)} {_BOOLEAN_TESTS[node.booltesttype]})"


def _print_list(nodes: Any) -> str:
    return ", ".join(print_sql(each) for each in nodes)


def _function(node: Any) -> str:
    return f"pg_catalog.{identifier(node.funcname[-1].string.sval)}({_print_list(node.args)})"


def _case(node: Any) -> str:
    asked = f" {print_sql(node.arg)}" if node.HasField("arg") else ""
    whens = [f" WHEN {print_sql(each.case_when.expr)} THEN {print_sql(each.case_when.result)}" for each in node.args]
    default = f" ELSE {print_sql(node.defresult)}" if node.HasField("defresult") else ""
    return f"(CASE{asked}{''.join(whens)}{default} END)"


def _extreme(node: Any) -> str:
    return f"{'GREATEST' if node.op == _enums().IS_GREATEST else 'LEAST'}({_print_list(node.args)})"


def _operation(node: Any) -> str:
    pb = _enums()

    kind, name = node.kind, node.name[-1].string.sval if node.name else ""
    right = "" if node.rexpr.WhichOneof("node") == "list" else print_sql(node.rexpr)
    if not node.HasField("lexpr"):
        return f"(OPERATOR(pg_catalog.{name}) {right})"
    left = print_sql(node.lexpr)
    if kind == pb.AEXPR_IN:
        return f"({left} {'' if name == '=' else 'NOT '}IN ({_print_list(node.rexpr.list.items)}))"
    if kind in _between():
        low, high = node.rexpr.list.items
        return f"({left} {_between()[kind]} {print_sql(low)} AND {print_sql(high)})"
    if kind in (pb.AEXPR_DISTINCT, pb.AEXPR_NOT_DISTINCT):
        if "NULL" in (left, right):  # PostgreSQL treats this as a test for NULL
            left, right = _print_typed(node.lexpr), _print_typed(node.rexpr)
        return f"({left} IS {'' if kind == pb.AEXPR_DISTINCT else 'NOT '}DISTINCT FROM {right})"
    if kind == pb.AEXPR_NULLIF:
        return f"NULLIF({left}, {right})"
    if kind in (pb.AEXPR_OP_ANY, pb.AEXPR_OP_ALL):
        return f"({left} OPERATOR(pg_catalog.{name}) {'ANY' if kind == pb.AEXPR_OP_ANY else 'ALL'} ({right}))"
    return f"({left} OPERATOR(pg_catalog.{name}) {right})"


def _between() -> dict[int, str]:
    pb = _enums()

    return {
        pb.AEXPR_BETWEEN: "BETWEEN",
        pb.AEXPR_NOT_BETWEEN: "NOT BETWEEN",
        pb.AEXPR_BETWEEN_SYM: "BETWEEN SYMMETRIC",
        pb.AEXPR_NOT_BETWEEN_SYM: "NOT BETWEEN SYMMETRIC",
    }


_PRINTERS = {
    "column_ref": _column,
    "a_const": _constant,
    "param_ref": lambda node: f"${node.number}",
    "type_cast": _cast,
    "collate_clause": _collate,
    "bool_expr": _bool,
    "null_test": _null_test,
    "boolean_test": _boolean_test,
    "coalesce_expr": lambda node: f"COALESCE({_print_list(node.args)})",
    "min_max_expr": _extreme,
    "case_expr": _case,
    "func_call": _function,
    "a_array_expr": lambda node: f"ARRAY[{_print_list(node.elements)}]",
    "a_expr": _operation,
}
