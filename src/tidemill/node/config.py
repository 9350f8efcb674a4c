"""`tidemill.toml` as plain data. Settings are data, components are passed in; `${ENV}` is filled from the environment.

Every value may also come from the environment as TIDEMILL_<SECTION>__<KEY>, which wins over the file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tidemill.base.errors import Invalid

DEFAULT_FILE = "tidemill.toml"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME = re.compile(r"^[a-z][a-z0-9_]{0,40}$")


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


class KafkaSection(Section):
    auto_create_topics: bool = True
    default_partitions: int = Field(4, ge=1, le=10_000)


class CaptureSection(Section):
    dsn: str
    tables: list[str] = ["public.*"]
    binding_interval_ms: int = Field(50, ge=1, le=60_000)


class TopicSection(Section):
    partitions: int = Field(4, ge=1, le=10_000)


class PipelineSection(Section):
    file: str


class SparkSection(Section):
    master: str = "local[*]"


class Config(Section):
    node: NodeSection = NodeSection()
    objects: ObjectsSection = ObjectsSection()
    consensus: ConsensusSection = ConsensusSection()
    metastore: MetastoreSection = MetastoreSection()
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
                raise ValueError(f"name {name!r}: use a-z, 0-9 and _, starting with a letter, at most 41 characters")
        return value

    @property
    def objects_url(self) -> str:
        return self.objects.url or f"file://{Path(self.node.data).absolute()}/objects"

    @property
    def consensus_url(self) -> str:
        return self.consensus.url or f"sqlite://{Path(self.node.data).absolute()}/consensus.db"


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
            raise Invalid(f"unknown key in {origin}: {key}.", fix="Remove it, or correct its spelling.") from error
        raise Invalid(f"bad value in {origin}: {key}: {first['msg']}.", fix=f"Correct {key}.") from error
    base = Path(origin).parent if origin else Path()
    pipelines = {
        name: section.model_copy(update={"file": str((base / section.file).absolute())})
        for name, section in config.pipeline.items()
    }
    return config.model_copy(update={"pipeline": pipelines})


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
