"""`lower`, `upper` and ILIKE under every collation that a column may have, against PostgreSQL letter by letter."""

from __future__ import annotations

import psycopg
import pytest

from tidemill.shapes.definition.table_columns import DESCRIBE_SQL, ColumnInfo
from tidemill.shapes.where import WhereError, compile_where

pytestmark = pytest.mark.postgres

COLLATIONS = ["default", "C", "POSIX", "ucs_basic", "C.utf8", "pg_c_utf8", "pg_unicode_fast"]
WORDS = [
    "aÉb",
    "aéb",
    "É",
    "é",
    "ß",
    "SS",
    "ss",
    "İ",
    "i",
    "I",
    "ı",
    "ΑΣ",
    "ας",
    "ασ",
    "ǅ",
    "ǆ",
    "ᾳ",
    "ᾼ",
    "ŉ",
    "漢",
    "A_z",
]
CLAUSES = [
    "lower({c}) = {w}", "upper({c}) = {w}", "{c} ILIKE {w}", "{w} ILIKE {c}", "NOT ({c} NOT ILIKE '_É%')",
    "({c} || 'É') ILIKE ({w} || 'é')", "lower({c} || 'Σ') = {w} || 'σ'", "COALESCE({c}, 'x') ILIKE {w}",
    "concat({c}, 'É') ILIKE concat({w}, 'é')", 'lower({c} COLLATE "C") = {w}', '{c} COLLATE "C" ILIKE {w}',
]  # fmt: skip


def test_letters_in_two_cases_are_those_of_the_columns_collation(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        # initdb finds the collations of libc only where the program `locale` is installed.
        connection.execute("""CREATE COLLATION IF NOT EXISTS "C.utf8" (provider = libc, locale = 'C.UTF-8')""")
        columns = ", ".join(f'c{n} text COLLATE "{name}"' for n, name in enumerate(COLLATIONS))
        connection.execute(f"CREATE TABLE w (n int, {columns})".encode())
        for n, word in enumerate(WORDS):
            connection.execute(f"INSERT INTO w VALUES (%s{', %s' * len(COLLATIONS)})".encode(), [n, *[word] * 7])
        oid = connection.execute("SELECT 'w'::regclass::oid").fetchone()[0]  # type: ignore[index]
        types = {
            info.name: info.where_type
            for info in (ColumnInfo(*row) for row in connection.execute(DESCRIBE_SQL, (oid,)).fetchall())
        }
        for n, name in enumerate(COLLATIONS):
            for clause in CLAUSES:
                for literal in WORDS:
                    text = clause.format(c=f"c{n}", w="'" + literal + "'")
                    where = compile_where(text, (), types)
                    found = [word for word in WORDS if where.matches({f"c{n}": word})]
                    rows = connection.execute(f"SELECT c{n} FROM w WHERE {text} ORDER BY n".encode()).fetchall()
                    assert found == [word for (word,) in rows], (name, text)
        assert types["c1"].folding == types["c3"].folding == "ascii" and types["c6"].folding == "full"
        with pytest.raises(WhereError, match="different collations"):
            compile_where("c2 || c1 ILIKE 'a'", (), types)
        compile_where("c0 || c1 = 'a' OR COALESCE(c0, c1) = 'b'", (), types)
