"""Access of Spark to the objects of a bucket as files: their URI, and the settings with which Spark opens them.

    directory   file:///dir       executors must see it under this path
    S3          s3a://bucket/…    by Hadoop's connector (hadoop-aws), if the session has it

The endpoint, region, path style and credentials of an S3 bucket become settings of the connector for this one bucket,
in the Hadoop configuration of the JVM. Executors receive them with their tasks. No option, plan or SQL setting
contains them, and Spark masks the keys in its UI and event log. Settings that the session already has for the bucket
take precedence. A client of Spark Connect has no access to that configuration: the server's own is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tidemill.objects.factory import local_directory
from tidemill.shards.read.read_plan import PlanNotPossibleError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONNECTOR_CLASS = "org.apache.hadoop.fs.s3a.S3AFileSystem"
PROVIDERS = "org.apache.hadoop.fs.s3a"
CREDENTIALS = ("access.key", "secret.key", "session.token", "aws.credentials.provider")
"""Settings of one source of credentials: a session that has one of them for the bucket has its own source."""
GLOB = set("*?[]{}\\")


def files_base(spark: SparkSession, objects_url: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the URI of the bucket for Spark, without a trailing slash, and configure the session to open it.

    Raises PlanNotPossibleError with the reason why Spark cannot read the bucket.
    """
    directory = local_directory(objects_url)
    if directory is None and urlsplit(objects_url).scheme != "s3":
        raise PlanNotPossibleError("the bucket is neither a directory nor in S3")
    base = f"file://{directory}" if directory is not None else _open_s3(spark, objects_url, env)
    if GLOB & set(base):
        raise PlanNotPossibleError("Spark takes characters in the bucket's path for a pattern")
    return base


@contextmanager
def report_unreadable(base: str) -> Iterator[None]:
    """Raise PlanNotPossibleError if Spark raises an error inside the block, where it opens the bucket of a plan."""
    from pyspark.errors import PySparkException

    try:
        yield
    except Exception as error:
        if base.startswith("file:") or not (isinstance(error, PySparkException) or _is_from_jvm(error)):
            raise
        if f"Class {CONNECTOR_CLASS} not found" in str(error):
            raise PlanNotPossibleError(_no_connector("VERSION")) from error
        raise PlanNotPossibleError(f"Spark cannot open the bucket: {_cause(error)}") from error


def _open_s3(spark: SparkSession, objects_url: str, env: Mapping[str, str]) -> str:
    from tidemill.objects.buckets.s3 import parse_s3

    bucket, prefix, parsed = parse_s3(objects_url, env)
    base = f"s3a://{bucket}/{prefix}".rstrip("/")
    if hasattr(spark, "_jsc"):
        with report_unreadable(base):  # a shared session may refuse access to its configuration
            hadoop = spark._jsc.hadoopConfiguration()
            if hadoop.getClassByNameOrNull(hadoop.get("fs.s3a.impl", CONNECTOR_CLASS)) is None:
                raise PlanNotPossibleError(_no_connector(spark._jvm.org.apache.hadoop.util.VersionInfo.getVersion()))
            _configure(hadoop, f"fs.s3a.bucket.{bucket}.", s3a_settings(parsed))
    return base


def _configure(hadoop: Any, prefix: str, settings: dict[str, str]) -> None:
    """Set what is not set yet. The connector caches an opened bucket, so later changes would have no effect."""
    has_credentials = any(hadoop.get(prefix + name) is not None for name in CREDENTIALS)
    for name, value in settings.items():
        if hadoop.get(prefix + name) is None and not (has_credentials and name in CREDENTIALS):
            hadoop.set(prefix + name, value)


def s3a_settings(parsed: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a bucket, without their prefix, from the configuration that `parse_s3` returns.

    Without keys the connector looks for the role of the machine or container itself, as `credentials=instance` says.
    """
    found = {
        "endpoint.region": str(parsed["region"]),
        "path.style.access": "false" if parsed["virtual_hosted_style_request"] else "true",
    }
    if "endpoint" in parsed:
        found["endpoint"] = str(parsed["endpoint"])
    if "access_key_id" in parsed:
        found |= {"access.key": str(parsed["access_key_id"]), "secret.key": str(parsed["secret_access_key"])}
        found["aws.credentials.provider"] = f"{PROVIDERS}.SimpleAWSCredentialsProvider"
    if "session_token" in parsed:
        found["session.token"] = str(parsed["session_token"])
        found["aws.credentials.provider"] = f"{PROVIDERS}.TemporaryAWSCredentialsProvider"
    return found


def _no_connector(version: str) -> str:
    return f"Spark has no connector for S3: add spark.jars.packages=org.apache.hadoop:hadoop-aws:{version}"


def _is_from_jvm(error: Exception) -> bool:
    try:
        from py4j.protocol import Py4JError  # not part of pyspark-client
    except ImportError:
        return False
    return isinstance(error, Py4JError)


def _cause(error: Exception) -> str:
    """Return the line that names the JVM's exception, not that of Python's call."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith(": ")), lines[0] if lines else "").removeprefix(": ")[:300]
