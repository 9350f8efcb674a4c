"""A plain program whose Spark runs a Python without tidemill: `python other_python_child.py DIRECTORY`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # the packages of tests

from pyspark.sql import SparkSession

from support.spark.harbour import Harbour
from support.spark.wide_table import SCHEMA, append, rows
from tidemill.base.errors import InvalidError
from tidemill.shards.api import ShardSchema
from tidemill.spark import read, register

assert "PYSPARK_PYTHON" not in os.environ
harbour = Harbour(Path(sys.argv[1]))
cluster = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
keyless = ShardSchema(SCHEMA.columns, ())
append(harbour, "events", 10, rows(range(10), 0, 5, 1), schema=keyless)
append(harbour, "events", 20, rows(range(3), 0, 15, -1), schema=keyless)
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()


def refused(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except InvalidError as error:
        return ["Invalid", str(error)]
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


print(
    json.dumps(
        {
            "plain": refused(lambda: spark.read.format("tidemill").options(**cluster).load("events")),
            "register": refused(lambda: register(spark, **cluster)),
            "read": refused(lambda: read(spark, "events", **cluster)),
        }
    )
)
spark.stop()
harbour.close()
