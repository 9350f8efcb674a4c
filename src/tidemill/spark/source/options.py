"""Options of `format("tidemill")`: text with case-insensitive keys, all of which must be known.

A table of a Spark catalogue has options, too (`CREATE TABLE … USING tidemill OPTIONS (…)`). Spark 4.3 passes them to a
Python data source when the table is created. When it is read, Spark passes only the schema that the catalogue stores.
So the options are stored in that schema, as metadata of its first column.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import InvalidError, unknown_name_fix
from tidemill.shards.read.holds import LATEST, as_of_ms
from tidemill.spark.settings import OBJECTS_VARIABLE, StoreUrls, find_cluster

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

CLUSTER = ("config", "objects", "consensus")
BATCH = ("table", "path", "as_of")
STREAM = ("source", "table", "schema", "key", "rows", "start", "max_rows", "pace_ms",
          "mode", "columnnameofcorruptrecord")  # fmt: skip
CHANGES = ("table", "path", "changes", "start", "max_rows")
WRITE = ("table", "path", "key", "delete", "mergeschema", "beside")
STREAM_WRITE = (*WRITE, "checkpointlocation", "queryname")

EARLIER = ("shard",)
"""Earlier name of `table` where it names a table that pipelines maintain: accepted, and not suggested."""

METADATA = "tidemill.options"


class SourceOptions:
    """Options of one read or write. All methods raise InvalidError naming the option. `registered`: URLs from
    `register`."""

    def __init__(self, options: Mapping[str, str], registered: Mapping[str, str] | None = None) -> None:
        self._options = _catalogue_options({key.lower(): value for key, value in options.items()})
        self._registered = dict(registered or {})
        known = tuple(dict.fromkeys((*CLUSTER, *BATCH, *STREAM, *CHANGES, *STREAM_WRITE)))
        for key in self._options:
            if key not in (*known, *EARLIER):
                raise InvalidError(f"unknown option: option={key}.", fix=unknown_name_fix(key, known))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the resolved cluster: each process finds the cluster itself."""
        return {key: value for key, value in self.__dict__.items() if key != "urls"}

    def check_applicable(self, names: tuple[str, ...], of: str) -> None:
        """Reject options that have no effect on this operation."""
        named = EARLIER if "path" in names else ()
        for key in self._options:
            if key not in (*CLUSTER, *names, *named):
                raise InvalidError(
                    f"option has no effect on {of}: option={key}.",
                    fix=f"Remove it; {of} accepts {', '.join(names)}.",
                )

    def text(self, key: str, default: str = "") -> str:
        return self._options.get(key, default)

    def required(self, key: str, fix: str) -> str:
        found = self.text(key)
        if not found:
            raise InvalidError(f"option is missing: option={key}.", fix=fix)
        return found

    def number(self, key: str, default: int) -> int:
        try:
            return int(self.text(key, str(default)))
        except ValueError as error:
            raise InvalidError(f"option is not a number: option={key} value={self.text(key)!r}.") from error

    def flag(self, key: str, default: bool) -> bool:
        value = self.text(key, str(default)).lower()
        if value not in ("true", "false"):
            raise InvalidError(f"option is neither true nor false: option={key} value={value!r}.")
        return value == "true"

    def as_text(self) -> dict[str, str]:
        return dict(self._options)

    @cached_property
    def urls(self) -> StoreUrls:
        objects, consensus, config = (self.text(key) for key in ("objects", "consensus", "config"))
        return find_cluster(objects, consensus, config, self._registered)

    @property
    def objects(self) -> str:
        """URL of the bucket for partitions; "" if the workers' environment has it."""
        is_default = not any(self.text(key) for key in ("objects", "config")) and not self._registered
        return "" if is_default and os.environ.get(OBJECTS_VARIABLE) else self.urls.objects

    @property
    def shard(self) -> str:
        """Name of the table that pipelines maintain, or "" if this reads something else: with a source, `table` is a
        table of the captured database."""
        names = ("path", "shard") if self.text("source") else ("table", "path", "shard")
        given = {name: self.text(name) for name in names if self.text(name)}
        if len(set(given.values())) > 1:
            said = " ".join(f"{name}={value}" for name, value in given.items())
            raise InvalidError(f"two tables are named: {said}.", fix="Name only one, with option table.")
        return next(iter(given.values()), "")

    @property
    def as_of_ms(self) -> int | None:
        """Time to read at; None = the newest."""
        return as_of_ms(self.text("as_of", LATEST))

    @property
    def source(self) -> str:
        return self.required("source", "Set it to topic/<name> or capture/<name>, or set table for a batch read.")


def is_create_table(options: Mapping[str, str]) -> bool:
    """Return whether these are options of CREATE TABLE, which also passes the table's properties (owner, comment)."""
    return "provider" in options


def _catalogue_options(options: dict[str, str]) -> dict[str, str]:
    """Return the options among a catalogue's properties: those with a copy `option.KEY`, and the path."""
    if not is_create_table(options):
        return options
    named = {key.removeprefix("option."): value for key, value in options.items() if key.startswith("option.")}
    return named | {key: value for key, value in options.items() if key == "path"}


def keep_options(schema: StructType, options: SourceOptions) -> StructType:
    schema.fields[0].metadata = {METADATA: json.dumps(options.as_text())}
    return schema


def table_options(schema: StructType) -> dict[str, str]:
    """Return the options of the table with this schema; empty if it is not a table's schema."""
    kept = next((f.metadata[METADATA] for f in schema.fields if METADATA in (f.metadata or {})), "{}")
    found: dict[str, str] = json.loads(kept)
    return found
