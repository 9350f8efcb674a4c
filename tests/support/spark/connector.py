"""Spark's own Kafka connector, where tests/clients/install brought it."""

from __future__ import annotations

from pathlib import Path

JARS = sorted(map(str, (Path(__file__).parents[2] / "clients/java/spark/target/dependency").glob("*.jar")))
EXTRA = {"spark.jars": ",".join(JARS)} if JARS else {}
