"""Delta Lake as the tables of `job.py`."""


def settings(directory: str) -> dict[str, str]:
    return {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.databricks.delta.autoCompact.enabled": "true",
    }


def target(directory: str, table: str) -> str:
    return f"delta.`{directory}/tables/{table}`"


def create(directory: str, table: str, columns: str, *, large: bool) -> str:
    vectors = str(large).lower()  # of deletions: an update of a large table then rewrites no file
    properties = f"'delta.checkpointInterval' = '100', 'delta.enableDeletionVectors' = '{vectors}'"
    return f"CREATE TABLE IF NOT EXISTS {target(directory, table)} ({columns}) USING delta TBLPROPERTIES ({properties})"
