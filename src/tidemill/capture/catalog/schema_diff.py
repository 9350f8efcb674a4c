"""Describe the difference between two descriptions of a table in one sentence. Pure.

    stored      as of the table's snapshot: the description of its records and its shard
    stream      a Relation message: the description of the next rows (names and types only)
    catalogue   PostgreSQL's present description: type names and key, too; it may be ahead of the stream

schema_versions.py decides which difference is carried, and which one pauses the table.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.capture.changes import Relation
from tidemill.capture.postgres.pgoutput import RelationMessage
from tidemill.metastore.catalogue import CapturedColumn


def diff_against_catalogue(stored: Sequence[CapturedColumn], now: Relation) -> str:
    """Return the differences of the database from the stored description; "" = none."""
    said = _describe_column_changes(
        [(c.name, c.type_name) for c in stored], [(c.name, c.type_name) for c in now.columns]
    )
    key = [c.name for c in sorted((c for c in stored if c.key_index >= 0), key=lambda c: c.key_index)]
    key_now = [c.name for c in now.key_columns]
    if key != key_now:
        said.append(f"primary key ({', '.join(key)}) is now {'(' + ', '.join(key_now) + ')' if key_now else 'gone'}")
    return "; ".join(said)


def diff_against_stream(stored: Sequence[CapturedColumn], message: RelationMessage, now: Relation | None) -> str:
    """Return the differences of the stream's next rows from the stored description; "" = none.

    `now` only supplies type names, because the stream has types by number.
    """
    if any(not c.type_oid for c in stored):
        return _describe_name_changes([c.name for c in stored], [c.name for c in message.columns])
    ours = {(c.name, c.type_oid, c.type_mod) for c in stored}
    theirs = {(c.name, c.type_oid, c.type_mod) for c in message.columns}
    if ours == theirs:
        return ""
    words = {(c.name, c.type_oid, c.type_mod): c.type_name for c in now.columns} if now is not None else {}
    return "; ".join(
        _describe_column_changes(
            [(c.name, c.type_name) for c in stored],
            [
                (c.name, known.get(c.name, "") if (c.name, c.type_oid, c.type_mod) in ours
                 else words.get((c.name, c.type_oid, c.type_mod), f"type {c.type_oid}/{c.type_mod}"))
                for known in [{k.name: k.type_name for k in stored}]
                for c in message.columns
            ],
        )
    )  # fmt: skip


def _describe_column_changes(old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]) -> list[str]:
    before, after = dict(old), dict(new)
    said = [f"column {n!r} {t} is new" for n, t in new if n not in before]
    said += [f"column {n!r} is gone" for n, _ in old if n not in after]
    said += [f"column {n!r} was {t} and is {after[n]}" for n, t in old if n in after and after[n] != t]
    return said


def _describe_name_changes(old: Sequence[str], new: Sequence[str]) -> str:
    return "; ".join(_describe_column_changes([(n, "") for n in old], [(n, "") for n in new]))
