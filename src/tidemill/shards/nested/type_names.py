"""Type strings of nested columns, taken apart and put together.

    array<T>             values of T in order
    struct<a:T,`b c`:U>  named fields; a name other than a word is in backquotes, where two backquotes are one
    map<K,V>             values by key; K is string, int16, int32 or int64

T, U and V are any types but json, nested ones included. Every value may be null, except a key of a map. The order of a
map's entries means nothing: they are stored in ascending order of their keys, a text byte by byte.

Limits: DEPTH_MAX levels, and FIELDS_MAX types within one column (elements, keys, values and fields).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate

import msgspec

from tidemill.base.errors import InvalidError

DEPTH_MAX = 8
FIELDS_MAX = 500
MAP_KEYS = ("string", "int16", "int32", "int64")

_START = re.compile(r"(array|struct|map)<", re.IGNORECASE)
_TOKEN = re.compile(r"`(?:[^`]|``)*`|\w+|[<>,:()]|\s+")
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BAD_IN_NAME = re.compile(r'["\\\x00-\x1f]')


class ArrayType(msgspec.Struct, frozen=True):
    element: str


class StructType(msgspec.Struct, frozen=True):
    """`fields`: pairs of name and type."""

    fields: tuple[tuple[str, str], ...]


class MapType(msgspec.Struct, frozen=True):
    key: str
    value: str


NestedType = ArrayType | StructType | MapType


def is_nested(type_name: str) -> bool:
    return type_name.endswith(">")


@lru_cache(maxsize=1024)
def nested_type(type_name: str) -> NestedType | None:
    """Return the outermost level of a type string, None for a scalar type. Raises InvalidError if it does not parse."""
    start = _START.match(type_name)
    if start is None:
        return None
    parts = list(_parts(type_name, start.end()))
    if start[1].lower() == "struct":
        return StructType(tuple(_field(type_name, part) for part in parts))
    wanted = 1 if start[1].lower() == "array" else 2
    if len(parts) != wanted:
        raise _unreadable(type_name)
    return ArrayType(parts[0]) if wanted == 1 else MapType(parts[0], parts[1])


def _parts(text: str, at: int) -> Iterator[str]:
    """Yield the texts between the commas of the outermost brackets."""
    begin, depth = at, 1
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            break
        at = token.end()
        mark = token[0]
        depth += (mark in "<(") - (mark in ">)")
        if depth == 0 or (depth == 1 and mark == ","):
            yield text[begin : token.start()].strip()
            begin = at
        if depth == 0:
            if text[at:].strip():
                break
            return
    raise _unreadable(text)


def _field(whole: str, text: str) -> tuple[str, str]:
    found = _TOKEN.match(text)
    if found is None:
        raise _unreadable(whole)
    name, rest = found[0], text[found.end() :].lstrip()
    if not rest.startswith(":"):
        raise _unreadable(whole)
    return name[1:-1].replace("``", "`") if name[0] == "`" else name, rest[1:].strip()


def canonical_nested(type_name: str, scalar: Callable[[str], str]) -> str:
    """Return the canonical spelling of a nested type. `scalar`: returns that of a scalar type.

    Raises InvalidError for a type that tables do not have.
    """
    if _levels(type_name) > DEPTH_MAX:  # counted before anything recurses on them
        raise too_deep_error(type_name)
    left = [FIELDS_MAX]

    def canonical(name: str) -> str:
        left[0] -= 1
        if left[0] < -1:
            raise InvalidError(
                f"type has too many fields: type={_short(type_name)!r} fields_max={FIELDS_MAX}.",
                fix="Declare fewer fields, or the column as json, which keeps the value's text.",
            )
        kind = nested_type(name)
        if kind is None:
            if name == "json":
                raise InvalidError(
                    f"json is not supported inside of a nested type: type={_short(type_name)!r}.",
                    fix="Declare the whole column as json, or the inner value with its own type.",
                )
            return scalar(name)
        if isinstance(kind, ArrayType):
            return array_name(canonical(kind.element))
        if isinstance(kind, MapType):
            key = canonical(kind.key)
            if key not in MAP_KEYS:
                raise InvalidError(
                    f"a map cannot have keys of this type: type={_short(name)!r} key={key}.",
                    fix=f"Use one of {', '.join(MAP_KEYS)}, or array<struct<key: …, value: …>>.",
                )
            return map_name(key, canonical(kind.value))
        _check_fields(name, kind)
        return struct_name([(field, canonical(inner)) for field, inner in kind.fields])

    return canonical(type_name)


def _levels(type_name: str) -> int:
    unquoted = re.sub(r"`(?:[^`]|``)*`", "", type_name)
    return max(accumulate(((mark == "<") - (mark == ">") for mark in unquoted), initial=0))


def too_deep_error(type_name: str, what: str = "type") -> InvalidError:
    return InvalidError(
        f"type is nested too deeply: {what}={_short(type_name)!r} levels_max={DEPTH_MAX}.",
        fix="Declare the inner levels as one column of type json, which keeps the value's text.",
    )


def _check_fields(name: str, kind: StructType) -> None:
    seen: dict[str, str] = {}
    for field, _ in kind.fields:
        other = seen.get(field.casefold())
        if other == field:
            raise InvalidError(f"struct names a field twice: field={field!r}.", fix="Name each field once.")
        if other is not None:
            raise InvalidError(
                f"fields of a struct differ only in case, which Spark and DuckDB ignore: fields={other!r},{field!r}.",
                fix="Rename one of them, or declare the column as json.",
            )
        if not field or _BAD_IN_NAME.search(field):
            raise InvalidError(
                f"a field of a struct cannot have this name: field={field!r} type={_short(name)!r}.",
                fix="Use a name without quotes, backslashes and control characters, or declare the column as json.",
            )
        seen[field.casefold()] = field


def array_name(element: str) -> str:
    return f"array<{element}>"


def map_name(key: str, value: str) -> str:
    return f"map<{key},{value}>"


def struct_name(fields: list[tuple[str, str]]) -> str:
    """Return the type string of a struct. Raises InvalidError without fields: Parquet has no such column."""
    if not fields:
        raise InvalidError("a struct needs at least one field.", fix="Declare its fields.")
    return f"struct<{','.join(f'{_quoted(name)}:{kind}' for name, kind in fields)}>"


def _quoted(name: str) -> str:
    return name if _WORD.fullmatch(name) else "`" + name.replace("`", "``") + "`"


def leaf_types(type_name: str) -> Iterator[str]:
    """Yield the scalar types within a canonical type; the type itself if it is scalar."""
    kind = nested_type(type_name)
    if kind is None:
        yield type_name
        return
    for inner in inner_types(kind):
        yield from leaf_types(inner)


def inner_types(kind: NestedType) -> tuple[str, ...]:
    """Return the types directly within a level, in order."""
    if isinstance(kind, ArrayType):
        return (kind.element,)
    if isinstance(kind, MapType):
        return kind.key, kind.value
    return tuple(inner for _, inner in kind.fields)


def has_map(type_name: str) -> bool:
    """Return whether a map is anywhere within the type."""
    kind = nested_type(type_name)
    return kind is not None and (isinstance(kind, MapType) or any(map(has_map, inner_types(kind))))


def _short(type_name: str) -> str:
    return type_name if len(type_name) <= 200 else type_name[:200] + "…"


def _unreadable(type_name: str) -> InvalidError:
    return InvalidError(
        f"nested type does not parse: type={_short(type_name)!r}.",
        fix="Write array<type>, struct<name:type,name:type> or map<type,type>.",
    )
