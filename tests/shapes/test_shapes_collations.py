"""Clauses over columns of several collations, against PostgreSQL: what it fails on is refused when it is compiled."""

from __future__ import annotations

import itertools

import psycopg
import pytest

from tidemill.shapes.definition.table_columns import DESCRIBE_SQL, ColumnInfo
from tidemill.shapes.where import Type, WhereError, compile_order_by, compile_where

pytestmark = pytest.mark.postgres

COLUMNS = {
    "d": "text",
    "c": 'text COLLATE "C"',
    "p": 'text COLLATE "POSIX"',
    "v": 'varchar(9) COLLATE "POSIX"',
    "b": 'char(4) COLLATE "ucs_basic"',
    "n": "name",
    "k": '"char"',
    "da": "text[]",
    "ca": 'text[] COLLATE "C"',
    "pa": 'text[] COLLATE "POSIX"',
}
ROWS = [
    ("a", "a", "a", "a", "a", "a", "a", "{a,b}", "{a,b}", "{a,b}"),
    ("B", "b", "É", "a", "b", "é", "b", "{}", "{É}", "{é}"),
]
SCALARS = ["d", "c", "p", "v", "b", "n", "k", "'a'", "id::text", "(c || p)", "coalesce(c, p)", 'd COLLATE "POSIX"',
           "lower(c)", "nullif(p, 'x')", "CASE WHEN id = 1 THEN c ELSE p END"]  # fmt: skip
ARRAYS = ["da", "ca", "pa", "ARRAY[c, d]", "ARRAY[c, p]", "'{a}'", "ARRAY['a', 'b']", "(ca || p)", "array_cat(da, ca)",
          "ARRAY[p]::text[]"]  # fmt: skip
OF_SCALARS = [
    "{0} = {1}", "{0} <> {1}", "{0} < {1}", "{0} IS DISTINCT FROM {1}", "{0} IN ({1}, 'x')", "{0} IN ('x', 'y')",
    "{0} IN ({1})", "{0} BETWEEN 'A' AND {1}", "CASE {0} WHEN {1} THEN true ELSE false END", "nullif({0}, {1}) IS NULL",
    "greatest({0}, {1}) = 'a'", "{0} || {1} = 'aa'", "({0} || {1}) IS NOT NULL", "length({0} || {1}) > 1",
    "lower({0} || {1}) = 'aa'", "upper(concat({0}, {1})) = 'AA'", "coalesce({0}, {1}) IN ('a', 'b')",
    "string_to_array({0}, {1}) IS NULL", "btrim({0}, {1}) = ''", "({0} || {1}) COLLATE \"C\" < 'b'",
    "nullif({0}, 'x') = nullif({1}, 'y')",
]  # fmt: skip
PATTERNS = ["{0} LIKE {1}", "{0} NOT LIKE {1}", "{0} ILIKE {1}", '"like"({0}, {1})']
OF_BOTH = [
    "{0} = ANY({1})", "{0} < ALL({1})", "array_position({1}, {0}) = 1", "array_remove({1}, {0}) = {1}",
    "array_append({1}, {0}) IS NOT NULL", "cardinality(array_prepend({0}, {1})) > 0",
    "array_to_string({1}, {0}) = 'aab'",
]  # fmt: skip
OF_ARRAYS = ["{0} = {1}", "{0} @> {1}", "{0} && {1}", "{0} <@ {1}", "{0} IS DISTINCT FROM {1}",
             "array_cat({0}, {1}) IS NOT NULL"]  # fmt: skip


def cases() -> tuple[list[str], set[str]]:
    """Clauses, and those of them where the server may decide without comparing: by an earlier item, or by lengths."""
    found = [t.format(a, b) for t in (*OF_SCALARS, *PATTERNS) for a, b in itertools.product(SCALARS, SCALARS)]
    found += [t.format(a, b) for t in OF_BOTH for a, b in itertools.product(SCALARS, ARRAYS)]
    arrays = [t.format(a, b) for t in OF_ARRAYS for a, b in itertools.product(ARRAYS, ARRAYS)]
    unsure = {clause for clause in arrays if " = " in clause or "DISTINCT" in clause}
    return list(dict.fromkeys(found + arrays)), unsure | {clause for clause in found if " IN (" in clause}


TRUTH_SQL = """
CREATE FUNCTION truth(clauses text[]) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE clause text; answer text;
BEGIN
  FOREACH clause IN ARRAY clauses LOOP
    BEGIN
      EXECUTE 'SELECT array_agg((' || clause || ') ORDER BY id)::text FROM w' INTO answer;
    EXCEPTION WHEN OTHERS THEN
      answer := SQLSTATE;
    END;
    RETURN NEXT answer;
  END LOOP;
END $$
"""
UNDECIDED = ("42P21", "42P22")
"""collation_mismatch, indeterminate_collation"""
LETTERS = {True: "t", False: "f", None: "NULL"}


def test_what_the_server_fails_on_for_its_collations_is_refused_and_nothing_else(postgres_dsn: str) -> None:
    """The server accepts such a clause on an empty table; a shape over it would differ from a later SELECT."""
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE w (id int, {', '.join(f'{n} {t}' for n, t in COLUMNS.items())})".encode())
        for number, row in enumerate(ROWS):
            connection.execute(f"INSERT INTO w VALUES (%s{', %s' * len(row)})".encode(), [number, *row])
        types = types_of(connection)
        assert types["d"].collation == types["k"].collation == "" and types["c"].collation == types["ca"].collation
        names = ("id", *COLUMNS)
        query = f"SELECT {', '.join(f'concat({name})' for name in names)} FROM w ORDER BY id"
        rows = [dict(zip(names, row, strict=True)) for row in connection.execute(query.encode()).fetchall()]
        connection.execute(TRUTH_SQL)
        clauses, unsure = cases()
        answers = [row[0] for row in connection.execute("SELECT truth(%s)", (clauses,)).fetchall()]
        like_checks = connection.info.server_version >= 180_000
    wrong: list[str] = []
    compared = refused = 0
    for clause, answer in zip(clauses, answers, strict=True):
        try:
            where = compile_where(clause, (), types)
        except WhereError as error:
            if "collation" in str(error) and "ordering text" not in str(error):
                refused += 1
                lenient = clause in unsure or (not like_checks and "LIKE" in clause.upper())
                if answer not in UNDECIDED and not lenient:
                    wrong.append(f"refused: {clause}: {error} select={answer}")
            continue
        compared += 1
        found = "{" + ",".join(LETTERS[where.evaluate(row)] for row in rows) + "}"
        if found != answer:
            wrong.append(f"{clause}: select={answer} here={found}")
    assert not wrong, f"{len(wrong)} of {compared}\n" + "\n".join(wrong[:60])
    assert compared > 3_000 and refused > 500, (compared, refused)


def types_of(connection: psycopg.Connection) -> dict[str, Type]:
    oid = connection.execute("SELECT 'w'::regclass::oid").fetchone()[0]  # type: ignore[index]
    infos = [ColumnInfo(*row) for row in connection.execute(DESCRIBE_SQL, (oid,)).fetchall()]
    return {info.name: info.where_type for info in infos}


def test_a_list_whose_item_has_no_collation_to_be_ordered_by_is_refused(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute('CREATE TABLE w (c text COLLATE "C", p text COLLATE "POSIX")')
        types = types_of(connection)
        for text in ("c || p", "coalesce(c, p) DESC", 'c COLLATE "C" || p COLLATE "POSIX"'):
            with pytest.raises(psycopg.Error):
                connection.execute(f"SELECT * FROM w ORDER BY {text}".encode())
            with pytest.raises(WhereError, match="collation"):
                compile_order_by(text, types)
        compile_order_by('c, p, c || p COLLATE "C"', types)


def test_a_column_of_a_nondeterministic_collation_is_not_read_by_a_clause() -> None:
    columns = (("t", 0), ("ta", 1))
    infos = [ColumnInfo(name, "text", "b", dimensions, -1, False, False, False) for name, dimensions in columns]
    types = {info.name: info.where_type for info in infos}
    for clause in ("t = 'a'", "t LIKE 'a%'", "t ILIKE 'a'", "t COLLATE \"C\" = 'a'", "t < 'a'", "'a' = ANY(ta)",
                   "t || 'x' = 'ax'"):  # fmt: skip
        with pytest.raises(WhereError, match="nondeterministic collation"):
            compile_where(clause, (), types)
    assert compile_order_by("t", types).keys is None, "only the database can order it"
