"""Compiles the text of a where clause to a function of a row.

`SELECT 1 WHERE <text>` is parsed by PostgreSQL's own parser. Every node must be one of those handled below; any other
node is rejected with its name and location. Locations are counted as PostgreSQL does, from the start of that statement,
so `1 x 1` fails "At location 17".

- Invariant (printed, not passed on): SQL for the database is printed from the tree that was checked here, node by node.
  Operators, functions, types and collations are looked up in tables, never copied from the text, and refer to
  PostgreSQL's own only.
- Invariant (one error type): any exception from evaluating a clause is raised as EvaluationError, any exception from
  compiling one as WhereError. No other exception leaves this package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from tidemill.base.pgtypes.text import INTEGER_DIGITS, INTEGERS, read_numeric
from tidemill.shapes.where import casts, encodings, operators
from tidemill.shapes.where.clause import WHERE_PREFIX, Where
from tidemill.shapes.where.collations import with_common_collation, without_strength
from tidemill.shapes.where.common_type import convert_to_common_type
from tidemill.shapes.where.expressions import (
    BOOL,
    TEXT,
    Evaluate,
    Expression,
    column,
    column_text,
    constant,
    evaluate_all,
    narrowest_equality,
    resolve_unknown,
    strict,
    union_equality,
    unknown_literal,
)
from tidemill.shapes.where.functions import (
    arithmetic,
    array_comparison,
    array_functions,
    conditionals,
    datetimes,
    numeric_functions,
    strings,
)
from tidemill.shapes.where.sql_tree import compile_guarded, parse_clause, print_sql
from tidemill.shapes.where.types import (
    CHAR_BYTES,
    TRUNCATED_BYTES,
    Type,
    WhereError,
)

MAX_DEPTH = 200
MAX_NODES = 10_000
"""Compiling that many takes 0.1 s (off the event loop), evaluating them on one row a few milliseconds."""
MAX_VALUES_CHARS = 256 << 10
"""Limit of the total length of parameter values, counted once per use."""


def compile_where(
    text: str,
    params: Sequence[str],
    columns: Mapping[str, Type],
    *,
    table: str = "",
    schema: str = "",
    first_param: int = 1,
) -> Where:
    """Compile a where clause over `columns` (name → type). Raises WhereError with the exact reason.

    `first_param`: the number of the first parameter in `sql`, for a clause that is printed after others with
    parameters.
    """
    return compile_guarded(lambda: _compile(text, params, columns, schema, table, first_param))


def _compile(
    text: str, params: Sequence[str], columns: Mapping[str, Type], schema: str, table: str, first_param: int
) -> Where:
    select = parse_clause(WHERE_PREFIX, text, "where clause", "where_clause")
    compiler = TreeCompiler(params, columns, schema, table)
    expression = resolve_unknown(compiler.visit(select.where_clause, 0), BOOL)
    if expression.type != BOOL:
        raise WhereError(f"argument of WHERE must be type boolean, not type {expression.type}")
    used = compiler.used_params
    if used != set(range(1, len(used) + 1)):
        raise WhereError("parameters must be numbered sequentially from $1.")
    sent: list[str] = []
    for node in compiler.param_nodes.values():
        sent.append(params[node.number - 1])
        node.number = first_param - 1 + len(sent)
    return Where(
        print_sql(select.where_clause),
        tuple(sent),
        frozenset(compiler.used_columns),
        compiler.for_rows(expression),
        given=tuple(params[: len(used)]),
        may_fail=compiler.may_fail,
    )


def _string_values(nodes: Any) -> list[str]:
    return [node.string.sval for node in nodes]


SCHEMA_SPELLINGS = {"shard": "tidemill"}
"""A further name of a schema that clauses may use: `tidemill.orders` is the shard `orders`."""


def table_qualifiers(schema: str, table: str) -> list[list[str]]:
    """Return everything that may precede a column of the table."""
    return [[], [table], [schema, table], [SCHEMA_SPELLINGS.get(schema, schema), table]]


class TreeCompiler:
    """Compiles a tree in one pass, leaves first; records which columns and parameters were used."""

    def __init__(self, params: Sequence[str], columns: Mapping[str, Type], schema: str, table: str) -> None:
        self._params = params
        self._encoding = encodings.encoding_of(columns)
        self._columns = {name: encodings.type_in_encoding(type_, self._encoding) for name, type_ in columns.items()}
        self._schema = schema
        self._table = table
        self.used_params: set[int] = set()
        self.used_columns: set[str] = set()
        self.param_nodes: dict[int, Any] = {}
        """Parameter nodes by their location in the text: each is one node, however often it is visited."""
        self.may_fail = False
        self._nodes = 0
        self._references = 0
        """Number of column references visited so far."""
        self._values_chars = 0

    def visit(self, node: Any, depth: int) -> Expression:
        kind = node.WhichOneof("node")
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise WhereError(f"where clause is too long: limit_nodes={MAX_NODES}.")
        if depth > MAX_DEPTH:
            raise WhereError(f"where clause is nested too deeply: limit={MAX_DEPTH}.")
        method = getattr(self, f"_visit_{kind}", None)
        if method is None:
            raise WhereError(
                f"{_location(getattr(node, kind or '', None))}{kind or 'empty'} is not supported in a where clause."
            )
        expression: Expression = method(getattr(node, kind), depth + 1)
        return expression

    def for_rows(self, expression: Expression) -> Expression:
        """Return a whole expression of this tree for rows as they arrive."""
        return encodings.expression_in_encoding(expression, self._encoding, frozenset(self.used_columns))

    def _literal(self, text: str) -> Expression:
        return unknown_literal(encodings.as_bytes(text) if self._encoding == encodings.SQL_ASCII else text)

    def _visit_column_ref(self, node: Any, depth: int) -> Expression:
        return column(*self._referenced_column(node))

    def _operand_of_any_type(self, node: Any, depth: int) -> Expression:
        """Compile the operand of IS NULL or of a cast, which may be a column whose type has text only."""
        if node.WhichOneof("node") != "column_ref":
            return self.visit(node, depth)
        return column_text(*self._referenced_column(node.column_ref))

    def _referenced_column(self, node: Any) -> tuple[str, Type]:
        if any(field.WhichOneof("node") != "string" for field in node.fields):
            raise WhereError(f"{_location(node)}* is not supported in a where clause.")
        names = _string_values(node.fields)
        qualifier = names[:-1]
        if qualifier not in table_qualifiers(self._schema, self._table):
            raise WhereError(f'{_location(node)}missing FROM-clause entry for table "{".".join(qualifier)}"')
        name = names[-1]
        if name not in self._columns:
            raise WhereError(f'{_location(node)}unknown reference {name}: column "{name}" does not exist')
        del node.fields[:-1]  # printed without its table: the clause is also evaluated on single rows
        self.used_columns.add(name)
        self._references += 1
        return name, self._columns[name].base_type

    def _visit_a_const(self, node: Any, depth: int) -> Expression:
        kind = node.WhichOneof("val")
        if node.isnull or kind is None:
            return unknown_literal(None)
        if kind == "ival":
            return constant(Type("int4"), node.ival.ival)
        if kind == "boolval":
            return constant(BOOL, node.boolval.boolval)
        if kind == "sval":
            return self._literal(node.sval.sval)
        if kind == "fval":
            text = node.fval.fval
            if text.lstrip("+-").isdigit() and len(text) <= INTEGER_DIGITS:
                whole = int(text)
                for kind in ("int4", "int8"):  # -2147483648 is the only int4 that arrives as fval
                    if -INTEGERS[kind] <= whole < INTEGERS[kind]:
                        return constant(Type(kind), whole)
            if not text.lower().startswith(("0x", "0o", "0b")):
                return constant(Type("numeric"), read_numeric(text.replace("_", "")))
        raise WhereError(f"{_location(node)}this kind of constant is not supported in a where clause: {kind}")

    def _visit_param_ref(self, node: Any, depth: int) -> Expression:
        number = node.number
        if not 1 <= number <= len(self._params):
            raise WhereError(f"{_location(node)}parameter ${number} was not provided.", fix=f"Send params[{number}].")
        self.used_params.add(number)
        # Each use is read and stored separately: a long value that is used often would exceed the text of the clause by
        # far.
        self._values_chars += len(self._params[number - 1])
        if self._values_chars > MAX_VALUES_CHARS:
            raise WhereError(
                f"{_location(node)}parameters are too long, counted once per use: limit={MAX_VALUES_CHARS}."
            )
        self.param_nodes[node.location] = node
        return self._literal(self._params[number - 1])

    def _visit_type_cast(self, node: Any, depth: int) -> Expression:
        target = _cast_type(node.type_name)
        self.may_fail = self.may_fail or node.arg.WhichOneof("node") not in ("a_const", "param_ref")
        if target.array and node.arg.WhichOneof("node") == "a_array_expr":  # the elements are cast one by one
            elements = [self.visit(each, depth + 1) for each in node.arg.a_array_expr.elements]
            items = [casts.compile_cast(each, target.element, _location(node)) for each in elements]
            return _array_expression(target.base_type.element, items)
        return casts.compile_cast(self._operand_of_any_type(node.arg, depth), target, _location(node))

    def _visit_collate_clause(self, node: Any, depth: int) -> Expression:
        *qualifier, name = _string_values(node.collname)
        if name not in ("C", "POSIX") or qualifier not in _PG_QUALIFIERS:
            raise WhereError(f'{_location(node)}collation "{name}" is not supported.', fix='Use COLLATE "C".')
        operand = resolve_unknown(self.visit(node.arg, depth), TEXT)
        if operand.type.array or operand.type.name not in ("text", "bpchar"):
            raise WhereError(f"{_location(node)}collations are not supported by type {operand.type}")
        if operand.type.most_bytes == CHAR_BYTES:
            raise WhereError(f'{_location(node)}collations are not supported by type "char"')
        ordered = self._encoding in encodings.CODE_POINT_ORDERED
        type_ = msgspec.structs.replace(operand.type, ordered=ordered, folding="ascii", collation=f'"{name}"')
        return Expression(type_, operand.evaluate, constant=operand.constant, collated=True)

    def _visit_bool_expr(self, node: Any, depth: int) -> Expression:
        arguments = [self._require_boolean(self.visit(argument, depth), _location(node)) for argument in node.args]
        tests = [argument.evaluate for argument in arguments]
        if node.boolop == _enum_value("AND_EXPR"):
            return Expression(BOOL, operators.all_true(tests), equality=narrowest_equality(arguments))
        if node.boolop == _enum_value("OR_EXPR"):
            return Expression(BOOL, operators.any_true(tests), equality=union_equality(arguments))
        return Expression(BOOL, strict(lambda value: not value, arguments[0]))

    def _require_boolean(self, expression: Expression, location: str) -> Expression:
        expression = resolve_unknown(expression, BOOL, location)
        if expression.type != BOOL:
            raise WhereError(f"{location}argument must be type boolean, not type {expression.type}")
        return expression

    def _visit_null_test(self, node: Any, depth: int) -> Expression:
        inner = self._operand_of_any_type(node.arg, depth).evaluate
        if node.nulltesttype == _enum_value("IS_NULL"):
            return Expression(BOOL, lambda row: inner(row) is None)
        return Expression(BOOL, lambda row: inner(row) is not None)

    def _visit_boolean_test(self, node: Any, depth: int) -> Expression:
        inner = self._require_boolean(self.visit(node.arg, depth), _location(node)).evaluate
        wanted, positive = _BOOLEAN_TESTS[node.booltesttype]
        return Expression(BOOL, lambda row: (inner(row) is wanted) is positive)

    def _visit_common_typed(self, nodes: Any, depth: int) -> list[Expression]:
        """Compile expressions that take one common type; converting a value to it may fail."""
        parts = [self.visit(node, depth) for node in nodes]
        self.may_fail = self.may_fail or len({part.type.name for part in parts}) > 1
        return parts

    def _visit_coalesce_expr(self, node: Any, depth: int) -> Expression:
        return conditionals.compile_coalesce(self._visit_common_typed(node.args, depth), _location(node))

    def _visit_min_max_expr(self, node: Any, depth: int) -> Expression:
        self.may_fail = True  # enum labels may have changed
        return conditionals.compile_extreme(
            node.op == _enum_value("IS_GREATEST"), self._visit_common_typed(node.args, depth), _location(node)
        )

    def _visit_case_expr(self, node: Any, depth: int) -> Expression:
        location = _location(node)
        asked = None
        if node.HasField("arg"):
            asked = without_strength(resolve_unknown(self.visit(node.arg, depth), TEXT, location))
        conditions: list[Evaluate] = []
        for when in node.args:
            found = self.visit(when.case_when.expr, depth)
            if asked is None:
                conditions.append(self._require_boolean(found, location).evaluate)
            else:
                self._note_comparison(asked, found)
                conditions.append(operators.compile_comparison("=", asked, found, location).evaluate)
        default = self.visit(node.defresult, depth) if node.HasField("defresult") else unknown_literal(None)
        results = [self.visit(when.case_when.result, depth) for when in node.args]
        self.may_fail = self.may_fail or len({part.type.name for part in (default, *results)}) > 1
        return conditionals.compile_case(conditions, results, default, location)

    def _visit_func_call(self, node: Any, depth: int) -> Expression:
        names = _string_values(node.funcname)
        name = names[-1]
        special = (node.agg_star, node.agg_distinct, node.func_variadic, node.agg_order, node.agg_within_group)
        plain = not any(special) and not node.HasField("over") and not node.HasField("agg_filter")
        function = _FUNCTIONS.get(name)
        if names[:-1] not in _PG_QUALIFIERS or not plain or function is None:
            raise WhereError(f"{_location(node)}function {'.'.join(names)} is not supported in a where clause.")
        if name == "concat" and any(each.WhichOneof("node") == "param_ref" for each in node.args):
            raise WhereError(f"{_location(node)}a parameter of concat has no type.", fix="Cast it to text.")
        self.may_fail = True  # not examined for each function: some results may be too long
        operands = [self.visit(each, depth) for each in node.args]
        encodings.check_case_conversion(name, operands, self._encoding, _location(node))
        return function(name, operands, _location(node))

    def _visit_a_array_expr(self, node: Any, depth: int) -> Expression:
        type_, items = convert_to_common_type(self._visit_common_typed(node.elements, depth), "ARRAY", _location(node))
        if type_.array:
            raise WhereError(f"{_location(node)}arrays of arrays are not supported in a where clause.")
        return _array_expression(type_, items)

    def _visit_a_expr(self, node: Any, depth: int) -> Expression:
        location = _location(node)
        name = _operator_name(node, location)
        kind = node.kind
        if kind in (_enum_value("AEXPR_IN"), *_between_kinds()):
            return self._compile_list(node, name, location, depth)
        right = self.visit(node.rexpr, depth)
        if not node.HasField("lexpr"):
            if kind == _enum_value("AEXPR_OP") and name in "+-":
                self.may_fail = self.may_fail or not right.constant
                return arithmetic.compile_negation(right, location) if name == "-" else right
            if kind == _enum_value("AEXPR_OP") and name == "~":
                return numeric_functions.compile_bit_not(right, location)
            if kind == _enum_value("AEXPR_OP") and name in numeric_functions.PREFIXES:
                self.may_fail = True
                return numeric_functions.compile_call(numeric_functions.PREFIXES[name], [right], location)
            raise WhereError(f"{location}operator {name} is not supported in a where clause.")
        left = self.visit(node.lexpr, depth)
        self._note_comparison(left, right)
        if kind == _enum_value("AEXPR_DISTINCT"):
            return operators.compile_distinct(left, right, False, location)
        if kind == _enum_value("AEXPR_NOT_DISTINCT"):
            return operators.compile_distinct(left, right, True, location)
        if kind in (_enum_value("AEXPR_OP_ANY"), _enum_value("AEXPR_OP_ALL")) and name in operators.COMPARISONS:
            return operators.compile_quantified(name, left, right, kind == _enum_value("AEXPR_OP_ALL"), location)
        if kind == _enum_value("AEXPR_NULLIF"):
            return conditionals.compile_nullif(left, right, location)
        if kind in (_enum_value("AEXPR_OP"), _enum_value("AEXPR_LIKE"), _enum_value("AEXPR_ILIKE")):
            return self._compile_binary(name, left, right, location)
        raise WhereError(f"{location}operator {name} in this form is not supported in a where clause.")

    def _compile_binary(self, name: str, left: Expression, right: Expression, location: str) -> Expression:
        if name in operators.COMPARISONS:
            self.may_fail = self.may_fail or "enum" in (left.type.name, right.type.name)  # a label that was added later
            return operators.compile_comparison(name, left, right, location)
        if name in numeric_functions.BIT_OPERATORS:
            return numeric_functions.compile_bit_operator(name, left, right, location)
        if datetimes.is_datetime_operator(name, left, right):
            self.may_fail = True
            return datetimes.compile_arithmetic(name, left, right, location)
        if name in arithmetic.ARITHMETIC_NAMES:
            self.may_fail = True
            return arithmetic.compile_arithmetic(name, left, right, location)
        if name in ("~~", "!~~", "~~*", "!~~*"):
            self.may_fail = self.may_fail or not right.constant or strings.ends_with_escape(right)
            encodings.check_case_conversion(name, (left, right), self._encoding, location)
            return strings.compile_like(name, left, right, location)
        if name in array_comparison.SET_OPERATORS:
            return array_comparison.compile_set_operator(name, left, right, location)
        if name == "||":
            self.may_fail = True  # not examined for each function: some results may be too long
            if left.type.array or right.type.array:
                return array_functions.compile_concatenation(left, right, location)
            return strings.compile_concatenation(left, right, location)
        raise WhereError(f"{location}operator {name} is not supported in a where clause.")

    def _note_comparison(self, left: Expression, right: Expression) -> None:
        """Note that comparing may fail: PostgreSQL casts a numeric compared with a float to float, which may
        overflow."""
        types = {left.type.name, right.type.name}
        self.may_fail = self.may_fail or ("numeric" in types and bool(types & {"float4", "float8"}))

    def _compile_list(self, node: Any, name: str, location: str, depth: int) -> Expression:
        left = self.visit(node.lexpr, depth)
        if node.rexpr.WhichOneof("node") != "list":
            raise WhereError(f"{location}this list is not supported in a where clause.")
        items: list[Expression] = []
        fixed: list[bool] = []
        for item in node.rexpr.list.items:
            before = self._references
            items.append(self.visit(item, depth))
            fixed.append(self._references == before)
            self._note_comparison(left, items[-1])
        if node.kind == _enum_value("AEXPR_IN"):
            result = operators.compile_in(left, items, fixed, location)
            return result if name == "=" else Expression(BOOL, strict(lambda value: not value, result))
        low, high = items
        kinds = _between_kinds()
        ranges = [(low, high), (high, low)] if node.kind in kinds[2:] else [(low, high)]
        tests = [
            operators.all_true(
                [
                    operators.compile_comparison(">=", left, start, location).evaluate,
                    operators.compile_comparison("<=", left, end, location).evaluate,
                ]
            )
            for start, end in ranges
        ]
        inside = Expression(BOOL, operators.any_true(tests))
        negated = node.kind in (kinds[1], kinds[3])
        return Expression(BOOL, strict(lambda value: not value, inside)) if negated else inside


_FUNCTIONS: dict[str, Callable[[str, Sequence[Expression], str], Expression]] = {}
for _room in (strings, numeric_functions, datetimes, array_functions):
    _FUNCTIONS |= dict.fromkeys(_room.FUNCTIONS, _room.compile_call)


def _array_expression(type_: Type, items: Sequence[Expression]) -> Expression:
    tests = [item.evaluate for item in items]
    array = with_common_collation(type_.with_name(type_.name, array=True), *items)
    collated = any(item.collated for item in items)
    if all(item.constant for item in items):
        values = [test({}) for test in tests]
        return Expression(array, lambda row: values, constant=True, collated=collated)
    return Expression(array, evaluate_all(items), collated=collated)


def _location(node: Any) -> str:
    location = getattr(node, "location", None)
    return f"At location {location}: " if isinstance(location, int) and location > 0 else ""


def _operator_name(node: Any, location: str) -> str:
    """Return the operator's name; reject operators of other schemas, which could do anything."""
    names = _string_values(node.name)
    if names and names[:-1] not in _PG_QUALIFIERS:
        raise WhereError(f"{location}operator {'.'.join(names)} is not supported in a where clause.")
    return names[-1] if names else ""


_PG_QUALIFIERS: tuple[list[str], ...] = ([], ["pg_catalog"])
"""Qualifiers of PostgreSQL's own names: the snapshot query runs with only pg_catalog in its search path."""


def _cast_type(node: Any) -> Type:
    names = _string_values(node.names)
    if node.typmods or node.setof or node.pct_type or names[:-1] not in _PG_QUALIFIERS:
        raise WhereError(f"cast to {'.'.join(names)} in this form is not supported in a where clause.")
    if names[-1] in TRUNCATED_BYTES:  # these types truncate longer text
        raise WhereError(f"cast to {names[-1]} is not supported in a where clause.", fix="Cast to text.")
    if len(node.array_bounds) > 1:
        raise WhereError("casts to arrays of several dimensions are not supported in a where clause.")
    return Type(names[-1], bool(node.array_bounds))


@cache
def _enum_value(name: str) -> int:
    value: int = getattr(importlib.import_module("postgast.pg_query_pb2"), name)
    return value


def _between_kinds() -> tuple[int, int, int, int]:
    return (
        _enum_value("AEXPR_BETWEEN"),
        _enum_value("AEXPR_NOT_BETWEEN"),
        _enum_value("AEXPR_BETWEEN_SYM"),
        _enum_value("AEXPR_NOT_BETWEEN_SYM"),
    )


_BOOLEAN_TESTS: dict[int, tuple[bool | None, bool]] = {
    1: (True, True),
    2: (True, False),
    3: (False, True),
    4: (False, False),
    5: (None, True),
    6: (None, False),
}
"""BoolTestType → (value, whether the test wants it): IS TRUE, IS NOT TRUE, IS FALSE, IS NOT FALSE, IS [NOT] UNKNOWN."""
