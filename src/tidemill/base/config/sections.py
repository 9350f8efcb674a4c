"""Base of all sections of the configuration, and those of the node, its stores, the schema registry, captures, topics
and pipelines. Unknown keys are errors, and names have one spelling.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from tidemill.base.address import Address
from tidemill.base.limits import (
    CLUSTER_ALIVE_INTERVAL_S,
    DEAD_LETTERS_KEEP_MS,
    L1_INTERVAL_MAX_S,
    L1_INTERVAL_MIN_S,
    L1_OBJECT_BYTES,
    METASTORE_CHECKPOINT_INTERVAL_S,
    METASTORE_PERSIST_INTERVAL_S,
    PIPELINE_FRESHNESS_MS,
)

NAME: Final = re.compile(r"^[a-z][a-z0-9_]{0,40}\Z")
NOT_A_NAME: Final = "name {!r}: use a-z, 0-9 and _, starting with a letter, at most 41 characters"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def check_address(value: str) -> str:
    Address.parse(value)
    return value


class NodeSection(Section):
    name: str = "node-1"
    data: str = ".tidemill"
    http: str = "127.0.0.1:8600"
    kafka: str = "127.0.0.1:9092"
    advertised_host: str = ""

    @field_validator("http", "kafka")
    @classmethod
    def _address(cls, value: str) -> str:
        return check_address(value)


class ObjectsSection(Section):
    url: str = ""


class ConsensusSection(Section):
    url: str = ""


class MetastoreSection(Section):
    domains: int = Field(0, ge=0, le=64)
    persist_interval_s: float = Field(METASTORE_PERSIST_INTERVAL_S, ge=0.1, le=3600.0)
    checkpoint_interval_s: float = Field(METASTORE_CHECKPOINT_INTERVAL_S, ge=0.1, le=3600.0)
    alive_interval_s: float = Field(CLUSTER_ALIVE_INTERVAL_S, ge=0.1, le=3600.0)


class RetentionSection(Section):
    """Retention of unused data, in seconds: see `maintenance.scheduler.Retention`; `dead_letters_s`: of dead letters,
    from the times of their records on."""

    history_s: float = Field(60.0, ge=1.0, le=30 * 86_400.0)
    collect_after_s: float = Field(120.0, ge=1.0, le=30 * 86_400.0)
    orphans_after_s: float = Field(6 * 3600.0, ge=60.0, le=365 * 86_400.0)
    group_offsets_s: float = Field(7 * 86_400.0, ge=60.0, le=10 * 365 * 86_400.0)
    dead_letters_s: float = Field(DEAD_LETTERS_KEEP_MS / 1000, ge=60.0, le=10 * 365 * 86_400.0)


class LakeSection(Section):
    """Tables published for other engines: see `lake.settings.lake_settings`.

    location     URI of the bucket for readers; "" = that of objects.url
    credentials  whether the catalogue hands out `access_key_id` and `secret_access_key`, which may only read
    """

    enabled: bool = False
    format: Literal[2, 3] = 3
    interval_s: float = Field(30.0, ge=0.1, le=86_400.0)
    keep_s: float = Field(3_600.0, ge=1.0, le=30 * 86_400.0)
    location: str = ""
    credentials: Literal["none", "static-read"] = "none"
    access_key_id: str = ""
    secret_access_key: str = Field("", validate_default=True)

    @field_validator("secret_access_key")
    @classmethod
    def _check_keys(cls, value: str, info: ValidationInfo) -> str:
        given = info.data.get("credentials") == "static-read"
        if given and not (value and info.data.get("access_key_id")):
            raise ValueError('credentials = "static-read" needs access_key_id and secret_access_key')
        return value


class StorageSection(Section):
    """Layout of topics in the bucket: see `topics.config.settings.TopicSettings`, created by
    `node.settings_from_config`.
    """

    l1: bool = True
    l1_object_mb: int = Field(L1_OBJECT_BYTES >> 20, ge=1, le=1_024)
    l1_min_s: float = Field(L1_INTERVAL_MIN_S, ge=0.1, le=86_400.0)
    l1_max_s: float = Field(L1_INTERVAL_MAX_S, ge=0.1, le=86_400.0)


class FreshnessSection(Section):
    budget_s: float = Field(5.0, ge=0.5, le=3600.0)


class RegistrySection(Section):
    """Limits of the schema registry."""

    enabled: bool = True
    schema_kb: int = Field(192, ge=1, le=240)
    subjects: int = Field(20_000, ge=1, le=1_000_000)
    versions_per_subject: int = Field(1_000, ge=1, le=2_000)
    versions: int = Field(200_000, ge=1, le=10_000_000)
    schemas: int = Field(100_000, ge=1, le=10_000_000)
    waiting: int = Field(64, ge=1, le=10_000)
    """Requests in one process that parse or compare schemas, or wait to."""


class CaptureSection(Section):
    dsn: str
    tables: list[str] = ["public.*"]
    linger_ms: int = Field(100, ge=0, le=2_000)
    binding_interval_ms: int = Field(50, ge=1, le=60_000)
    identity: Literal["full", "as-is"] = "full"
    manual: bool = False
    failover: bool = False
    copy_again: bool = True
    copy_again_pause_s: float = Field(300.0, ge=1)
    copy_again_max_mb: int = Field(10_240, ge=0)
    copy_connections: int = Field(1, ge=1, le=16)
    copy_rows_per_s: int = Field(0, ge=0)
    copy_aside_after_s: float = Field(30.0, ge=1)
    copy_aside_max_mb: int = Field(20_480, ge=0)
    envelope: Literal["row", "debezium", "debezium-avro"] = "row"
    cleanup: Literal["delete", "compact"] = "delete"


class TopicSection(Section):
    """One topic. For retention, None omits the setting and -1 retains everything."""

    partitions: int = Field(4, ge=1, le=10_000)
    retention_ms: int | None = Field(None, ge=-1)
    retention_bytes: int | None = Field(None, ge=-1)

    @property
    def configs(self) -> dict[str, str]:
        """The settings under Kafka's names."""
        values = {"retention.ms": self.retention_ms, "retention.bytes": self.retention_bytes}
        return {name: str(value) for name, value in values.items() if value is not None}


LEAST_HEAP_KB = 470 << 10
"""Least heap: Spark refuses to run with less than 450 MiB, from which its JVM excludes one survivor space."""


class PipelineSparkSection(Section):
    """Settings for the drivers of one pipeline. "" = as in [spark]."""

    master: str = ""
    driver_memory: str = "1g"
    instances: int = Field(1, ge=0, le=64)
    conf: dict[str, str] = {}

    @field_validator("driver_memory")
    @classmethod
    def _memory(cls, value: str) -> str:
        if not re.fullmatch(r"[1-9]\d*[kmgt]", value.lower()):
            raise ValueError(f"{value!r}: write it as 512m or 2g")
        if int(value[:-1]) << 10 * "kmgt".index(value[-1].lower()) < LEAST_HEAP_KB:
            raise ValueError(f"{value!r}: Spark needs at least {LEAST_HEAP_KB >> 10}m")
        return value

    @field_validator("conf", mode="before")
    @classmethod
    def _settings(cls, value: Any) -> Any:
        """Flatten settings: `spark.executor.memory = "1g"` without quotes around the key is three tables in TOML."""
        found = _flatten(value) if isinstance(value, dict) else value
        for key in found if isinstance(found, dict) else ():
            if not key.startswith("spark."):
                raise ValueError(f"{key!r} is not a Spark setting: those begin with spark.")
        return found


class PipelineSection(Section):
    """One pipeline. Pipelines with the same `driver` share one process, with at most one JVM; "" = a separate one.
    `freshness_s`: time for which records are gathered before a step."""

    file: str
    driver: str = ""
    freshness_s: float = Field(PIPELINE_FRESHNESS_MS / 1000, ge=0, le=60)
    spark: PipelineSparkSection = PipelineSparkSection()

    @field_validator("driver")
    @classmethod
    def _driver(cls, value: str) -> str:
        if value and not NAME.match(value):
            raise ValueError(NOT_A_NAME.format(value))
        return value


class SparkSection(Section):
    master: str = "local[*]"


def _flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, found in value.items():
        if isinstance(found, dict):
            out |= _flatten(found, f"{prefix}{key}.")
        elif isinstance(found, bool):
            out[prefix + key] = str(found).lower()
        else:
            out[prefix + key] = str(found) if isinstance(found, int | float) else found
    return out
