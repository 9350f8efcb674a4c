"""Tables of a catalogue: `CREATE TABLE … USING tidemill OPTIONS (…)`.

Spark 4.3 passes a Python data source the options of such a table when it is created, but when it is read only the
schema that the catalogue stores. So the options are stored in that schema, as metadata of its first column.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tidemill.spark.source.options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

METADATA = "tidemill.options"


def keep_options(schema: StructType, options: SourceOptions) -> StructType:
    schema.fields[0].metadata = {METADATA: json.dumps(options.as_text())}
    return schema


def table_options(schema: StructType) -> dict[str, str]:
    """Return the options of the table with this schema; empty if it is not a table's schema."""
    kept = next((f.metadata[METADATA] for f in schema.fields if METADATA in (f.metadata or {})), "{}")
    found: dict[str, str] = json.loads(kept)
    return found
