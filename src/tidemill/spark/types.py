"""Types of shard columns in Spark: as Spark types, so that Arrow batches of shards match DataFrames exactly; and from
declarations in Spark's DDL (`"click_id string, product_id long, at timestamp"`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.schema import canonical_type, check_schema

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

COMMAND_META = (("_time", "int64"), ("_order", "int64"), ("_partition", "int32"), ("_live", "bool"))

_TYPES = {
    "string": "string",
    "boolean": "bool",
    "bool": "bool",
    "short": "int16",
    "smallint": "int16",
    "int": "int32",
    "integer": "int32",
    "long": "int64",
    "bigint": "int64",
    "float": "float32",
    "real": "float32",
    "double": "float64",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
    "json": "json",
}
_DECIMAL = re.compile(r"(?:decimal|numeric)\((\d+),(\d+)\)")
_COLUMN = re.compile(r"\s*(?:`([^`]+)`|(\w+))\s+([A-Za-z_]+(?:\s*\(\s*\d+\s*,\s*\d+\s*\))?)\s*(?:,|$)")


_COLUMN_DECLARATION = re.compile(
    r"\s*(?:`([^`]+)`|(\w+))\s+(\w+(?:\s*\([^)]*\))?)(?:\s+default\s+(.+?))?\s*", re.IGNORECASE | re.DOTALL
)


def spark_type(type_name: str) -> DataType:
    from pyspark.sql import types as t

    if type_name.startswith("decimal("):
        precision, scale = type_name[8:-1].split(",")
        return t.DecimalType(int(precision), int(scale))
    plain: dict[str, Any] = {
        "bool": t.BooleanType,
        "int16": t.ShortType,
        "int32": t.IntegerType,
        "int64": t.LongType,
        "float32": t.FloatType,
        "float64": t.DoubleType,
        "string": t.StringType,
        "json": t.StringType,
        "binary": t.BinaryType,
        "date": t.DateType,
        "timestamp": t.TimestampType,
        "timestamp_ntz": t.TimestampNTZType,
    }
    found: DataType = plain[type_name]()
    return found


def spark_schema(columns: Iterable[Column]) -> StructType:
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(c.name, spark_type(c.type), True) for c in columns])


def columns_of(schema: StructType) -> tuple[Column, ...]:
    """Return a DataFrame's columns as shard columns. Raises InvalidError for a column type that shards do not
    support."""
    from pyspark.sql import types as t

    names = {
        t.BooleanType: "bool",
        t.ByteType: "int16",
        t.ShortType: "int16",
        t.IntegerType: "int32",
        t.LongType: "int64",
        t.FloatType: "float32",
        t.DoubleType: "float64",
        t.StringType: "string",
        t.BinaryType: "binary",
        t.DateType: "date",
        t.TimestampType: "timestamp",
        t.TimestampNTZType: "timestamp_ntz",
    }
    out = []
    for field in schema.fields:
        kind = field.dataType
        if isinstance(kind, t.DecimalType):
            out.append(Column(field.name, f"decimal({kind.precision},{kind.scale})"))
        elif type(kind) in names:
            out.append(Column(field.name, names[type(kind)]))
        else:
            raise InvalidError(
                f"column type is not supported in a table: column={field.name} type={kind.simpleString()}.",
                fix="Cast it, e.g. to string.",
            )
    return tuple(out)


def parse_column(text: str) -> Column:
    """Parse `name type` or `name type default value`; types by Spark's or the shard's names, text quoted or unquoted.

    Raises InvalidError naming the text that does not parse.
    """
    found = _COLUMN_DECLARATION.fullmatch(text)
    if found is None:
        raise InvalidError(
            f"column does not parse: column={text!r}.", fix='Write "name type" or "name type default value".'
        )
    kind = found[3].lower().replace(" ", "")
    default: str | None = found[4]
    if default is not None and len(default) > 1 and default[0] == default[-1] == "'":
        default = default[1:-1].replace("''", "'")
    elif default is not None and default.lower() == "null":
        default = None
    kind = kind.replace("numeric(", "decimal(")
    return Column(found[1] or found[2], _TYPES.get(kind) or canonical_type(kind), default)


def parse_ddl(text: str) -> tuple[Column, ...]:
    """Return the columns in order. Raises InvalidError naming the text that does not parse."""
    out: list[Column] = []
    at = 0
    while at < len(text.rstrip()):
        found = _COLUMN.match(text, at)
        if found is None:
            raise InvalidError(
                f"schema does not parse: at={text[at : at + 40]!r}.", fix='Write "name type, name type".'
            )
        kind = found[3].lower().replace(" ", "")
        decimal = _DECIMAL.fullmatch(kind)
        mapped = f"decimal({decimal[1]},{decimal[2]})" if decimal else _TYPES.get(kind)
        if mapped is None:
            raise InvalidError(
                f"no such type: type={found[3]!r}.", fix=f"Use one of {', '.join(_TYPES)} or decimal(p,s)."
            )
        out.append(Column(found[1] or found[2], mapped))
        at = found.end()
    return tuple(out)


def stream_schema(ddl: str, key: str | tuple[str, ...]) -> ShardSchema:
    """Return the shard schema of a stream topic: declared columns, and the names of the key. Raises InvalidError."""
    names = tuple(n.strip() for n in key.split(",")) if isinstance(key, str) else tuple(key)
    if not names or not all(names):
        raise InvalidError("a table needs a key.", fix='Name the key columns, e.g. key="click_id".')
    return check_schema(ShardSchema(parse_ddl(ddl), names))
