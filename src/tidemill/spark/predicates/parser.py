"""Parser of predicates: text → typed expression, by precedence climbing, in PostgreSQL's order of precedence.

    OR < AND < NOT < IS < comparison < BETWEEN, IN, LIKE < + − < * < unary − < ( ), literals, columns, functions

Everything else is refused with its place: division (integers differ between engines), casts, CASE, subqueries,
regular expressions, functions other than length, abs and coalesce.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec
import pyarrow as pa

from tidemill.spark.predicates import operators as ops
from tidemill.spark.predicates.operators import Operand, PredicateError

DEPTH_MAX = 50
TERMS_MAX = 50
"""Maximum number of operators + − * in a row."""
CHARS_MAX = 10_000

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<text>'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")+")
    | (?P<word>[^\W\d]\w*)
    | (?P<sign>--|/\*|<=|>=|<>|!=|::|\|\||[-+*/%=<>(),~^.\[\]]|\S)
    )""",
    re.VERBOSE,
)
_RESERVED = frozenset(
    ("ALL", "AND", "ANY", "BETWEEN", "CASE", "CAST", "EXISTS", "FALSE", "ILIKE", "IN", "IS", "LIKE", "NOT", "NULL")
) | {"OR", "SELECT", "SIMILAR", "TRUE", "UNKNOWN", "WHEN"}
_COMPARISONS = frozenset(("=", "<>", "!=", "<", "<=", ">", ">="))


class Token(msgspec.Struct, frozen=True):
    """`kind`: number, text, quoted, word, sign or end. `at`: its place in the text, from 1."""

    kind: str
    text: str
    at: int

    @property
    def upper(self) -> str:
        return self.text.upper() if self.kind in ("word", "sign") else ""


def parse_predicate(text: str, column: Callable[[str, bool], Operand]) -> Operand:
    """Return the condition. `column(name, quoted)` finds a column. Raises PredicateError."""
    if len(text) > CHARS_MAX:
        raise PredicateError(f"the expression has more than {CHARS_MAX} characters")
    parser = _Parser(_tokens(text), column)
    found = parser.expression(0)
    parser.expect_end()
    return ops.as_bool(found, "an expression")


def _tokens(text: str) -> list[Token]:
    out, at = [], 0
    end = len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        assert found is not None and found.lastgroup is not None  # a sign may be any character
        out.append(Token(found.lastgroup, found[found.lastgroup], found.start(found.lastgroup) + 1))
        at = found.end()
    return [*out, Token("end", "", end + 1)]


class _Parser:
    def __init__(self, tokens: Sequence[Token], column: Callable[[str, bool], Operand]) -> None:
        self._tokens = tokens
        self._at = 0
        self._find = column
        self._references = 0
        """Number of columns that were found."""

    # tokens -----------------------------------------------------------------------------------------
    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _pop_token(self) -> Token:
        found = self._next
        self._at += found.kind != "end"
        return found

    def _pop_words(self, *words: str) -> bool:
        """Take these words or signs if they are next."""
        following = self._tokens[self._at : self._at + len(words)]
        if tuple(token.upper for token in following) != words:
            return False
        self._at += len(words)
        return True

    def _expect(self, word: str) -> None:
        if not self._pop_words(word):
            raise self._refused(f"{word} is expected")

    def _refused(self, why: str, token: Token | None = None) -> PredicateError:
        token = token or self._next
        return PredicateError(f"{why} at {f'character {token.at}: {token.text}' if token.text else 'the end'}")

    def _column(self, name: str, quoted: bool) -> Operand:
        self._references += 1
        return self._find(name, quoted)

    def expect_end(self) -> None:
        if self._next.kind != "end":
            raise self._refused("not supported")

    # grammar ----------------------------------------------------------------------------------------
    def expression(self, depth: int) -> Operand:
        if depth > DEPTH_MAX:
            raise self._refused(f"nested deeper than {DEPTH_MAX}")
        found = [self._conjunction(depth)]
        while self._pop_words("OR"):
            found.append(self._conjunction(depth))
        return ops.logical("OR", found)

    def _conjunction(self, depth: int) -> Operand:
        found = [self._negation(depth)]
        while self._pop_words("AND"):
            found.append(self._negation(depth))
        return ops.logical("AND", found)

    def _negation(self, depth: int) -> Operand:
        if depth > DEPTH_MAX:
            raise self._refused(f"nested deeper than {DEPTH_MAX}")
        if self._pop_words("NOT"):
            return ops.negation(self._negation(depth + 1))
        found = self._comparison(depth)
        while self._pop_words("IS"):
            negated = self._pop_words("NOT")
            if self._pop_words("NULL") or self._pop_words("UNKNOWN"):
                found = ops.is_null(found)
            elif self._next.upper in ("TRUE", "FALSE"):
                found = ops.is_bool(found, self._pop_token().upper == "TRUE")
            else:
                raise self._refused("IS is followed by NULL, NOT NULL, TRUE or FALSE; not supported")
            found = ops.negation(found) if negated else found
        return found

    def _comparison(self, depth: int) -> Operand:
        found = self._membership(depth)
        if self._next.text in _COMPARISONS:
            operator = self._pop_token().text
            found = ops.comparison("<>" if operator == "!=" else operator, found, self._membership(depth))
            if self._next.text in _COMPARISONS:
                raise self._refused("a comparison of a comparison is not supported")
        return found

    def _membership(self, depth: int) -> Operand:
        left = self._sum(depth)
        start = self._at
        negated = self._pop_words("NOT")
        if self._pop_words("BETWEEN"):
            lower = self._sum(depth)
            self._expect("AND")
            upper = self._sum(depth)
            found = ops.logical("AND", (ops.comparison(">=", left, lower), ops.comparison("<=", left, upper)))
        elif self._pop_words("IN"):
            items = [ops.comparison("=", left, item) for item in self._list(left, depth + 1)]
            found = ops.logical("OR", items)
        elif self._next.upper in ("LIKE", "ILIKE"):
            ignore_case = self._pop_token().upper == "ILIKE"
            found = ops.like(left, self._primary(depth), ignore_case=ignore_case)
        else:
            self._at = start
            return left
        return ops.negation(found) if negated else found

    def _list(self, left: Operand, depth: int) -> list[Operand]:
        """Return the items of IN with the types in which they are compared with `left`."""
        constants: list[Operand] = []
        others: list[Operand] = []
        self._expect("(")
        while True:
            before = self._references
            item = self._sum(depth)
            (constants if self._references == before else others).append(item)
            if not self._pop_words(","):
                break
        self._expect(")")
        return [*ops.list_items(left, constants), *others]

    def _sum(self, depth: int) -> Operand:
        found = self._product(depth)
        for _ in range(TERMS_MAX):
            if self._next.text not in ("+", "-"):
                return found
            found = ops.arithmetic(self._pop_token().text, found, self._product(depth))
        raise self._refused(f"more than {TERMS_MAX} operators in a row")

    def _product(self, depth: int) -> Operand:
        found = self._unary(depth)
        for _ in range(TERMS_MAX):
            if self._next.text in ("/", "%"):
                raise self._refused("division is not supported")
            if self._next.text != "*":
                return found
            found = ops.arithmetic(self._pop_token().text, found, self._unary(depth))
        raise self._refused(f"more than {TERMS_MAX} operators in a row")

    def _unary(self, depth: int) -> Operand:
        if depth > DEPTH_MAX:
            raise self._refused(f"nested deeper than {DEPTH_MAX}")
        if self._pop_words("-"):
            if self._next.kind == "number":
                return ops.number_literal("-" + self._pop_token().text)
            return ops.negative(self._unary(depth + 1))
        return self._primary(depth)

    def _primary(self, depth: int) -> Operand:
        token = self._pop_token()
        if token.kind == "number":
            return ops.number_literal(token.text)
        if token.kind == "text":
            return ops.text_literal(token.text[1:-1].replace("''", "'"))
        if token.kind == "quoted":
            return self._column(token.text[1:-1].replace('""', '"'), True)
        if token.text == "(":
            found = self.expression(depth + 1)
            self._expect(")")
            return found
        if token.upper in ("TRUE", "FALSE"):
            return ops.constant(token.upper == "TRUE", pa.bool_(), token.upper)
        if token.upper == "NULL":
            return ops.null_literal()
        if token.upper in ("DATE", "TIMESTAMP") and self._next.kind == "text":
            kind = pa.date32() if token.upper == "DATE" else pa.timestamp("us")
            return ops.convert(ops.text_literal(self._pop_token().text[1:-1]), kind)
        if token.kind != "word" or token.upper in _RESERVED:
            raise self._refused("not supported" if token.text else "an operand is missing", token)
        if self._next.text == "(":
            return self._call(token.text.lower(), depth)
        return self._column(token.text, False)

    def _call(self, function: str, depth: int) -> Operand:
        self._expect("(")
        arguments = [self.expression(depth + 1)]
        while self._pop_words(","):
            arguments.append(self.expression(depth + 1))
        self._expect(")")
        return ops.call(function, arguments)
