"""Find the types of which a table's columns consist, and whether earlier values now read differently. Pure, except for
one query.

    composite   ADD or DROP ATTRIBUTE, for a table's row type its columns     every old value reads differently
    enum        RENAME VALUE                                                  values of that label do
                ADD VALUE                                                     none: only the labels that existed
                                                                              before are compared
    array, domain, range, multirange                                          like their element types, at any depth

PostgreSQL stores numbers of attributes and labels, and no message of the stream reports that they were altered. Only a
copy of the table reads all rows as SELECT does.

A type is stored as `structure|enum:labels:hash|…`, by the oid of the column's type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from tidemill.capture.postgres.connection import PgConnection

FIRST_USER_OID = 16_384
"""Oids below are those of PostgreSQL's own types, which are never altered."""
_HASH_DIGITS = 16

_MEMBERS_SQL = """
SELECT m.typelem AS oid WHERE m.typelem <> 0
UNION ALL SELECT m.typbasetype WHERE m.typbasetype <> 0
UNION ALL SELECT r.rngsubtype FROM pg_range r WHERE m.oid IN (r.rngtypid, r.rngmultitypid)
UNION ALL SELECT d.atttypid FROM pg_attribute d WHERE m.typrelid <> 0 AND d.attrelid = m.typrelid AND d.attnum > 0
   AND NOT d.attisdropped
"""
"""Member types of the row m of pg_type."""

_ITEMS_SQL = """
SELECT concat_ws(' ', 'a', d.attnum, d.atttypid, d.atttypmod) AS item, d.attnum::bigint AS place FROM pg_attribute d
 WHERE m.typrelid <> 0 AND d.attrelid = m.typrelid AND d.attnum > 0 AND NOT d.attisdropped
UNION ALL SELECT 'e ' || e.enumlabel, e.oid::bigint FROM pg_enum e WHERE e.enumtypid = m.oid
"""

_TYPES_OF_TABLES_SQL = f"""
WITH RECURSIVE tree(root, oid) AS (
    SELECT DISTINCT a.atttypid, a.atttypid FROM pg_attribute a WHERE a.attrelid IN ({{oids}}) AND a.attnum > 0
       AND NOT a.attisdropped AND a.atttypid >= {FIRST_USER_OID}
    UNION SELECT t.root, x.oid FROM tree t JOIN pg_type m ON m.oid = t.oid CROSS JOIN LATERAL ({_MEMBERS_SQL}) x)
SELECT t.root, t.oid, i.item FROM tree t JOIN pg_type m ON m.oid = t.oid CROSS JOIN LATERAL ({_ITEMS_SQL}) i
 ORDER BY t.root, t.oid, i.place
"""

TYPES_HASH_SQL = f"""
(WITH RECURSIVE used(oid) AS (
    SELECT DISTINCT a.atttypid FROM pg_attribute a JOIN pg_class k ON k.oid = a.attrelid
     WHERE k.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= {FIRST_USER_OID}
    UNION SELECT x.oid FROM used u JOIN pg_type m ON m.oid = u.oid CROSS JOIN LATERAL ({_MEMBERS_SQL}) x)
 SELECT coalesce(md5(string_agg(concat_ws(' ', m.oid, i.item), E'\\t' ORDER BY m.oid, i.place)), '')
   FROM used u JOIN pg_type m ON m.oid = u.oid CROSS JOIN LATERAL ({_ITEMS_SQL}) i)
"""
"""Hash of all types of which columns of tables consist. A different one requires a closer check."""


async def read_component_types(wire: PgConnection, oids: Sequence[int]) -> dict[int, dict[int, list[str]]]:
    """Return, by the type of a column of these tables, the types of which it consists, with their attributes and
    labels.
    """
    rows = await wire.query(_TYPES_OF_TABLES_SQL.format(oids=", ".join(str(int(oid)) for oid in oids)))
    found: dict[int, dict[int, list[str]]] = {}
    for root, member, item in rows:
        found.setdefault(int(root or 0), {}).setdefault(int(member or 0), []).append(item or "")
    return found


def serialize_type(members: Mapping[int, Sequence[str]], labels: Mapping[int, int] | None = None) -> str:
    """Return the stored form of a type. `labels`: number of labels of each enum to include."""
    parts, structure = [], hashlib.sha256()
    for oid, items in sorted(members.items()):
        if items[0].startswith("a "):
            structure.update(f"{oid} {' '.join(items)}\n".encode())
            continue
        count = len(items) if labels is None else labels.get(oid, 0)
        said = "\t".join(items[:count]).encode(errors="surrogateescape")
        parts.append(f"{oid}:{count}:{hashlib.sha256(said).hexdigest()[:_HASH_DIGITS]}")
    return "|".join([structure.hexdigest()[:_HASH_DIGITS], *parts])


def is_compatible_type(stored: str, members: Mapping[int, Sequence[str]]) -> bool:
    """Return whether values of a type with this stored form read as they did."""
    counts: dict[int, int] = {}
    for part in stored.split("|")[1:]:
        oid, count, _ = part.split(":")
        counts[int(oid)] = int(count)
    return serialize_type(members, counts) == stored
