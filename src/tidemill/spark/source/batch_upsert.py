"""`tidemill.spark.upsert`: upsert the rows of a DataFrame into a table, in one append."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.spark.session.python_worker import translate_missing_source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DELETE_COLUMN = "_tidemill_delete"


def upsert(
    df: DataFrame,
    table: str,
    *,
    key: str | Sequence[str] = (),
    delete_when: Column | str | None = None,
    merge_schema: bool = False,
    config: str = "",
    objects: str = "",
    consensus: str = "",
) -> None:
    """Upsert the rows of `df` into `table`, all at one time; each key must occur once.

    `key`: its key columns ("a, b"), needed to create the table. `delete_when`: a condition, as a Column or in SQL; rows
    for which it is true delete their key. `merge_schema`: new columns and wider types become part of the table.
    `config`, `objects`, `consensus`: the cluster, chosen as by `read`. Raises Spark's exceptions, whose text is that of
    the error, and InvalidError if the session's Python has no tidemill.
    """
    options = {"config": config, "objects": objects, "consensus": consensus}
    options["key"] = key if isinstance(key, str) else ",".join(key)
    options["mergeSchema"] = "true" if merge_schema else ""
    if delete_when is not None:
        from pyspark.sql.functions import expr

        df = df.withColumn(DELETE_COLUMN, expr(delete_when) if isinstance(delete_when, str) else delete_when)
        options["delete"] = DELETE_COLUMN
    given = {name: value for name, value in options.items() if value}
    from tidemill.spark.source import source_format

    with translate_missing_source():
        df.write.format(source_format(df.sparkSession)).mode("append").options(**given).save(table)
