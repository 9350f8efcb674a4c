"""Where clauses over every element type, mixed lists and values at the edge of every type, against SELECT.

PostgreSQL answers thousands of expressions in a few statements: a function there evaluates each of them on each row,
and says with which SQLSTATE it failed where it does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tidemill.capture.wire.connection import DISPLAY_SETTINGS
from tidemill.cli.demo.postgres import EmbeddedPostgres
from tidemill.shapes.where import EvaluationError, Type, WhereError, compile_where

pytestmark = pytest.mark.postgres

LABELS = ("sad", "ok", "happy")
EDGES: dict[str, tuple[str, ...]] = {
    "int2": ("0", "1", "-1", "32767", "-32768", "12"),
    "int4": ("0", "1", "-1", "2147483647", "-2147483648", "16777217"),
    "int8": ("0", "1", "-1", "9223372036854775807", "-9223372036854775808", "9007199254740993"),
    "numeric": ("0", "1", "0.1", "NaN", "Infinity", "-Infinity", "-2.5", "1.00", "99999999999999999999.5", "0.2"),
    "float4": ("0", "-0", "0.1", "NaN", "Infinity", "-Infinity", "3.4028235e38", "1e-45", "1.00000006", "16777216"),
    "float8": ("0", "-0", "0.1", "NaN", "Infinity", "-Infinity", "1.7976931348623157e308", "5e-324", "2.5", "1e15"),
    "bool": ("true", "false"),
    "text": ("", "a", "A", "a ", "b\\", "NULL", "%_", "é", "a,b", "xax"),
    "bpchar": ("", "a", "A", "a  ", "b", "é"),
    "varchar": ("", "a", "a ", "b"),
    "uuid": ("00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff",
             "12345678-1234-1234-1234-1234567890ab"),
    "date": ("1970-01-01", "4714-11-24 BC", "5874897-12-31", "infinity", "-infinity", "2024-01-31", "2024-02-29"),
    "time": ("00:00:00", "24:00:00", "23:59:59.999999", "10:20:00"),
    "timestamp": ("1970-01-01 00:00:00", "4714-11-24 00:00:00 BC", "294276-12-31 23:59:59.999999", "infinity",
                  "-infinity", "2024-01-31 10:20:30.5"),
    "timestamptz": ("1970-01-01 00:00:00+00", "4714-11-24 00:00:00+00 BC", "294276-12-31 23:59:59.999999+00",
                    "infinity", "-infinity", "2024-01-31 10:20:30.5+02"),
    "interval": ("0", "1 mon", "30 days", "720:00:00", "-1 day 24:00:00", "1 year 2 mons 3 days 04:05:06.789",
                 "178000000 years", "-178000000 years", "infinity", "-1 mon -30:00:00.000001"),
    "mood": LABELS,
}  # fmt: skip
ROWS = 11
"""The last one is NULL in every column."""


def scalar(kind: str) -> str:
    return f"c_{kind}"


def many(kind: str) -> str:
    return f"a_{kind}"


def sql_type(kind: str) -> str:
    return "char(4)" if kind == "bpchar" else kind


def where_type(kind: str, array: bool) -> Type:
    name = "enum" if kind == "mood" else kind
    return Type(name, array, ordered=True, labels=LABELS if kind == "mood" else ())


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def array_text(rand: random.Random, kind: str) -> str:
    """An array's text: sometimes empty, with NULLs, of two dimensions, or with a lower bound of its own."""
    picked = [rand.choice(EDGES[kind]) for _ in range(rand.choice((0, 1, 1, 2, 3)))]
    items = ["NULL" if rand.random() < 0.15 else '"' + item.replace("\\", "\\\\") + '"' for item in picked]
    if len(items) == 2 and rand.random() < 0.2:
        return "{{" + items[0] + "},{" + items[1] + "}}"
    plain = "{" + ",".join(items) + "}"
    return f"[2:{len(items) + 1}]={plain}" if items and rand.random() < 0.15 else plain


def ddl(rand: random.Random) -> str:
    labels = ", ".join(f"'{label}'" for label in LABELS)
    columns = [f'{scalar(kind)} {sql_type(kind)} {"COLLATE" if kind in TEXTUAL else ""}{C if kind in TEXTUAL else ""}'
               for kind in EDGES]  # fmt: skip
    columns += [f'{many(kind)} {sql_type(kind)}[] {"COLLATE" if kind in TEXTUAL else ""}{C if kind in TEXTUAL else ""}'
                for kind in EDGES]  # fmt: skip
    rows: list[str] = []
    for row in range(ROWS - 1):
        values = [quoted(edges[row % len(edges)]) for edges in EDGES.values()]
        values += [quoted(array_text(rand, kind)) for kind in EDGES]
        rows.append(f"({row}, {', '.join(values)})")
    rows.append(f"({ROWS - 1}, {', '.join(['NULL'] * 2 * len(EDGES))})")
    return (
        f"CREATE TYPE mood AS ENUM ({labels}); CREATE TABLE e (id int PRIMARY KEY, {', '.join(columns)});"
        f"INSERT INTO e VALUES {', '.join(rows)}; {TRUTH_SQL}"
    )


TEXTUAL = ("text", "bpchar", "varchar")
C = ' "C"'
TRUTH_SQL = """
CREATE FUNCTION truth(clauses text[]) RETURNS SETOF text[] LANGUAGE plpgsql AS $$
DECLARE clause text; answers text[]; answer text; n int;
BEGIN
  FOREACH clause IN ARRAY clauses LOOP
    BEGIN
      EXECUTE 'SELECT array_agg((' || clause || ')::bool::text ORDER BY id) FROM e' INTO answers;
    EXCEPTION WHEN OTHERS THEN
      answers := '{}';
      IF SQLSTATE LIKE '42%' THEN
        answers := array_fill('!' || SQLSTATE || SQLERRM, ARRAY[ROWS]);
      ELSE
        FOR n IN 0 .. ROWS - 1 LOOP
          BEGIN
            EXECUTE 'SELECT (' || clause || ')::bool::text FROM e WHERE id = ' || n INTO answer;
          EXCEPTION WHEN OTHERS THEN
            answer := '!' || SQLSTATE || SQLERRM;
          END;
          answers := array_append(answers, answer);
        END LOOP;
      END IF;
    END;
    RETURN NEXT answers;
  END LOOP;
END $$;
""".replace("ROWS", str(ROWS))


class Edges:
    """The table, its rows as the stream prints them, and what PostgreSQL says of clauses over it."""

    def __init__(self, dsn: str) -> None:
        options = " ".join(f"-c {k}={v.replace(' ', chr(92) + ' ')}" for k, v in DISPLAY_SETTINGS.items())
        self.connection = psycopg.connect(dsn, autocommit=True, options=options)
        self.connection.execute(ddl(random.Random(21)).encode())
        self.types = {"id": Type("int4")}
        self.types |= {scalar(kind): where_type(kind, False) for kind in EDGES}
        self.types |= {many(kind): where_type(kind, True) for kind in EDGES}
        cursor = psycopg.RawCursor(self.connection)
        cursor.execute(f"SELECT {', '.join(self.types)} FROM e ORDER BY id".encode())
        result = cursor.pgresult
        assert result is not None
        self.rows: list[dict[str, str | None]] = []
        for row in range(result.ntuples):
            values = [result.get_value(row, column) for column in range(len(self.types))]
            texts = [None if value is None else bytes(value).decode() for value in values]
            self.rows.append(dict(zip(self.types, texts, strict=True)))

    def truth(self, clauses: list[str]) -> list[list[str | None]]:
        return [row[0] for row in self.connection.execute("SELECT truth(%s)", (clauses,)).fetchall()]

    def ours(self, clause: str) -> list[str | None]:
        """Raises WhereError."""
        where = compile_where(clause, (), self.types, table="e", schema="public")
        return [self._one(where, row) for row in self.rows]

    @staticmethod
    def _one(where: Any, row: dict[str, str | None]) -> str | None:
        try:
            value = where.evaluate(row)
        except EvaluationError as error:
            return f"!{error}"
        return None if value is None else str(value).lower()

    def wrong(self, clauses: list[str]) -> tuple[list[str], int, dict[str, str]]:
        """What disagrees; how many clauses were compared; what was refused."""
        compiled: dict[str, list[str | None]] = {}
        refused: dict[str, str] = {}
        for clause in dict.fromkeys(clauses):
            try:
                compiled[clause] = self.ours(clause)
            except WhereError as error:
                refused[clause] = str(error)
        found = [
            f"{clause}: row={number} select={said} here={answer}"
            for (clause, answers), truth in zip(compiled.items(), self.truth(list(compiled)), strict=True)
            for number, (answer, said) in enumerate(zip(answers, truth, strict=True))
            if not agrees(answer, said, truth)
        ]
        return found, len(compiled), refused


def agrees(answer: str | None, said: str | None, truth: list[str | None]) -> bool:
    """Who raises has PostgreSQL asked. A clause that fails on every row failed when it was planned."""
    if said is not None and said.startswith("!"):
        planned = all(other is not None and other.startswith("!") for other in truth)
        return planned or (answer is not None and answer.startswith("!"))
    return answer == said or (answer is not None and answer.startswith("!"))


@pytest.fixture(scope="module")
def edges(postgres_server: EmbeddedPostgres) -> Iterator[Edges]:
    with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
        connection.execute("CREATE DATABASE where_edges")
    found = Edges(postgres_server.dsn_for("where_edges"))
    yield found
    found.connection.close()


NAMED = """
c_float4 IN (0.1, 0.2) | c_float4 IN (0.1) | c_float4 IN (0.1, 0.2::float8) | c_float4 NOT IN (0.1, 0.2)
c_float4 = ANY(ARRAY[0.1, 0.2]) | c_float4 IN (0.1, id, 0.2) | c_int4 IN ('1.5', 2.0) | c_int8 IN (1, 2, 3000000000)
'1' IN (c_int4, 2.5) | '1' IN (1, 2.5) | c_bpchar IN ('a   '::text, 'b'::text) | c_bpchar IN ('a   '::text)
c_text IN ('a  '::bpchar, 'b'::bpchar) | c_text IN ('a  '::bpchar) | a_int4 IN ('{1}', '{0}') | a_float8 IN ('{NaN}')
c_date IN ('1970-01-01'::timestamp, '2024-01-31'::date) | c_numeric IN (0.1::float8, 0.2) | c_int2 IN (1, 40000)
a_float8 = '{NaN}' | a_float4 <> '{NaN}' | a_numeric = ARRAY['NaN'::numeric] | a_float8 IS DISTINCT FROM '{NaN}'
a_bpchar = '{a}' | a_bpchar <> '{A}' | '[2:3]={1,0}' = a_int4 | a_int4 = '[1:2]={1,0}' | a_text = '{"a "}'
c_text LIKE 'a\\' | c_text LIKE '\\' | c_text LIKE '%\\' | c_text LIKE '%_\\' | c_text LIKE '%a\\' | c_text LIKE 'x%\\'
c_text LIKE '_\\' | c_text LIKE 'b%_%\\' | c_text NOT LIKE 'z\\' | c_text ILIKE 'A\\' | 'zz' LIKE c_text
c_text LIKE '%a%x\\' | c_text LIKE '%_%__\\' | c_text LIKE '%x_%\\' | c_varchar LIKE 'a%\\'
c_float4 = '1.000000059604644775390626' | c_float4 = '1.000000059604644775390625' | c_float4 = '16777217.0000000000001'
c_float4 = 16777217 | c_int8::float4 = c_float4 | c_date::timestamp > '2024-01-01' | c_date > '2024-01-01'::timestamp
"""


def listed(text: str) -> list[str]:
    return [part.strip() for line in text.strip().splitlines() for part in line.split(" | ")]


def test_clauses_that_once_disagreed_with_select_agree(edges: Edges) -> None:
    found, _, refused = edges.wrong(listed(NAMED))
    assert (found, refused) == ([], {})


NUMERIC = ("int2", "int4", "int8", "numeric", "float4", "float8")
MOMENTS = ("date", "timestamp", "timestamptz")
FAMILIES = (NUMERIC, MOMENTS, TEXTUAL, ("bool",), ("uuid",), ("time",), ("interval",), ("mood",))
COMPARED = ("=", "<>", "<", "<=", ">", ">=", "IS DISTINCT FROM", "IS NOT DISTINCT FROM")


def value(rand: random.Random, kind: str) -> str:
    """A column, a literal, or a literal of this type."""
    roll, literal = rand.random(), quoted(rand.choice(EDGES[kind]))
    if roll < 0.5:
        return scalar(kind)
    if roll < 0.75 or kind == "mood":
        return literal if kind not in ("int4", "numeric") or "a" in literal else literal.strip("'")
    return f"{literal}::{kind}"


def array(rand: random.Random, kind: str) -> str:
    roll = rand.random()
    if roll < 0.5:
        return many(kind)
    if roll < 0.8:
        return quoted(array_text(rand, kind))
    return f"ARRAY[{value(rand, kind)}, {scalar(kind)}]"


def clause(rand: random.Random) -> str:
    family = rand.choice(FAMILIES)
    kind, other = rand.choice(family), rand.choice(family)
    left, roll = value(rand, kind), rand.random()
    if roll < 0.25:
        return f"({left} {rand.choice(COMPARED)} {value(rand, other)})"
    if roll < 0.55:
        items = ", ".join(value(rand, rand.choice(family)) for _ in range(rand.randint(1, 4)))
        return f"({left} {rand.choice(('IN', 'NOT IN'))} ({items}))"
    if roll < 0.7:
        return f"({left} {rand.choice(COMPARED[:6])} {rand.choice(('ANY', 'ALL'))} ({array(rand, kind)}))"
    if roll < 0.85:
        return f"({array(rand, kind)} {rand.choice(('=', '<>', *COMPARED[6:]))} {array(rand, kind)})"
    if roll < 0.92:
        items = ", ".join(value(rand, rand.choice(family)) for _ in range(rand.randint(1, 3)))
        return f"(coalesce({items}) = {left})"
    return f"({left} BETWEEN {value(rand, other)} AND {value(rand, kind)})"


def test_random_clauses_over_every_type_agree_with_select(edges: Edges) -> None:
    rand = random.Random(20261127)
    found, compared, _ = edges.wrong([clause(rand) for _ in range(2_000)])
    assert found == []
    assert compared > 1_000
