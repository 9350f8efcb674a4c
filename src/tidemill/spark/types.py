"""Types of shard columns in Spark: as Spark types, so that Arrow batches of shards match DataFrames exactly; and from a
`StructType` or its DDL (ddl.py). DataFrames of Arrow rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.nested.type_names import ArrayType, MapType, array_name, map_name, nested_type, struct_name
from tidemill.shards.parts.schema import canonical_type, check_schema
from tidemill.spark.ddl import parse_ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

Names = str | Sequence[str]
"""Names of columns or tables: one, several separated by commas, or a sequence."""
COMMAND_META = (("_time", "int64"), ("_order", "int64"), ("_partition", "int32"), ("_live", "bool"))


def spark_type(type_name: str) -> DataType:
    from pyspark.sql import types as t

    nested = nested_type(type_name)
    if isinstance(nested, ArrayType):
        return t.ArrayType(spark_type(nested.element))
    if isinstance(nested, MapType):
        return t.MapType(spark_type(nested.key), spark_type(nested.value))
    if nested is not None:
        return t.StructType([t.StructField(name, spark_type(kind)) for name, kind in nested.fields])
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


def local_frame(spark: SparkSession, rows: pa.Table, schema: StructType) -> DataFrame:
    """Return a DataFrame of Arrow rows.

    Nested columns are copied: PySpark cannot convert a slice of a nested array that contains nulls, nor a column
    without chunks.
    """
    for place, field in enumerate(rows.schema):
        if pa.types.is_nested(field.type):
            chunks = rows.column(place).chunks or [pa.nulls(0, field.type)]
            copies = pa.chunked_array([_copied(chunk) for chunk in chunks], field.type)
            rows = rows.set_column(place, field, copies)
    return spark.createDataFrame(rows, schema)


def _copied(array: pa.Array) -> pa.Array:
    """Return a copy of exactly these values: no array within it has an offset."""
    batch = pa.record_batch([array], ["value"])
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema).column(0)


def columns_of(schema: StructType) -> tuple[Column, ...]:
    """Return a DataFrame's columns as shard columns. Raises InvalidError for a column type that shards do not
    support."""
    return tuple(Column(field.name, _column_type(field, field.dataType)) for field in schema.fields)


def _column_type(field: StructField, kind: DataType) -> str:
    """Return the type of a column of `field`, or of a part of it."""
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
        t.CharType: "string",
        t.VarcharType: "string",
        t.BinaryType: "binary",
        t.DateType: "date",
        t.TimestampType: "timestamp",
        t.TimestampNTZType: "timestamp_ntz",
    }
    if isinstance(kind, t.DecimalType):
        return f"decimal({kind.precision},{kind.scale})"
    if isinstance(kind, t.ArrayType):
        return canonical_type(array_name(_column_type(field, kind.elementType)))
    if isinstance(kind, t.MapType):
        return canonical_type(map_name(_column_type(field, kind.keyType), _column_type(field, kind.valueType)))
    if isinstance(kind, t.StructType):
        return canonical_type(struct_name([(each.name, _column_type(field, each.dataType)) for each in kind.fields]))
    if type(kind) not in names:
        raise _unsupported_type_error(field)
    return names[type(kind)]


def _unsupported_type_error(field: StructField) -> InvalidError:
    return InvalidError(
        f"column type is not supported in a table: column={field.name} type={field.dataType.simpleString()}.",
        fix="Cast it, e.g. to string.",
    )


def stream_schema(schema: str | StructType, key: Names) -> ShardSchema:
    """Return the shard schema of a stream topic: declared columns, as a StructType or in Spark's DDL, and the names of
    the key. Raises InvalidError."""
    names = key_names(key)
    return check_schema(ShardSchema(declared_columns(schema), names))


def key_names(key: Names) -> tuple[str, ...]:
    """Return the names of a key. Raises InvalidError if no column is named."""
    names = split_names(key)
    if not names or not all(names):
        raise InvalidError("a table needs a key.", fix='Name the key columns, e.g. key="click_id".')
    return names


def declared_columns(schema: str | StructType) -> tuple[Column, ...]:
    """Return the columns of a StructType or of Spark's DDL. Raises InvalidError."""
    if isinstance(schema, str):
        return parse_ddl(schema)
    if not hasattr(schema, "fields"):
        raise InvalidError(
            f"not a schema: schema={schema!r}.", fix='Give a StructType, or its text in Spark\'s DDL: "name type, …".'
        )
    for field in schema.fields:
        if "collate" in field.dataType.simpleString():
            raise _unsupported_type_error(field)
    return columns_of(schema)


def split_names(given: Names) -> tuple[str, ...]:
    """Return one name or several, given as a sequence or as text ("a, b"), as a tuple. Raises InvalidError."""
    names = given.split(",") if isinstance(given, str) else given
    try:
        return tuple(name.strip() for name in names)
    except (TypeError, AttributeError) as error:
        raise InvalidError(f"these are no names: given={given!r}.", fix='Give "a", "a, b" or ("a", "b").') from error
