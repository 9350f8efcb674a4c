"""A table with a column of each type, and its rows as PostgreSQL prints them."""

from __future__ import annotations

from support.capture.world import World

DIGITS = "1234567890" * 20

BUILT_IN: dict[str, list[str]] = {
    "boolean": ["true", "false"],
    "smallint": ["-32768", "32767"],
    "integer": ["-2147483648", "2147483647", "0"],
    "bigint": ["-9223372036854775808", "9007199254740993"],
    "real": ["NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4028235e38", "0.1"],
    "double precision": ["NaN", "Infinity", "-Infinity", "-0", "5e-324", "1.7976931348623157e308", "0.1", "1e20"],
    "numeric": ["NaN", "Infinity", "-Infinity", "-0.00", DIGITS, f"-0.{DIGITS}", f"{DIGITS}.{DIGITS}", "1.500"],
    "numeric(12,2)": ["1.50", "-0.01", "9999999999.99"],
    "numeric(38,10)": ["1234567890123456789012345678.0123456789"],
    "numeric(5,-2)": ["1234500"],
    "numeric(2,4)": ["0.0012"],
    "money": ["12.34", "-92233720368547758.08"],
    "text": ["", "NULL", "\\N", "tab\tline\nreturn\rquote\"'back\\\b\f\v\x01\x7f", "é😀\u2028", "x" * 100],
    "character varying(20)": ["  padded  "],
    "character(6)": ["ab"],
    "name": ["a name"],
    '"char"': ["x", "\\377"],
    "bytea": ["\\x", "\\x00ff5c27"],
    "date": ["infinity", "-infinity", "0044-03-15 BC", "5874897-12-31", "2026-02-03", "10000-01-01"],
    "time without time zone": ["24:00:00", "12:00:00.123456"],
    "time(3) without time zone": ["12:00:00.1234"],
    "time with time zone": ["12:00:00.5+05:30", "24:00:00-15:59"],
    "timestamp without time zone": ["infinity", "-infinity", "0044-03-15 12:00 BC", "2026-03-29 02:30:00.000001"],
    "timestamp(3) without time zone": ["9999-12-31 23:59:59.999", "10000-01-01"],
    "timestamp with time zone": ["infinity", "-infinity", "0044-03-15 12:00+00 BC", "2026-11-21 03:00+05:30"],
    "timestamp(0) with time zone": ["2026-11-21 03:00:00.5Z"],
    "interval": ["1 year 2 mons -3 days 04:05:06.789", "infinity", "-infinity", "-1 mon", "0", "-0.000001 sec"],
    "interval day to second": ["1 12:59:10"],
    "uuid": ["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"],
    "json": ['{"a":  1, "a": [NULL]}'.replace("NULL", "null"), "1e400", '"\\u00e9"'],
    "jsonb": ['{"b": 1, "a": 1.10}', "null"],
    "jsonpath": ["$.a[*] ? (@ > 1)"],
    "inet": ["10.0.0.1", "10.0.0.1/8", "::1"],
    "cidr": ["10.0.0.0/8"],
    "macaddr": ["08:00:2B:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "bit(5)": ["10101"],
    "bit varying": ["", "101"],
    "point": ["(1.5,-0)", "(Infinity,NaN)"],
    "line": ["{1,-1,0}"],
    "lseg": ["[(0,0),(1,1)]"],
    "box": ["(1,1),(0,0)"],
    "path": ["[(0,0),(1,1)]", "((0,0),(1,1))"],
    "polygon": ["((0,0),(1,1),(1,0))"],
    "circle": ["<(0,0),2>"],
    "tsvector": ["'a':1A,2 'b c'"],
    "tsquery": ["'a' & !'b':*"],
    "pg_lsn": ["16/B374D848"],
    "pg_snapshot": ["10:20:10,14"],
    "txid_snapshot": ["10:20:10,14"],
    "oid": ["0", "4294967295"],
    "tid": ["(1,2)"],
    "xid": ["4294967295"],
    "xid8": ["18446744073709551615"],
    "cid": ["7"],
    "refcursor": ["a cursor"],
    "aclitem": ["postgres=r/postgres"],
    "regclass": ["pg_class", "kinds"],
    "regcollation": ['"C"'],
    "regconfig": ["english"],
    "regdictionary": ["simple"],
    "regnamespace": ["public"],
    "regoper": ["||/"],
    "regoperator": ["+(integer,integer)"],
    "regproc": ["now"],
    "regprocedure": ["abs(integer)"],
    "regrole": ["postgres"],
    "regtype": ["timestamp with time zone"],
    "int4range": ["empty", "[1,5)", "(,)"],
    "int8range": ["[1,9223372036854775807)"],
    "numrange": ["[1.50,NaN]", "(,Infinity]"],
    "daterange": ["[2026-01-01,infinity]"],
    "tsrange": ['["2026-01-01 00:00:00",infinity)'],
    "tstzrange": ["[2026-01-01 00:00+05:30,)"],
    "int4multirange": ["{[1,2),[4,9)}", "{}"],
    "int8multirange": ["{[1,2)}"],
    "nummultirange": ["{[1.0,2.0)}"],
    "datemultirange": ["{[2026-01-01,2026-02-01)}"],
    "tsmultirange": ["{[2026-01-01,2026-02-01)}"],
    "tstzmultirange": ["{[2026-01-01,2026-02-01)}"],
}

MADE = {
    "positive": ["1", "2147483647"],
    "words": ["{a,b}"],
    "mood": ["so so", 'it\'s "great", {really}'],
    "place": ['(1,"a ""b"", c",)', "(,,)"],
    "floats": ["[0.5,Infinity]"],
    "hstore": ['"a"=>"1", "b c"=>NULL, "q\\"t"=>"\\\\"'],
    "citext": ["Mixed Case"],
    "positive[]": ["{1,NULL,7}"],
    "hours": ["2026-03-29 02:30:00.5", "-infinity"],
    "exact": ["-0", "NaN", "0.1"],
    "floats[]": ['{"[0.5,Infinity]",empty}'],
    "floats_multirange": ["{[0.5,1),[2,Infinity]}", "{}"],
    "hstore[]": ['{"\\"a\\"=>\\"1\\"",NULL}'],
    "citext[]": ["{Mixed,NULL}"],
    "mood[]": ['{"so so","it\'s \\"great\\", {really}"}'],
    "place[]": ['{"(1,\\"a,b\\",)"}'],
    "integer[]": ["{}", "{1,NULL,3}", "[0:1]={1,2}", "{NULL}"],
    "text[]": ['{NULL,"NULL",null1,"","a,b","{}","q\\"\\\\"," ","é😀,\u2028"}', "{}", '[-1:0]={a,"\\"b"}'],
    "grid": ["{{1,2},{3,4}}", "[0:0][2:3]={{1,NULL}}"],
    "words[]": ['{"{a,b}","{}"}'],
}
"""Types that the database itself derives, and arrays of several dimensions."""

DDL = [
    "CREATE EXTENSION hstore",
    "CREATE EXTENSION citext",
    "CREATE DOMAIN positive AS integer CHECK (VALUE > 0)",
    "CREATE DOMAIN words AS text[]",
    "CREATE DOMAIN grid AS integer[]",
    "CREATE DOMAIN hours AS timestamp",
    "CREATE DOMAIN exact AS double precision",
    """CREATE TYPE mood AS ENUM ('so so', 'it''s "great", {really}')""",
    "CREATE TYPE place AS (x integer, y text, z mood)",
    "CREATE TYPE floats AS RANGE (subtype = float8)",
]

NAMES = [
    'quote"in"it', "back\\slash", "it's", "tab\there", "line\nbreak", "größe", "😀", " blanks ", "%s", "{x}", "select",
    "$1", "a.b", "é" * 31, "null", "\x01",
]  # fmt: skip
"""Names that the first columns get."""


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    return " E'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def columns() -> list[tuple[str, str, list[str]]]:
    """(name, type, literals): each type, and an array of it with all its values."""
    out = [(kind, values) for kind, values in (BUILT_IN | MADE).items()]
    for kind, values in BUILT_IN.items():
        out.append((f"{kind}[]", [f"ARRAY[NULL,{','.join(f'{literal(v)}::{kind}' for v in values)}]"]))
    return [(NAMES[n] if n < len(NAMES) else f"c{n}", kind, values) for n, (kind, values) in enumerate(out)]


async def filled(world: World) -> int:
    """The table, with as many rows as a type has values."""
    found = columns()
    await world.sql(*DDL, "CREATE TABLE kinds (id integer PRIMARY KEY)")
    added = ", ".join(f"ADD {quoted(name)} {kind}" for name, kind, _ in found)
    count = max(len(values) for _, _, values in found)
    await world.sql(f"ALTER TABLE kinds {added}")
    for n in range(count):
        row = [
            (v[n] if v[n].startswith("ARRAY[") else literal(v[n])) + f"::{kind}" if n < len(v) else "NULL"
            for _, kind, v in found
        ]
        await world.sql(f"INSERT INTO kinds VALUES ({n}, {', '.join(row)})")
    return count


async def selected(world: World, query: str) -> list[list[str | None]]:
    """The text that PostgreSQL sends, before any client makes something of it."""
    cursor = await world.connection.execute(query)
    result = cursor.pgresult
    raw = [[result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)]
    return [[None if value is None else bytes(value).decode() for value in row] for row in raw]
