"""Spark's grammar of schemas (`"id bigint NOT NULL COMMENT 'key', price decimal(6,2)"`), parsed without Spark.

    schema     column (, column)*       or struct< column (, column)* >; with a colon after a name as in struct<…>
    column     name [:] type [NOT NULL] [COMMENT 'text']
    type       scalar, array< type >, map< type, type >, or struct< column (, column)* >
    name       letters, digits and _, or any text in backquotes, where two backquotes are one

A pipeline file is checked on machines that have no Spark. A text that Spark's own parser accepts is accepted here with
the same meaning, or its type is refused by name (tests/spark/test_spark_ddl.py). NOT NULL, COMMENT and the length of
`char(n)` and `varchar(n)` have no effect, as in Spark's JSON reader. Accepted too are the types `json` and `bool`, and
letters of any language in a name without backquotes. Limits of nested types: shards/nested/type_names.py.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column
from tidemill.shards.nested.type_names import DEPTH_MAX, array_name, map_name, struct_name, too_deep_error
from tidemill.shards.parts.schema import canonical_type

TYPES = {
    "BOOLEAN": "bool",
    "BOOL": "bool",
    "TINYINT": "int16",
    "BYTE": "int16",
    "SMALLINT": "int16",
    "SHORT": "int16",
    "INT": "int32",
    "INTEGER": "int32",
    "BIGINT": "int64",
    "LONG": "int64",
    "FLOAT": "float32",
    "REAL": "float32",
    "DOUBLE": "float64",
    "STRING": "string",
    "CHAR": "string",
    "CHARACTER": "string",
    "VARCHAR": "string",
    "BINARY": "binary",
    "DATE": "date",
    "TIMESTAMP": "timestamp",
    "TIMESTAMP_LTZ": "timestamp",
    "TIMESTAMP_NTZ": "timestamp_ntz",
    "DECIMAL": "decimal",
    "DEC": "decimal",
    "NUMERIC": "decimal",
    "JSON": "json",
}
"""Spark's names of types, in upper case, and ours."""
TEXTS = ("STRING", "CHAR", "CHARACTER", "VARCHAR")
NESTED = ("ARRAY", "MAP", "STRUCT")
OTHERS = ("VARIANT", "INTERVAL", "TIME", "VOID", "GEOMETRY", "GEOGRAPHY")
PARAMETER_MAX = 2**31 - 1

_SPACE = "[\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+"
_HIDDEN = re.compile(rf"{_SPACE}|--(?:\\\n|[^\r\n])*\r?\n?")
_TOKEN = re.compile(
    r"""(?P<quoted>`(?:[^`]|``)*`)
      | (?P<text>r'[^']*' | r"[^"]*" | '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*")
      | (?P<word>\w+)
      | (?P<mark>[:,()<>!])""",
    re.DOTALL | re.VERBOSE | re.IGNORECASE,
)
_NUMBER = re.compile(r"[0-9]+(?:[LSY]|(?:E[0-9]+)?(?:D|F|BD)?)", re.IGNORECASE)
_DEFAULT = re.compile(r"default\s+(.+?)\s*", re.IGNORECASE | re.DOTALL)


class Token(NamedTuple):
    """`kind`: quoted, text, word, mark, or "" at the end."""

    kind: str
    text: str
    at: int

    @property
    def keyword(self) -> str:
        """The word as Spark compares keywords: each character in upper case, if that is one character."""
        return "".join(up if len(up := c.upper()) == 1 else c for c in self.text) if self.kind == "word" else ""


def parse_ddl(text: str) -> tuple[Column, ...]:
    """Return the columns in order. Raises InvalidError naming the text that does not parse, or the type that tables do
    not have."""
    reader = _Reader(text)
    if reader.take_keyword("STRUCT") and reader.take_mark("<"):
        return _columns_of_struct(reader)
    try:
        return _columns(_Reader(text), colon=False, end="")
    except InvalidError:
        if not _Reader(text).has_colon():
            raise
    # Spark then reads the text as the inside of a struct, whose fields may have colons.
    return _columns_of_struct(_Reader(f"struct<{text.strip()}>", at=len("struct<")))


def _columns_of_struct(reader: _Reader) -> tuple[Column, ...]:
    return _columns(reader, colon=True, end=">")


def _columns(reader: _Reader, *, colon: bool, end: str) -> tuple[Column, ...]:
    """Read columns, the mark `end`, and the end of the text."""
    columns: list[Column] = []
    if reader.peek().text != end:
        columns.append(reader.column(colon=colon))
        while reader.take_mark(","):
            columns.append(reader.column(colon=colon))
    if (end and not reader.take_mark(end)) or reader.peek().kind:
        reader.fail()
    return tuple(columns)


def parse_column(text: str) -> Column:
    """Parse `name type` or `name type default value`; types by Spark's or the shard's names, text quoted or unquoted.

    Raises InvalidError naming the text that does not parse.
    """
    reader = _Reader(text, what="column", fix='Write "name type" or "name type default value".')
    name, kind = reader.name(), reader.type(canonical_type)
    rest = text[reader.peek().at :] if reader.peek().kind else ""
    found = _DEFAULT.fullmatch(rest)
    if rest and found is None:
        reader.fail()
    default: str | None = found[1] if found is not None else None
    if default is not None and len(default) > 1 and default[0] == default[-1] == "'":
        default = default[1:-1].replace("''", "'")
    elif default is not None and default.lower() == "null":
        default = None
    return Column(name, kind, default)


class _Reader:
    """Reader of tokens, one ahead. All methods raise InvalidError."""

    def __init__(
        self, text: str, *, at: int = 0, what: str = "schema", fix: str = 'Write "name type, name type".'
    ) -> None:
        self._text = text
        self._at = at
        self._what = what
        self._fix = fix
        self._next: Token | None = None
        self._depth = 0

    def column(self, *, colon: bool, other: Callable[[str], str] | None = None) -> Column:
        name = self.name()
        if colon:
            self.take_mark(":")
        kind = self.type(other)
        if self.take_keyword("NOT") or self.take_mark("!"):
            self._require(self.take_keyword("NULL"))
        if self.take_keyword("COMMENT"):
            self._require(self.peek().kind == "text")
            while self.peek().kind == "text":
                self._next_token()
        return Column(name, kind)

    def name(self) -> str:
        token = self.peek()
        if token.kind == "quoted":
            return self._next_token().text[1:-1].replace("``", "`")
        if token.kind != "word" or _NUMBER.fullmatch(token.text):
            self.fail()
        return self._next_token().text

    def type(self, other: Callable[[str], str] | None = None) -> str:
        """Return our type. `other`: translates a name that is not Spark's."""
        token, name = self.peek(), self.peek().keyword
        if not name:
            self.fail()
        if name in NESTED:
            return self._nested(name, other)
        if name in OTHERS:
            self._refuse_type(token.text)
        if name not in TYPES and other is None:
            raise InvalidError(
                f"no such type: type={token.text!r}.", fix=f"Use one of {', '.join(TYPES).lower()}, decimal(p,s)."
            )
        self._next_token()
        given = self._parameters()
        if name not in TYPES and other is not None:
            return other(f"{token.text.lower()}({','.join(map(str, given))})" if given else token.text.lower())
        allowed = {"decimal": (0, 1, 2), "string": (0,) if name == "STRING" else (1,)}.get(TYPES[name], (0,))
        is_micros = name.startswith("TIMESTAMP") and given == (6,)
        if len(given) not in allowed and not is_micros:
            if TYPES[name] == "string" and not given:
                raise InvalidError(f"type needs a length: type={token.text!r}.", fix="Give it, or use string.")
            self._refuse_type(f"{token.text}({','.join(map(str, given))})")
        if name == "TIMESTAMP" and self.peek().keyword in ("WITH", "WITHOUT"):
            return self._zone(token.text)
        if name in TEXTS and self.take_keyword("COLLATE"):
            collation = self.name()
            if collation.upper() != "UTF8_BINARY":
                self._refuse_type(f"{token.text} collate {collation}")
        if TYPES[name] == "decimal":
            precision, scale = (*given, *(10, 0)[len(given) :])
            return canonical_type(f"decimal({precision},{scale})")
        return TYPES[name]

    def _nested(self, name: str, other: Callable[[str], str] | None) -> str:
        self._next_token()
        self._require(self.take_mark("<"))
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise too_deep_error(self._text, self._what)
        if name == "STRUCT":
            fields: list[Column] = []
            if self.peek().text != ">":
                fields.append(self.column(colon=True, other=other))
                while self.take_mark(","):
                    fields.append(self.column(colon=True, other=other))
            found = struct_name([(field.name, field.type) for field in fields])
        elif name == "ARRAY":
            found = array_name(self.type(other))
        else:
            key = self.type(other)
            self._require(self.take_mark(","))
            found = map_name(key, self.type(other))
        self._require(self.take_mark(">"))
        self._depth -= 1
        return canonical_type(found)

    def _zone(self, name: str) -> str:
        """Read WITHOUT TIME ZONE or WITH LOCAL TIME ZONE."""
        local = self._next_token().keyword == "WITH"
        self._require(not local or self.take_keyword("LOCAL"))
        self._require(self.take_keyword("TIME") and self.take_keyword("ZONE"))
        return TYPES["TIMESTAMP_LTZ" if local else "TIMESTAMP_NTZ"]

    def _parameters(self) -> tuple[int, ...]:
        """Read `(n, n)`; return () if nothing is in parentheses here."""
        if not self.take_mark("("):
            return ()
        found = [self._number()]
        while self.take_mark(","):
            found.append(self._number())
        self._require(self.take_mark(")"))
        return tuple(found)

    def _number(self) -> int:
        text = self.peek().text
        self._require(text.isascii() and text.isdecimal() and int(text) <= PARAMETER_MAX)
        return int(self._next_token().text)

    def _refuse_type(self, name: str) -> NoReturn:
        variant = name.upper() == "VARIANT"
        raise InvalidError(
            f"type is not supported in a table: type={name!r}.",
            fix="Use json, which keeps the value's text." if variant else "Use string, or another type.",
        )

    # tokens ---------------------------------------------------------------------------------------
    def has_colon(self) -> bool:
        """Return whether a colon follows here; reads to the end."""
        while self.peek().kind:
            if self._next_token().text == ":":
                return True
        return False

    def take_keyword(self, word: str) -> bool:
        return self._take_if(self.peek().keyword == word)

    def take_mark(self, mark: str) -> bool:
        return self._take_if(self.peek().kind == "mark" and self.peek().text == mark)

    def peek(self) -> Token:
        if self._next is None:
            self._next = self._read()
        return self._next

    def fail(self) -> NoReturn:
        at = self.peek().at if self._next is not None else self._at
        raise InvalidError(
            f"{self._what} does not parse: {self._what}={self._text[:200]!r} at={self._text[at : at + 40]!r}.",
            fix=self._fix,
        )

    def _require(self, found: bool) -> None:
        if not found:
            self.fail()

    def _take_if(self, found: bool) -> bool:
        if found:
            self._next_token()
        return found

    def _next_token(self) -> Token:
        token = self.peek()
        self._next = None
        return token

    def _read(self) -> Token:
        self._skip_hidden()
        if self._at == len(self._text):
            return Token("", "", self._at)
        found = _TOKEN.match(self._text, self._at)
        if found is None or (found["word"] and not all(map(_is_word_character, found["word"]))):
            self.fail()
        token = Token(str(found.lastgroup), found[0], self._at)
        self._at = found.end()
        return token

    def _skip_hidden(self) -> None:
        """Skip spaces and comments; a comment in brackets may contain others."""
        while True:
            found = _HIDDEN.match(self._text, self._at)
            if found is not None:
                self._at = found.end()
            elif self._text.startswith("/*", self._at) and not self._text.startswith("/*+", self._at):
                depth, at = 1, self._at + 2
                while depth:
                    mark = re.compile(r"/\*|\*/").search(self._text, at)
                    if mark is None:
                        self.fail()
                    depth, at = depth + (1 if mark[0] == "/*" else -1), mark.end()
                self._at = at
            else:
                return


def _is_word_character(c: str) -> bool:
    return c == "_" or (c.isascii() and c.isdigit()) or unicodedata.category(c)[0] == "L"
