"""Shard columns as Spark types, so that Arrow batches of shards match DataFrames exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

COMMAND_META = (("_time", "int64"), ("_order", "int64"), ("_partition", "int32"), ("_live", "bool"))


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
                f"column type is not supported in a shard: column={field.name} type={kind.simpleString()}.",
                fix="Cast it, e.g. to string.",
            )
    return tuple(out)
