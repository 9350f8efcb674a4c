"""Functions of arrays, and || of them, as PostgreSQL 14 and later resolve and evaluate them.

Arrays and elements take one common type, as in a list. An array of another type is cast element by element.

    NULL, 2          array_append, array_prepend, array_cat and || treat a NULL array as an empty one
    [2:3]={1,2}      lower bounds are part of the value: appending preserves them, positions count from them
    {{1,2},{3,4}}    some functions reject several dimensions, separately for each row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tidemill.base.pgtypes.arrays import ARRAY_CHARS, DIMENSIONS_MAX, BoundedArray
from tidemill.base.pgtypes.text import INTEGERS
from tidemill.shapes.where.collations import decided_collation, with_common_collation
from tidemill.shapes.where.common_type import coerce, find_common_type
from tidemill.shapes.where.expressions import (
    ELEMENT_CHARS,
    TEXT,
    UNKNOWN,
    Expression,
    Row,
    count_built,
    evaluate_all,
    resolve_unknown,
    strict,
)
from tidemill.shapes.where.functions.array_comparison import flatten
from tidemill.shapes.where.types import TEXTS, EvaluationError, Type, Value, WhereError, canonical_form

INT4 = Type("int4")
_INT4 = range(-(1 << 31), 1 << 31)
MAX_ELEMENTS = ARRAY_CHARS
"""Largest result of a function: as many elements as an array that is parsed may have characters."""

Array = list[Value]


def compile_call(name: str, operands: Sequence[Expression], location: str) -> Expression:
    """Compile one of FUNCTIONS. Raises WhereError."""
    kinds = ", ".join(str(operand.type) for operand in operands)
    refused = WhereError(f"{location}function {name}({kinds}) does not exist", fix="Cast.")
    if name == "string_to_array":
        return _string_to_array(operands, refused)
    signature = next((each for each in _SIGNATURES[name] if len(each) == len(operands)), None)
    if signature is None:
        raise refused
    fixed = [_FIXED.get(kind) for kind in signature]
    operands = [
        resolve_unknown(each, type_, location) if type_ else each for each, type_ in zip(operands, fixed, strict=True)
    ]
    shared = [place for place, kind in enumerate(signature) if kind in _POLYMORPHIC]
    if all(operands[place].type == UNKNOWN for place in shared):
        raise WhereError(f"{location}function {name}: the type of the array is unknown.", fix="Cast it.")
    if any(operands[place].type.most_bytes for place in shared):
        raise WhereError(f'{location}function {name} on name or "char" is not supported in a where clause.')
    for operand, kind in zip(operands, signature, strict=True):
        if not _accepts(kind, operand.type):
            raise refused
    elements = [_as_element(operands[place]) for place in shared]
    element = find_common_type(elements)
    if element is None or any(not _same_labels(operands[place].type, element) for place in shared):
        raise refused
    if name in _COMPARING:
        decided_collation(*elements, location=location)
    operands = [
        _convert_operand(operand, kind, element, location)
        if kind in _POLYMORPHIC
        else coerce(operand, TEXT, location)
        if kind == "text"
        else operand
        for operand, kind in zip(operands, signature, strict=True)
    ]
    result, function = _FUNCTIONS[name](element, operands, refused)
    values = evaluate_all(operands)

    def evaluate(row: Row) -> Value:
        return function(*values(row))

    constant = all(operand.constant for operand in operands)
    return Expression(result, evaluate, constant=constant, collated=any(operand.collated for operand in operands))


def compile_concatenation(left: Expression, right: Expression, location: str) -> Expression:
    """Compile `left || right`, where one side is an array. An unknown literal is read as an array too."""
    if UNKNOWN in (left.type, right.type) or (left.type.array and right.type.array):
        return compile_call("array_cat", (left, right), location)
    return compile_call("array_append" if left.type.array else "array_prepend", (left, right), location)


_FIXED = {"int": INT4, "text": TEXT}
_POLYMORPHIC = ("array", "element")


def _accepts(kind: str, type_: Type) -> bool:
    if type_ == UNKNOWN:
        return True
    if kind == "array":
        return type_.array
    if type_.array:
        return False
    return {"int": type_.name in ("int2", "int4"), "text": type_.name in ("text", "bpchar")}.get(kind, True)


def _same_labels(type_: Type, element: Type) -> bool:
    return type_ == UNKNOWN or element.name != "enum" or type_.labels == element.labels


def _as_element(operand: Expression) -> Expression:
    if operand.type == UNKNOWN:
        return operand
    return Expression(
        operand.type.element, operand.evaluate, constant=operand.constant, collated=operand.collated
    )  # fmt: skip


def _convert_operand(operand: Expression, kind: str, element: Type, location: str) -> Expression:
    if kind == "element":
        return coerce(operand, element, location)
    type_ = element.with_name(element.name, array=True)
    if operand.type == UNKNOWN or operand.type.name == element.name:
        return resolve_unknown(operand, type_, location)
    lift = coerce(Expression(operand.type.element, lambda item: item), element, location).evaluate
    return Expression(
        type_, strict(partial(_map_elements, lift), operand), constant=operand.constant, collated=operand.collated
    )


def _map_elements(function: Callable[[Value], Value], items: Array) -> Array:
    found = [_map_elements(function, item) if isinstance(item, list) else function(item) for item in items]
    return _with_bounds(found, _lower_bounds(items)) if isinstance(items, BoundedArray) else found


def _dimensions(array: Array) -> tuple[int, ...]:
    """Return the sizes of the dimensions; () for an empty array."""
    found: list[int] = []
    inner: Value = array
    while isinstance(inner, list):
        if not inner:
            return ()
        found.append(len(inner))
        inner = inner[0]
    return tuple(found)


def _lower_bounds(array: Array) -> tuple[int, ...]:
    return array.lower if isinstance(array, BoundedArray) else (1,) * len(_dimensions(array))


def _with_bounds(items: Array, lower: tuple[int, ...]) -> Array:
    """Return the items with lower bounds. Raises EvaluationError if a subscript would exceed int4, or the array is too
    large."""
    _check_size(len(items))
    if not items or all(bound == 1 for bound in lower):
        return items
    if lower[0] + len(items) not in _INT4:
        raise EvaluationError("array size exceeds the maximum allowed")
    found = BoundedArray(items)
    found.lower = lower
    return found


def _check_size(count: int) -> None:
    if count > MAX_ELEMENTS:
        raise EvaluationError(f"an array of more than {MAX_ELEMENTS} elements is not supported")


def _require_one_dimension(array: Array, doing: str) -> Array:
    if len(_dimensions(array)) > 1:
        raise EvaluationError(f"{doing} multidimensional arrays is not supported")
    return array


def _length(array: Array, dimension: int) -> int | None:
    sizes = _dimensions(array)
    return sizes[dimension - 1] if 1 <= dimension <= len(sizes) else None


def _bound(array: Array, dimension: int, *, upper: bool) -> int | None:
    size = _length(array, dimension)
    if size is None:
        return None
    lower = _lower_bounds(array)[dimension - 1]
    return lower + size - 1 if upper else lower


def _dims(array: Array) -> str | None:
    bounds = zip(_lower_bounds(array), _dimensions(array), strict=True)
    return "".join(f"[{lower}:{lower + size - 1}]" for lower, size in bounds) or None


def _append(array: Array | None, item: Value) -> Array:
    known = _require_one_dimension(array or [], "appending to")
    return _with_bounds([*known, item], _lower_bounds(known) or (1,))


def _prepend(item: Value, array: Array | None) -> Array:
    known = _require_one_dimension(array or [], "prepending to")
    return _with_bounds([item, *known], _lower_bounds(known) or (1,))


def _concatenate(left: Array | None, right: Array | None) -> Array | None:
    if left is None or right is None:
        return right if left is None else left
    a, b = _dimensions(left), _dimensions(right)
    if not a or not b:
        return right if not a else left
    if len(a) == len(b):
        fits, found, lower = a[1:] == b[1:], [*left, *right], _lower_bounds(left)
        inner = (_lower_bounds(left)[1:], _lower_bounds(right)[1:])
    elif len(a) + 1 == len(b):
        fits, found, lower = a == b[1:], [_without_bounds(left), *right], _lower_bounds(right)
        inner = (_lower_bounds(left), _lower_bounds(right)[1:])
    elif len(a) == len(b) + 1:
        fits, found, lower = a[1:] == b, [*left, _without_bounds(right)], _lower_bounds(left)
        inner = (_lower_bounds(left)[1:], _lower_bounds(right))
    else:
        fits, found, lower, inner = False, [], (), ((), ())
    if not fits or inner[0] != inner[1]:
        raise EvaluationError("cannot concatenate incompatible arrays")
    if len(flatten(found)) > MAX_ELEMENTS or len(_dimensions(found)) > DIMENSIONS_MAX:
        raise EvaluationError(f"an array of more than {MAX_ELEMENTS} elements is not supported")
    return _with_bounds(found, lower)


def _without_bounds(array: Array) -> Array:
    return list(array)


def _trim(array: Array, count: int) -> Array:
    if not 0 <= count <= len(array):
        raise EvaluationError("number of elements to trim must be between 0 and the array's length")
    return list(array[: len(array) - count])


Same = Callable[[Value, Value], bool]


def _not_distinct(element: Type) -> Same:
    """Return the function for IS NOT DISTINCT FROM of two elements."""
    form = canonical_form(element.name)

    def same(a: Value, b: Value) -> bool:
        if a is None or b is None or form is None:
            return bool(a == b)
        return bool(form(a) == form(b))

    return same


_NOT_GIVEN = object()


def _position(same: Same, array: Array | None, wanted: Value, start: Value = _NOT_GIVEN) -> Value:
    if array is None:
        return None
    if start is None:
        raise EvaluationError("initial position must not be null")
    known = _require_one_dimension(array, "searching for elements in")
    for place, item in enumerate(known, _lower_bounds(known)[0] if known else 1):
        if (start is _NOT_GIVEN or place >= start) and same(item, wanted):
            return place
    return None


def _positions(same: Same, array: Array | None, wanted: Value) -> Value:
    if array is None:
        return None
    known = _require_one_dimension(array, "searching for elements in")
    return [place for place, item in enumerate(known, _lower_bounds(known)[0] if known else 1) if same(item, wanted)]


def _remove(same: Same, array: Array | None, unwanted: Value) -> Value:
    if array is None:
        return None
    known = _require_one_dimension(array, "removing elements from")
    return _with_bounds([item for item in known if not same(item, unwanted)], _lower_bounds(known))


def _replace(same: Same, array: Array | None, old: Value, new: Value) -> Value:
    return None if array is None else _map_elements(lambda item: new if same(item, old) else item, array)


def _to_string(write: Callable[[Value], str], array: Array | None, between: str | None, *null: str | None) -> Value:
    if array is None or between is None:
        return None
    for_null = null[0] if null else None
    found = (for_null if item is None else write(item) for item in flatten(array))
    texts = [text for text in found if text is not None]
    count_built(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def _writer(element: Type) -> Callable[[Value], str] | None:
    if element.name in TEXTS or element.name in INTEGERS or element.name == "uuid":
        return str
    return (lambda value: "t" if value else "f") if element.name == "bool" else None


CompiledFunction = tuple[Type, Callable[..., Value]]
FunctionMaker = Callable[[Type, Sequence[Expression], WhereError], CompiledFunction]


def _none_if_null(function: Callable[..., Value]) -> Callable[..., Value]:
    def call(*values: Value) -> Value:
        return None if None in values else function(*values)

    return call


def _returning_value(function: Callable[..., Value], result: Type = INT4) -> FunctionMaker:
    return lambda element, operands, refused: (result, _none_if_null(function))


def _returning_array(function: Callable[..., Value]) -> FunctionMaker:
    return lambda element, operands, refused: (element.with_name(element.name, array=True), function)


def _comparing_elements(function: Callable[..., Value], result: Type | None = None) -> FunctionMaker:
    """Return the maker of a function that compares elements; `result` None: the result is an array of the same type."""

    def make(element: Type, operands: Sequence[Expression], refused: WhereError) -> CompiledFunction:
        return result or element.with_name(element.name, array=True), partial(function, _not_distinct(element))

    return make


def _make_to_string(element: Type, operands: Sequence[Expression], refused: WhereError) -> CompiledFunction:
    write = _writer(element)
    if write is None:  # the text of other types is specific to PostgreSQL
        raise WhereError(f"{refused.args[0].partition('function')[0]}array_to_string on {element} is not supported.")
    texts = [_as_element(operand) for operand in operands if operand.type.name in ("text", "bpchar")]
    return with_common_collation(TEXT, *texts), partial(_to_string, write)


_FUNCTIONS: dict[str, FunctionMaker] = {
    "array_length": _returning_value(_length),
    "array_lower": _returning_value(partial(_bound, upper=False)),
    "array_upper": _returning_value(partial(_bound, upper=True)),
    "array_ndims": _returning_value(lambda array: len(_dimensions(array)) or None),
    "array_dims": _returning_value(_dims, Type("text", ordered=False)),
    "cardinality": _returning_value(lambda array: len(flatten(array))),
    "array_append": _returning_array(_append),
    "array_prepend": _returning_array(_prepend),
    "array_cat": _returning_array(_concatenate),
    "trim_array": _returning_array(_none_if_null(_trim)),
    "array_position": _comparing_elements(_position, INT4),
    "array_positions": _comparing_elements(_positions, Type("int4", array=True)),
    "array_remove": _comparing_elements(_remove),
    "array_replace": _comparing_elements(_replace),
    "array_to_string": _make_to_string,
}
_COMPARING = ("array_position", "array_positions", "array_remove", "array_replace")
_SIGNATURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "array_length": (("array", "int"),),
    "array_lower": (("array", "int"),),
    "array_upper": (("array", "int"),),
    "array_ndims": (("array",),),
    "array_dims": (("array",),),
    "cardinality": (("array",),),
    "array_append": (("array", "element"),),
    "array_prepend": (("element", "array"),),
    "array_cat": (("array", "array"),),
    "trim_array": (("array", "int"),),
    "array_position": (("array", "element"), ("array", "element", "int")),
    "array_positions": (("array", "element"),),
    "array_remove": (("array", "element"),),
    "array_replace": (("array", "element", "element"),),
    "array_to_string": (("array", "text"), ("array", "text", "text")),
}
FUNCTIONS = (*_FUNCTIONS, "string_to_array")


def _string_to_array(operands: Sequence[Expression], refused: WhereError) -> Expression:
    operands = [resolve_unknown(operand, TEXT) for operand in operands]
    textual = all(operand.type.name in ("text", "bpchar") and not operand.type.array for operand in operands)
    if not 2 <= len(operands) <= 3 or not textual:
        raise refused
    decided_collation(*operands)
    result = with_common_collation(Type("text", True), *operands)
    values = evaluate_all([coerce(operand, TEXT, "") for operand in operands])

    def evaluate(row: Row) -> Value:
        text, between, *null = values(row)
        if not text:
            return None if text is None else []
        count = len(text) if between is None else text.count(between) + 1 if between else 1
        _check_size(count)
        count_built(len(text) + ELEMENT_CHARS * count)
        parts = list(text) if between is None else [text] if not between else text.split(between)
        found = [None if null and part == null[0] else part for part in parts]
        return _with_bounds(found, (1,))

    return Expression(
        result, evaluate, constant=all(operand.constant for operand in operands),
        collated=any(operand.collated for operand in operands),
    )  # fmt: skip
