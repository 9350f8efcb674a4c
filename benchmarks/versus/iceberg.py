"""Apache Iceberg as the tables of `job.py`."""


def settings(directory: str) -> dict[str, str]:
    return {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
        "spark.sql.catalog.lake.warehouse": f"{directory}/tables",
    }


def target(directory: str, table: str) -> str:
    return f"lake.shop.{table}"


def create(directory: str, table: str, columns: str, *, large: bool) -> str:
    mode = "merge-on-read" if large else "copy-on-write"
    properties = "'format-version' = '3', 'write.distribution-mode' = 'none', 'write.merge.distribution-mode' = 'none'"
    properties += f", 'write.merge.mode' = '{mode}', 'write.delete.mode' = '{mode}', 'write.update.mode' = '{mode}'"
    return (
        f"CREATE TABLE IF NOT EXISTS {target(directory, table)} ({columns}) USING iceberg TBLPROPERTIES ({properties})"
    )
