"""Connectors that Spark loads from Maven, where tests/clients/install brought them: Kafka's, and Hadoop's for S3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidemill.spark.file_access import CONNECTOR_CLASS

JARS = sorted(map(str, (Path(__file__).parents[2] / "clients/java/spark/target/dependency").glob("*.jar")))
EXTRA = {"spark.jars": ",".join(JARS)} if JARS else {}
HAS_S3 = any(Path(jar).name.startswith("hadoop-aws-") for jar in JARS)


@contextmanager
def without_s3(spark: Any) -> Iterator[None]:
    """Make the session one that has no connector for S3."""
    hadoop = spark._jsc.hadoopConfiguration()
    hadoop.set("fs.s3a.impl", f"not.installed.{CONNECTOR_CLASS}")
    yield
    hadoop.set("fs.s3a.impl", CONNECTOR_CLASS)
