"""Names of captured tables, and of their topics. Pure.

    table    schema.table; a part with a dot or a quote is written as in SQL: "a.b".t
    topic    capture.schema.table; a byte that is invalid in a topic name is _xHH (hexadecimal), and so is the _ of a
             name that already looks like one. A name that is too long for a topic keeps its beginning and ends in _xh
             and the hash of the whole; the catalogue has the table's name.
    aside    the topic's name and _xhaside: no table's name, since in those only hexadecimal digits follow _xh

A name that is not UTF-8 (a database with the encoding SQL_ASCII accepts any bytes) is a text with a surrogate for each
invalid byte, so that SQL finds it. For people that byte is \\xHH. A table with such a name in it is not captured.

Both mappings are one to one, so no table's name is rejected, and two tables never share a topic.
"""

from __future__ import annotations

import hashlib
import re

from tidemill.base.errors import InvalidError
from tidemill.metastore.catalogue import TOPIC_NAME_CHARS, TOPIC_NAME_LENGTH

_PLAIN = frozenset(TOPIC_NAME_CHARS) - {"."}
_LOOKS_ENCODED = re.compile(r"_(?=x[0-9a-fh])")
_PART = re.compile(r'"((?:[^"]|"")*)"|([^."]+)')
_HASH_CHARS = 40
SIDE_TOPIC_SUFFIX = "_xhaside"


def table_name(schema: str, table: str) -> str:
    return to_readable(f"{_quote(schema)}.{_quote(table)}")


def has_invalid_bytes(text: str) -> bool:
    """Return whether the text contains bytes that are not UTF-8."""
    return not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)


def to_readable(text: str) -> str:
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace") if has_invalid_bytes(text) else text


def split_name(name: str) -> tuple[str, str]:
    """Return (schema, table) of a name from `table_name`; the default schema is public. Raises InvalidError."""
    parts: list[str] = []
    at = 0
    while at <= len(name):
        found = _PART.match(name, at)
        if found is None:
            break
        parts.append(found[1].replace('""', '"') if found[1] is not None else found[2])
        at = found.end()
        if at == len(name):
            if len(parts) <= 2:
                return (parts[0], parts[1]) if len(parts) == 2 else ("public", parts[0])
            break
        if name[at] != ".":
            break
        at += 1
    raise InvalidError(
        f"not a table's name: table={name!r}.", fix='Write schema.table; quote a part that holds a dot: "a.b".'
    )


def topic_name(capture: str, schema: str, table: str) -> str:
    return _shorten(f"{capture}.{_encode(schema)}.{_encode(table)}")


def side_topic_name(topic: str) -> str:
    """Return the name of the side topic whose changes go into this topic later."""
    return _shorten(f"{topic}{SIDE_TOPIC_SUFFIX}")


def _shorten(name: str) -> str:
    if len(name) <= TOPIC_NAME_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_CHARS]
    return f"{name[: TOPIC_NAME_LENGTH - _HASH_CHARS - 3]}_xh{digest}"


def _quote(part: str) -> str:
    return '"' + part.replace('"', '""') + '"' if "." in part or '"' in part or not part else part


def _encode(part: str) -> str:
    part = _LOOKS_ENCODED.sub("_x5f", part)
    if set(part) <= _PLAIN:
        return part
    return "".join(c if c in _PLAIN else "".join(f"_x{b:02x}" for b in c.encode()) for c in part)
