"""Random tables, and the triggers by which PostgreSQL itself writes down every version that a row ever had.

    oracle.history   n, xid, tab, op, old, new        one row a row version, in the transaction that made it: what was
                                                      rolled back is not there
    public.ledger    n, xid, what                     one row a transaction, captured as any other: its topic says at
                                                      which commit LSN each xid is

History's values are text as `SELECT` prints it. After a change of description the whole table is written down again
(op S), since its rows have changed without a statement of their own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from oracle_types import ENUM, KEY_TYPES, MOODS, VALUES

SCHEMAS = ("public", "Odd s.chema")
_WORDS = (
    "plain",
    "We ird",
    'qu"ote',
    "do.t",
    "ünï",
    "sl/ash",
    "back\\slash",
    "UPPER",
    "select",
    "per%cent",
    "new\nline",
)

SETUP = f"""
CREATE SCHEMA oracle;
CREATE SCHEMA "{SCHEMAS[1]}";
CREATE TYPE {ENUM} AS ENUM ({", ".join("'" + mood.replace("'", "''") + "'" for mood in MOODS[:-1])});
CREATE TABLE oracle.history (n bigserial PRIMARY KEY, xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    tab int NOT NULL, op text NOT NULL, old jsonb, new jsonb);
CREATE TABLE public.ledger (n bigserial PRIMARY KEY, xid text NOT NULL DEFAULT pg_current_xact_id()::text, what text);
"""
LEDGER = "INSERT INTO public.ledger (what) VALUES (%s)"


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@dataclass
class Column:
    name: str
    kind: str
    default: str | None = None
    """Text of its literal; None = nullable, without a default."""

    @property
    def sql(self) -> str:
        rest = f" NOT NULL DEFAULT {literal(self.default)}::{self.bare}" if self.default is not None else ""
        return f"{identifier(self.name)} {self.kind}{rest}"

    @property
    def bare(self) -> str:
        return self.kind.partition(" COLLATE")[0]


def literal(text: str) -> str:
    quoted = "'" + text.replace("'", "''") + "'"
    return f" E{quoted}".replace("\\", "\\\\") if "\\" in text else quoted


@dataclass
class Table:
    """A random table. `number` is unique: a table re-created under the same name has another."""

    number: int
    schema: str
    name: str
    columns: list[Column]
    key: list[str]
    partitions: int = 0
    deferrable: str = ""
    """The INITIALLY of its deferrable key: IMMEDIATE or DEFERRED."""
    whole: bool = False
    """Set if the application itself gives it REPLICA IDENTITY FULL."""
    listed: str = ""
    """A publication of another owner that rules out REPLICA IDENTITY FULL: until it is dropped, the table is refused or
    parked."""
    broken: list[str] = field(default_factory=list)
    """Changes of its description since the last copy, any of which may park it."""
    changed: list[str] = field(default_factory=list)
    """All changes of its description."""
    breaks: int = 0
    """Number of its columns that were renamed or dropped so far."""
    left: set[str] = field(default_factory=set)
    """Former names of its renamed columns, and names of dropped ones."""
    again: set[str] = field(default_factory=set)
    """Names of `left` that another column has had since: a parked topic may have the old column under it."""
    rewritten: bool = False
    """Set by TRUNCATE or a change that rewrites all rows, reset by a copy."""
    gone: bool = False
    kept: bool = False
    """Set while a pipeline keeps it in a shard; a new copy keeps it set only if it was accepted for the shard, too."""

    def may_be_paused(self, reason: str) -> bool:
        """Return whether the table may be parked for this reason. A permitted change parks when the rows were rewritten
        within seconds before it, which looks like a volatile default, or when no shard column can hold its default, as
        NaN (docs/guides/capture.md)."""
        anew = self.rewritten and "the rows were rewritten" in reason
        return bool(self.broken) or (bool(self.changed) and (anew or "its default cannot be carried" in reason))

    def copied_again(self, known: int, *, accepted: bool) -> None:
        """Note a new copy. `known`: number of changes in `broken` when it was requested; later ones may be in the copy
        or not."""
        del self.broken[:known]
        self.rewritten = False
        self.kept = self.kept and accepted

    @property
    def sql_name(self) -> str:
        return f"{identifier(self.schema)}.{identifier(self.name)}"

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    @property
    def others(self) -> list[Column]:
        return [column for column in self.columns if column.name not in self.key]

    def ddl(self) -> list[str]:
        key = ", ".join(map(identifier, self.key))
        late = f" DEFERRABLE INITIALLY {self.deferrable}" if self.deferrable else ""
        body = ", ".join([*(column.sql for column in self.columns), f"PRIMARY KEY ({key}){late}"])
        by = f" PARTITION BY RANGE ({identifier(self.key[0])})" if self.partitions else ""
        statements = [f"CREATE TABLE {self.sql_name} ({body}){by}"]
        statements += [self.partition(number) for number in range(self.partitions)]
        statements += [f"ALTER TABLE {self.sql_name} REPLICA IDENTITY FULL"] * self.whole
        return [*statements, *self.watching()]

    def partition(self, number: int) -> str:
        """Return the statement for a partition of 40 keys; the first partition also takes all lower keys."""
        start = "MINVALUE" if number == 0 else str(number * 40)
        end = str((number + 1) * 40)
        name = f"{identifier(self.schema)}.{identifier(f'{self.name} p{number}')}"
        return f"CREATE TABLE {name} PARTITION OF {self.sql_name} FOR VALUES FROM ({start}) TO ({end})"

    def watching(self) -> list[str]:
        return [
            self.watcher(),
            f"CREATE TRIGGER oracle_rows AFTER INSERT OR UPDATE OR DELETE ON {self.sql_name}"
            f" FOR EACH ROW EXECUTE FUNCTION oracle.log_{self.number}()",
            f"CREATE TRIGGER oracle_truncate AFTER TRUNCATE ON {self.sql_name}"
            f" FOR EACH STATEMENT EXECUTE FUNCTION oracle.log_{self.number}()",
        ]

    def watcher(self) -> str:
        """Return the trigger function. The transaction that changes the description must replace it."""
        rows = "INSERT INTO oracle.history (tab, op, old, new) VALUES"
        old, new, n = self._object("OLD"), self._object("NEW"), self.number
        return f"""CREATE OR REPLACE FUNCTION oracle.log_{n}() RETURNS trigger LANGUAGE plpgsql AS $oracle$ BEGIN
            IF TG_OP = 'TRUNCATE' THEN {rows} ({n}, 'T', NULL, NULL);
            ELSIF TG_OP = 'INSERT' THEN {rows} ({n}, 'I', NULL, {new});
            ELSIF TG_OP = 'UPDATE' THEN {rows} ({n}, 'U', {old}, {new});
            ELSE {rows} ({n}, 'D', {old}, NULL); END IF;
            RETURN NULL; END $oracle$"""

    def written_down_again(self) -> list[str]:
        return [
            f"INSERT INTO oracle.history (tab, op) VALUES ({self.number}, 'R')",
            f"INSERT INTO oracle.history (tab, op, new) SELECT {self.number}, 'S', {self._object('r')}"
            f" FROM {self.sql_name} r",
        ]

    def _object(self, row: str) -> str:
        parts = []
        for column in self.columns:
            value = f"{row}.{identifier(column.name)}"
            shown = f"{value}::text" if column.kind == "boolean" else f"format('%s', {value})"
            parts.append(f"{literal(column.name)}, CASE WHEN {value} IS NULL THEN NULL ELSE {shown} END")
        return f"jsonb_build_object({', '.join(parts)})"

    def select(self, columns: Sequence[str] = (), where: str = "") -> str:
        """Return the query for every value as text, booleans as true and false."""
        shown = []
        for name in columns or self.names:
            value = identifier(name)
            text = f"{value}::text" if self.column(name).kind == "boolean" else f"format('%s', {value})"
            shown.append(f"CASE WHEN {value} IS NULL THEN NULL ELSE {text} END")
        return f"SELECT {', '.join(shown)} FROM {self.sql_name}" + (f" WHERE ({where})" if where else "")


def random_column(rand: random.Random, taken: Sequence[str], kind: str = "") -> Column:
    every = [*_WORDS, *(f"c{n}" for n in range(6))]
    free = [name for name in every if name not in taken]
    name = rand.choice(free or [f"c{n}" for n in range(6, 7 + len(taken)) if f"c{n}" not in taken])
    kind = kind or rand.choice(list(VALUES))
    return Column(name, kind)


def random_table(rand: random.Random, number: int, *, deferrable: bool = False) -> Table:
    """Return a random table. `deferrable`: half of those without partitions have such a key."""
    partitioned = rand.random() < 0.2
    kinds = ["integer" if partitioned else rand.choice(KEY_TYPES)]
    kinds += [rand.choice(KEY_TYPES) for _ in range(rand.choice([0, 0, 1, 2]))]
    if kinds == [ENUM]:
        kinds.append("integer")  # so few rows are no table
    columns: list[Column] = []
    for kind in kinds:
        columns.append(random_column(rand, [c.name for c in columns], kind))
    key = [column.name for column in columns]
    for _ in range(rand.randint(1, 7)):
        column = random_column(rand, [c.name for c in columns])
        if rand.random() < 0.3:
            column.default = VALUES[column.kind](rand)
        columns.append(column)
    rand.shuffle(columns)
    name = rand.choice(_WORDS) if rand.random() < 0.5 else "t"
    made = Table(number, rand.choice([*SCHEMAS, "public"]), f"{name} {number}", columns, key, 2 if partitioned else 0)
    if deferrable and not partitioned and rand.random() < 0.5:
        made.deferrable = rand.choice(["IMMEDIATE", "DEFERRED"])
    return made
