"""`tidemill.toml` as plain data. Settings are data, components are passed in; `${ENV}` is filled from the environment.

Every value may also come from the environment as TIDEMILL_<SECTION>__<KEY>, which wins over the file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tidemill.base.errors import Invalid, nearest
from tidemill.base.limits import LOOPBACK_ORIGINS

DEFAULT_FILE = "tidemill.toml"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME = re.compile(r"^[a-z][a-z0-9_]{0,40}$")
_NOT_A_NAME = "name {!r}: use a-z, 0-9 and _, starting with a letter, at most 41 characters"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeSection(Section):
    name: str = "node-1"
    data: str = ".tidemill"
    http: str = "127.0.0.1:8600"
    kafka: str = "127.0.0.1:9092"
    advertised_host: str = ""

    @field_validator("http", "kafka")
    @classmethod
    def _address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError("write it as host:port, e.g. 127.0.0.1:8600")
        return value


class ObjectsSection(Section):
    url: str = ""


class ConsensusSection(Section):
    url: str = ""


class MetastoreSection(Section):
    domains: int = Field(0, ge=0, le=64)
    persist_interval_s: float = Field(30.0, ge=0.1, le=3600.0)
    checkpoint_interval_s: float = Field(10.0, ge=0.1, le=3600.0)
    alive_interval_s: float = Field(30.0, ge=0.1, le=3600.0)


class RetentionSection(Section):
    """How long what nobody reads any more stays, in seconds: see `keeper.grounds.Retention`."""

    history_s: float = Field(60.0, ge=1.0, le=30 * 86_400.0)
    collect_after_s: float = Field(120.0, ge=1.0, le=30 * 86_400.0)
    orphans_after_s: float = Field(6 * 3600.0, ge=60.0, le=365 * 86_400.0)


class FreshnessSection(Section):
    budget_s: float = Field(5.0, ge=0.5, le=3600.0)


class HttpSection(Section):
    """See `node.http_limits.HttpLimits`; `node.served` makes one of it."""

    connections: int = Field(4_096, ge=16, le=1_000_000)
    per_address: int = Field(1_000, ge=1, le=1_000_000)
    address_connections: int = Field(2_048, ge=1, le=1_000_000)
    header_timeout_s: float = Field(20.0, ge=0.1, le=3600.0)
    header_kb: int = Field(128, ge=8, le=1_024)
    body_kb: int = Field(1_024, ge=1, le=1_048_576)


class ShapesSection(Section):
    """See `shapes.settings.ShapeSettings`; `node.served` makes one of it."""

    secret: str = ""
    allowed_origins: list[str] = list(LOOPBACK_ORIGINS)
    allow_delete: bool = False
    max_shapes: int = Field(1_000, ge=1, le=1_000_000)
    memory_mb: int = Field(512, ge=1)
    base_mb: int = Field(256, ge=1)
    log_mb: int = Field(64, ge=1)
    chunk_kb: int = Field(10_240, ge=1, le=102_400)
    idle_s: float = Field(300.0, ge=1.0)
    backlog_mb: int = Field(64, ge=1)
    backlog_s: float = Field(10.0, ge=0.5)
    loop_share: float = Field(0.5, ge=0.05, le=0.95)
    max_initial: int = Field(300, ge=1)
    max_existing: int = Field(10_000, ge=1)
    long_poll_s: float = Field(20.0, ge=1.0, le=600.0)
    sse_s: float = Field(60.0, ge=2.0, le=3600.0)
    load_timeout_s: float = Field(45.0, ge=1.0, le=600.0)
    cache_initial_s: int = Field(3_600, ge=0)
    cache_later_s: int = Field(60, ge=0)
    cache_live_s: int = Field(5, ge=0)

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"https?://[^/*\s]+(:\*)?", origin):
                raise ValueError(f"{origin!r}: write http(s)://host[:port], http(s)://host:* or *")
        return value


class KafkaSection(Section):
    auto_create_topics: bool = True
    default_partitions: int = Field(4, ge=1, le=10_000)
    partitions_max: int = Field(20_000, ge=1)
    connections_max: int = Field(1_000, ge=1)
    connections_per_address_max: int = Field(500, ge=1)
    retention_ms: int = Field(-1, ge=-1)
    retention_bytes: int = Field(-1, ge=-1)


class CaptureSection(Section):
    dsn: str
    tables: list[str] = ["public.*"]
    binding_interval_ms: int = Field(50, ge=1, le=60_000)


class TopicSection(Section):
    """Retention: None leaves it out, -1 keeps everything."""

    partitions: int = Field(4, ge=1, le=10_000)
    retention_ms: int | None = Field(None, ge=-1)
    retention_bytes: int | None = Field(None, ge=-1)

    @property
    def configs(self) -> dict[str, str]:
        """As Kafka names them."""
        values = {"retention.ms": self.retention_ms, "retention.bytes": self.retention_bytes}
        return {name: str(value) for name, value in values.items() if value is not None}


LEAST_HEAP_KB = 470 << 10
"""Spark refuses to run with less than 450 MiB, of which its JVM counts one survivor space out."""


class PipelineSparkSection(Section):
    """How the drivers of one pipeline run. "": as [spark] says."""

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
            raise ValueError(f"{value!r}: Spark starts with {LEAST_HEAP_KB >> 10}m at least")
        return value

    @field_validator("conf", mode="before")
    @classmethod
    def _settings(cls, value: Any) -> Any:
        """As Spark has them: `spark.executor.memory = "1g"` without quotes is three tables in TOML."""
        found = _flat(value) if isinstance(value, dict) else value
        for key in found if isinstance(found, dict) else ():
            if not key.startswith("spark."):
                raise ValueError(f"{key!r} is no setting of Spark's: they begin with spark.")
        return found


class PipelineSection(Section):
    """Pipelines that name the same `driver` share one process and one Spark session; "" = one of its own."""

    file: str
    driver: str = ""
    spark: PipelineSparkSection = PipelineSparkSection()

    @field_validator("driver")
    @classmethod
    def _driver(cls, value: str) -> str:
        if value and not _NAME.match(value):
            raise ValueError(_NOT_A_NAME.format(value))
        return value


class SparkSection(Section):
    master: str = "local[*]"


class Config(Section):
    node: NodeSection = NodeSection()
    objects: ObjectsSection = ObjectsSection()
    consensus: ConsensusSection = ConsensusSection()
    metastore: MetastoreSection = MetastoreSection()
    retention: RetentionSection = RetentionSection()
    freshness: FreshnessSection = FreshnessSection()
    http: HttpSection = HttpSection()
    shapes: ShapesSection = ShapesSection()
    kafka: KafkaSection = KafkaSection()
    spark: SparkSection = SparkSection()
    capture: dict[str, CaptureSection] = {}
    topics: dict[str, TopicSection] = {}
    pipeline: dict[str, PipelineSection] = {}

    @field_validator("capture", "pipeline")
    @classmethod
    def _names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not _NAME.match(name):
                raise ValueError(_NOT_A_NAME.format(name))
        return value

    @property
    def objects_url(self) -> str:
        return self.objects.url or f"file://{Path(self.node.data).absolute()}/objects"

    @property
    def consensus_url(self) -> str:
        return self.consensus.url or f"sqlite://{Path(self.node.data).absolute()}/consensus.db"


def exposed(config: Config) -> list[str]:
    """`key=address` of each server that other machines can reach without authentication."""
    found = []
    for key, address in (("node.http", config.node.http), ("node.kafka", config.node.kafka)):
        host = address.rpartition(":")[0].strip("[]")
        try:
            loopback = ip_address(host).is_loopback
        except ValueError:
            loopback = host == "localhost"
        if not loopback:
            found.append(f"{key}={address}")
    return found


def load(path: Path | None = None, *, environ: Mapping[str, str] | None = None) -> Config:
    """Read the file (default ./tidemill.toml, which may be absent) and the environment.

    Raises Invalid with one sentence that names the key and says what to write.
    """
    environ = os.environ if environ is None else environ
    chosen = path or Path(environ.get("TIDEMILL_CONFIG", DEFAULT_FILE))
    if not chosen.exists():
        if path is not None or "TIDEMILL_CONFIG" in environ:
            raise Invalid(f"no such configuration file: path={chosen}.", fix="Create it, or leave --config out.")
        text = ""
    else:
        text = _text(chosen)
    try:
        values = tomllib.loads(_VARIABLE.sub(lambda m: _variable(m.group(1), environ), text))
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"{chosen} is not TOML: {error}.", fix="Correct that line.") from error
    _overlay(values, environ)
    return parse(values, origin=str(chosen))


def parse(values: Mapping[str, Any], *, origin: str) -> Config:
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            near = _nearest(first["loc"])
            fix = f"Write {near}, or remove it." if near else "Remove it, or correct its spelling."
            raise Invalid(f"unknown key in {origin}: {key}.", fix=fix) from error
        raise Invalid(f"bad value in {origin}: {key}: {first['msg']}.", fix=f"Correct {key}.") from error
    base = Path(origin).parent if origin else Path()
    pipelines = {
        name: section.model_copy(update={"file": str((base / section.file).absolute())})
        for name, section in config.pipeline.items()
    }
    config = config.model_copy(update={"pipeline": pipelines})
    for driver, names in drivers(config).items():
        _agree(config, driver, names, origin)
    return config


def drivers(config: Config) -> dict[str, list[str]]:
    """The pipelines of each named driver, in the order of the file."""
    found: dict[str, list[str]] = {}
    for name, section in config.pipeline.items():
        if section.driver:
            found.setdefault(section.driver, []).append(name)
    return found


def _agree(config: Config, driver: str, names: list[str], origin: str) -> None:
    """Raises Invalid where pipelines of one driver ask for two kinds of it: there is one session, with one JVM."""

    def asked(name: str) -> dict[str, object]:
        section = config.pipeline[name].spark
        plain = section.model_dump(exclude={"conf"}) | {"master": section.master or config.spark.master}
        return plain | {f"conf.{key}": value for key, value in section.conf.items()}

    first = asked(names[0])
    for name in names[1:]:
        other = asked(name)
        different = sorted(key for key in first | other if first.get(key) != other.get(key))
        if different:
            raise Invalid(
                f"pipelines of one driver share its Spark session, and differ in {origin}: driver={driver}"
                f" pipelines={names[0]},{name} spark.{different[0]}.",
                fix=f"Give pipeline.{name} the same spark.{different[0]}, or another driver.",
            )


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, found in value.items():
        if isinstance(found, dict):
            out |= _flat(found, f"{prefix}{key}.")
        elif isinstance(found, bool):
            out[prefix + key] = str(found).lower()
        else:
            out[prefix + key] = str(found) if isinstance(found, int | float) else found
    return out


def _nearest(place: tuple[int | str, ...]) -> str:
    """The known key that is most like the unknown one at `place`, in full; "" where none is like it."""
    model: Any = Config
    for part in place[:-1]:
        if isinstance(model, dict):
            model = model["of"]
            continue
        kind = model.model_fields[part].annotation
        arguments = getattr(kind, "__args__", ())
        model = {"of": arguments[-1]} if arguments else kind
    near = nearest(str(place[-1]), model.model_fields)
    return ".".join([*(str(part) for part in place[:-1]), near]) if near else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Invalid(
            f"the configuration cannot be read: path={path} reason={reason}.", fix="Name a readable TOML file."
        ) from error


def _variable(name: str, environ: Mapping[str, str]) -> str:
    if name not in environ:
        raise Invalid(f"the configuration names ${{{name}}}, which is not set.", fix=f"Export {name}.")
    return environ[name].replace("\\", "\\\\").replace('"', '\\"')


def _overlay(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    for variable, value in environ.items():
        if not variable.startswith("TIDEMILL_") or "__" not in variable:
            continue
        *path, last = variable.removeprefix("TIDEMILL_").lower().split("__")
        section = values
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise Invalid(
                    f"the environment goes below a plain value: variable={variable} key={part}.",
                    fix=f"Unset it, or make {part} a section of the file.",
                )
        section[last] = value
