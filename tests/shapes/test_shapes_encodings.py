"""Clauses over text in databases of several encodings, against PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tidemill.shapes.definition.table_columns import DESCRIBE_SQL, ColumnInfo
from tidemill.shapes.where import Type, WhereError, compile_order_by, compile_where

pytestmark = pytest.mark.postgres

WORDS = {
    "SQL_ASCII": ["Jörg", "jÖrg", "Jorg", "ä", "ö", "€", "éa", "z", "\u00a0x\u0085", "ÿ"],
    "LATIN1": ["Jörg", "jÖrg", "ä", "ÿ", "µ", "z", "\u00a0x\u0085"],
    "LATIN9": ["Jörg", "€", "Ž", "ž", "Œ", "ä", "z", "ÿ"],
    "WIN1252": ["Jörg", "€", "ƒ", "Š", "ä", "z", "™"],
    "KOI8R": ["Юрий", "юрий", "Цапля", "цапля", "а", "я", "z", "©"],
    "EUC_JP": ["漢字", "あ", "ア", "z", "ö"],
}
CLAUSES = [
    "t = {w}", "t <> {w}", "t IN ({w}, 'x')", "t LIKE {w}", "t LIKE '_'", "t LIKE '__'", "t LIKE 'J_rg'",
    "t LIKE 'J__rg'", "t LIKE '%_' || right({w}, 1)", "t LIKE left({w}, 1) || '%'", "{w} LIKE t", "t ILIKE {w}",
    "t ILIKE 'j__R%'", "length(t) = length({w})", "length(t) = 4", "length({w}) = n", "left(t, 1) = left({w}, 1)",
    "left(t, 2) = {w}", "left(t, -1) || right(t, 1) = {w}", "right(t, 2) = {w}", "btrim(t, {w}) = ''",
    "ltrim(t, {w}) = right(t, 1)", "btrim(t) = {w}", "lower(t) = {w}", "upper(t) = {w}", "concat(t, {w}) = {w} || t",
    "array_length(string_to_array(t, NULL), 1) = 4", "cardinality(string_to_array(t, left({w}, 1))) = 2",
    "{w} = ANY(a)", "a @> ARRAY[{w}]", "array_position(a, {w}) = 1",
    "array_to_string(a, left({w}, 1)) LIKE t || '_x'",
    "b = {w}", "length(b) = 2", "v LIKE '_%_'", "m = 'für'", "m < 'neu'", "m::text LIKE 'f__'", "m::text LIKE 'f_r'",
    "j::text LIKE '%___\"}}'", "NULLIF(t, {w}) IS NULL", "CASE t WHEN {w} THEN length(t) = 1 ELSE length(t) = 2 END",
]  # fmt: skip
ORDERS = ["t < {w}", "t >= {w}", "t BETWEEN {w} AND 'z'", 't COLLATE "C" < {w}', '{w} COLLATE "POSIX" > lower(t)',
          "greatest(t, {w}) = t", "t > ALL(ARRAY[{w}])", 'b COLLATE "C" > {w}', "v < {w}"]  # fmt: skip
CODE_POINT_ORDERED = ("SQL_ASCII", "LATIN1")


@contextmanager
def database(dsn: str, encoding: str, locale: str = "C") -> Iterator[psycopg.Connection]:
    name = f"encoding_{encoding}_{locale.replace('.', '_')}".lower()
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE IF EXISTS {name}".encode())
        admin.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE '{locale}' TEMPLATE template0".encode())
        try:
            with psycopg.connect(
                make_conninfo(dsn, dbname=name, client_encoding="UTF8"), autocommit=True
            ) as connection:
                yield connection
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def make_table(connection: psycopg.Connection, words: list[str]) -> tuple[dict[str, Type], list[dict[str, str | None]]]:
    """Create a table with a row for each word; return the types of its columns and its rows, as the stream has them."""
    connection.execute("CREATE TYPE mood AS ENUM ('neu', 'für')" if can_encode(connection, "ü") else
                       "CREATE TYPE mood AS ENUM ('neu', 'fur')")  # fmt: skip
    connection.execute("CREATE TABLE w (n int, t text, v varchar(9), b char(5), a text[], m mood, j json, o name)")
    for n, word in enumerate(words):
        connection.execute(
            "INSERT INTO w SELECT %s, %s::text, %s, %s, ARRAY[%s, 'x'],"
            " (enum_range(NULL::mood))[%s], json_build_object('k', %s::text)",
            (n, word, word, word, word, 1 + n % 2, word),
        )
    oid = connection.execute("SELECT 'w'::regclass::oid").fetchone()[0]  # type: ignore[index]
    infos = [ColumnInfo(*row) for row in connection.execute(DESCRIBE_SQL, (oid,)).fetchall()]
    names = ("n", "t", "v", "b", "a", "m", "j", "o")
    found = connection.execute("SELECT n::text, t, v, b::bpchar, a::text, m::text, j::text, o::text FROM w ORDER BY n")
    rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    return {info.name: info.where_type for info in infos}, rows


def can_encode(connection: psycopg.Connection, text: str) -> bool:
    try:
        connection.execute("SELECT %s::text", (text,))
    except psycopg.DataError:
        return False
    return True


@pytest.mark.parametrize("encoding", WORDS)
def test_clauses_mean_in_every_encoding_what_they_mean_to_the_server(postgres_dsn: str, encoding: str) -> None:
    with database(postgres_dsn, encoding) as connection:
        types, rows = make_table(connection, WORDS[encoding])
        label = "für" if can_encode(connection, "ü") else "fur"
        compared, matched, wrong = 0, 0, list[str]()
        for template in (*CLAUSES, *ORDERS):
            for word in WORDS[encoding]:
                text = template.replace("für", label).format(w=f"'{word}'")
                if template in ORDERS and encoding not in CODE_POINT_ORDERED:
                    with pytest.raises(WhereError, match="order"):
                        compile_where(text, (), types)
                    continue
                where = compile_where(text, (), types)
                answer = connection.execute(f"SELECT n::text FROM w WHERE {where.sql} ORDER BY n".encode()).fetchall()
                select = [row[0] for row in answer]
                here = [row["n"] for row in rows if where.matches(row)]
                compared, matched = compared + 1, matched + len(select)
                if here != select:
                    wrong.append(f"{text}: select={select} here={here}")
        assert not wrong, f"{len(wrong)} of {compared}\n" + "\n".join(wrong[:40])
        assert compared >= len(CLAUSES) * len(rows) and matched > compared / 10


def test_in_sql_ascii_a_parameter_and_the_index_use_the_bytes_of_the_text_too(postgres_dsn: str) -> None:
    with database(postgres_dsn, "SQL_ASCII") as connection:
        types, rows = make_table(connection, ["Jörg", "Jorg"])
        assert connection.execute("SELECT length('Jörg')").fetchone() == (5,)
        where = compile_where("t = $1 AND length($1) = 5 AND t LIKE $2", ("Jörg", "J__rg"), types)
        assert [where.matches(row) for row in rows] == [True, False]
        assert where.params == ("Jörg", "Jörg", "J__rg") and "Jörg" not in where.sql
        equality = where.equality
        assert equality is not None and equality.column == "t"
        assert [equality.read(row) in equality.values for row in rows] == [True, False]


@pytest.mark.parametrize(("encoding", "upper_only"), [("SQL_ASCII", False), ("LATIN1", True)])
def test_letters_are_not_converted_here_as_an_unknown_locale_would(
    postgres_dsn: str, encoding: str, upper_only: bool
) -> None:
    """The bytes of SQL_ASCII belong to the locale. In LATIN1, Unicode has an upper case for two letters too many."""
    locale = "C.utf8" if encoding == "SQL_ASCII" else "C"
    with database(postgres_dsn, encoding, locale) as connection:
        types, _ = make_table(connection, ["É"])
        if encoding == "LATIN1":  # there is no locale of that encoding on this machine; its folding is that of any
            types["t"] = Type("text", ordered=False, folding="simple", encoding=encoding)
        for clause in ("upper(t) = 'É'", "lower(t) = 'é'", "t ILIKE 'é'", "t NOT ILIKE '%É'"):
            if upper_only and "upper" not in clause:
                compile_where(clause, (), types)
                continue
            with pytest.raises(WhereError, match="depends on the locale of a database with encoding"):
                compile_where(clause, (), types)
            where = compile_where(clause.replace("t", 't COLLATE "C"', 1) if "(" not in clause else
                                  clause.replace("(t)", '(t COLLATE "C")'), (), types)  # fmt: skip
            answer = connection.execute(f"SELECT count(*) FROM w WHERE {where.sql}".encode()).fetchone()
            assert answer == (int(where.matches({"t": "É"})),), clause


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "KOI8R"])
def test_what_only_the_server_can_do_with_the_bytes_of_its_encoding_is_refused(
    postgres_dsn: str, encoding: str
) -> None:
    with database(postgres_dsn, encoding) as connection:
        types, _ = make_table(connection, ["x"])
        with pytest.raises(WhereError, match=f"type name in a database with encoding {encoding} is not"):
            compile_where("o = 'x'", (), types)
        keys = compile_order_by("t, n", types).keys
        assert (keys is None) is (encoding == "KOI8R")
        if encoding == "KOI8R":
            with pytest.raises(WhereError, match="not ordered by code points, due to its encoding: operator=<"):
                compile_where("t COLLATE \"C\" < 'x'", (), types)
