"""`tidemill.toml` as plain data. Components are not configured here but passed in; `${ENV}` expands environment
variables.

Every value may also come from the environment as TIDEMILL_<SECTION>__<KEY>, which overrides the file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from tidemill.base.address import Address
from tidemill.base.config.section import NAME, NOT_A_NAME, Section
from tidemill.base.config.shapes import ShapeSection, ShapesSection, SigningSection
from tidemill.base.errors import InvalidError, nearest_name
from tidemill.base.pgtypes.avro import AVRO

DEFAULT_FILE = "tidemill.toml"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def _check_address(value: str) -> str:
    Address.parse(value)
    return value


def _check_advertised(value: str) -> str:
    """Check an address that clients can open, or ""."""
    if value and (Address.parse(value).port == 0 or Address.parse(value).is_wildcard):
        raise ValueError("write the host:port by which clients reach this node, e.g. kafka.example.com:9094")
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
        return _check_address(value)


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
    """Retention of unused data, in seconds: see `maintenance.context.Retention`."""

    history_s: float = Field(60.0, ge=1.0, le=30 * 86_400.0)
    collect_after_s: float = Field(120.0, ge=1.0, le=30 * 86_400.0)
    orphans_after_s: float = Field(6 * 3600.0, ge=60.0, le=365 * 86_400.0)
    group_offsets_s: float = Field(7 * 86_400.0, ge=60.0, le=10 * 365 * 86_400.0)


class StorageSection(Section):
    """Layout of topics in the bucket: see `topics.config.settings.TopicSettings`, created by
    `node.settings_from_config`.
    """

    l1: bool = True
    l1_object_mb: int = Field(32, ge=1, le=1_024)
    l1_min_s: float = Field(10.0, ge=0.1, le=86_400.0)
    l1_max_s: float = Field(600.0, ge=0.1, le=86_400.0)


class FreshnessSection(Section):
    budget_s: float = Field(5.0, ge=0.5, le=3600.0)


class HttpSection(Section):
    """See `node.http.limits.HttpLimits`, created by `node.settings_from_config`."""

    authenticate: bool = False
    tls: bool = False
    connections: int = Field(4_096, ge=16, le=1_000_000)
    per_address: int = Field(1_000, ge=1, le=1_000_000)
    address_connections: int = Field(2_048, ge=1, le=1_000_000)
    header_timeout_s: float = Field(20.0, ge=0.1, le=3600.0)
    header_kb: int = Field(64, ge=8, le=64)
    body_kb: int = Field(1_024, ge=1, le=1_048_576)


KafkaSecurity = Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]


class TlsSection(Section):
    """See `security.tls.TlsSettings`; paths are relative to the configuration's file."""

    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    client_auth: Literal["none", "requested", "required"] = "none"
    min_version: Literal["1.2", "1.3"] = "1.2"
    principal_rules: list[str] = ["DEFAULT"]


class SaslSection(Section):
    mechanisms: list[Mechanism] = Field(["SCRAM-SHA-256", "SCRAM-SHA-512"], min_length=1)
    session_lifetime_s: float = Field(0.0, ge=0.0, le=365 * 86_400.0)


class OauthSection(Section):
    """See `security.oauth_tokens.TokenSettings`."""

    jwks_file: str = ""
    jwks_url: str = ""
    secret: str = ""
    issuer: str = ""
    audience: str = ""
    principal_claim: str = "sub"
    leeway_s: int = Field(30, ge=0, le=3_600)


class SecuritySection(Section):
    authorize: bool | None = None
    super_users: list[str] = []
    tls: TlsSection = TlsSection()
    sasl: SaslSection = SaslSection()
    oauth: OauthSection = OauthSection()
    signing: SigningSection = SigningSection()

    @field_validator("super_users")
    @classmethod
    def _principals(cls, value: list[str]) -> list[str]:
        for name in value:
            if not name.startswith("User:") or name == "User:":
                raise ValueError(f"{name!r}: write it as User:NAME")
        return value


class KafkaListenerSection(Section):
    """One listener in addition to node.kafka.

    advertised  address reported to its clients; "" = `address`, with node.advertised_host if that is set
    security    "" = kafka.security
    """

    address: str
    advertised: str = ""
    security: KafkaSecurity | Literal[""] = ""

    @field_validator("address")
    @classmethod
    def _check_address_field(cls, value: str) -> str:
        return _check_address(value)

    @field_validator("advertised")
    @classmethod
    def _check_advertised_field(cls, value: str) -> str:
        return _check_advertised(value)


class KafkaSection(Section):
    security: KafkaSecurity = "plaintext"
    advertised: str = ""
    listeners: dict[str, KafkaListenerSection] = {}
    auto_create_topics: bool = True
    default_partitions: int = Field(4, ge=1, le=10_000)
    partitions_max: int = Field(20_000, ge=1)
    connections_max: int = Field(1_000, ge=1)
    connections_per_address_max: int = Field(500, ge=1)
    fetch_sessions_max: int = Field(1_000, ge=0)
    groups_max: int = Field(10_000, ge=1)
    group_members_max: int = Field(1_000, ge=1)
    group_initial_rebalance_delay_ms: int = Field(3_000, ge=0)
    group_min_session_timeout_ms: int = Field(6_000, ge=1)
    group_max_session_timeout_ms: int = Field(1_800_000, ge=1)
    group_consumer_session_timeout_ms: int = Field(45_000, ge=1)
    group_consumer_heartbeat_interval_ms: int = Field(5_000, ge=1, validate_default=True)
    group_consumer_min_session_timeout_ms: int = Field(45_000, ge=1)
    group_consumer_max_session_timeout_ms: int = Field(60_000, ge=1)
    group_consumer_min_heartbeat_interval_ms: int = Field(5_000, ge=1)
    group_consumer_max_heartbeat_interval_ms: int = Field(15_000, ge=1)
    group_consumer_migration_policy: Literal["bidirectional", "upgrade", "downgrade", "disabled"] = "bidirectional"
    retention_ms: int = Field(-1, ge=-1)
    retention_bytes: int = Field(-1, ge=-1)
    transaction_timeout_max_ms: int = Field(900_000, ge=1_000)
    transactional_id_expires_ms: int = Field(604_800_000, ge=60_000)

    @field_validator("group_consumer_heartbeat_interval_ms")
    @classmethod
    def _check_heartbeat_interval(cls, value: int, info: ValidationInfo) -> int:
        session_ms = info.data.get("group_consumer_session_timeout_ms", value + 1)
        if value >= session_ms:
            raise ValueError(f"must be below group_consumer_session_timeout_ms, which is {session_ms}")
        return value

    @field_validator("advertised")
    @classmethod
    def _check_advertised_field(cls, value: str) -> str:
        return _check_advertised(value)

    @field_validator("listeners")
    @classmethod
    def _check_listener_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not NAME.match(name) or name == "default":
                raise ValueError(f"{NOT_A_NAME.format(name)}; default is the listener of node.kafka")
        return value


class RegistrySection(Section):
    """See `registry.settings.RegistrySettings`, created by `node.settings_from_config`."""

    enabled: bool = True
    schema_kb: int = Field(192, ge=1, le=240)
    subjects: int = Field(20_000, ge=1, le=1_000_000)
    versions_per_subject: int = Field(1_000, ge=1, le=2_000)
    versions: int = Field(200_000, ge=1, le=10_000_000)
    schemas: int = Field(100_000, ge=1, le=10_000_000)
    waiting: int = Field(64, ge=1, le=10_000)


class CaptureSection(Section):
    dsn: str
    tables: list[str] = ["public.*"]
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
    """One pipeline. Pipelines with the same `driver` share one process and one Spark session; "" = a separate one."""

    file: str
    driver: str = ""
    spark: PipelineSparkSection = PipelineSparkSection()

    @field_validator("driver")
    @classmethod
    def _driver(cls, value: str) -> str:
        if value and not NAME.match(value):
            raise ValueError(NOT_A_NAME.format(value))
        return value


class SparkSection(Section):
    master: str = "local[*]"


class Config(Section):
    node: NodeSection = NodeSection()
    objects: ObjectsSection = ObjectsSection()
    consensus: ConsensusSection = ConsensusSection()
    metastore: MetastoreSection = MetastoreSection()
    retention: RetentionSection = RetentionSection()
    storage: StorageSection = StorageSection()
    freshness: FreshnessSection = FreshnessSection()
    http: HttpSection = HttpSection()
    shapes: ShapesSection = ShapesSection()
    kafka: KafkaSection = KafkaSection()
    security: SecuritySection = SecuritySection()
    registry: RegistrySection = RegistrySection()
    spark: SparkSection = SparkSection()
    capture: dict[str, CaptureSection] = {}
    topics: dict[str, TopicSection] = {}
    pipeline: dict[str, PipelineSection] = {}
    shape: dict[str, ShapeSection] = {}

    @field_validator("capture", "pipeline", "shape")
    @classmethod
    def _names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not NAME.match(name):
                raise ValueError(NOT_A_NAME.format(name))
        return value

    @property
    def objects_url(self) -> str:
        return self.objects.url or f"file://{Path(self.node.data).absolute()}/objects"

    @property
    def consensus_url(self) -> str:
        return self.consensus.url or f"sqlite://{Path(self.node.data).absolute()}/consensus.db"


def exposed_servers(config: Config) -> list[str]:
    """Return `key=address` of each server that other machines can reach without authentication."""
    found = []
    certified = config.security.tls.client_auth == "required"
    servers = [("node.http", config.node.http, ""), ("node.kafka", config.node.kafka, config.kafka.security)]
    for name, section in config.kafka.listeners.items():
        key = f"kafka.listeners.{name}.address"
        servers.append((key, section.address, section.security or config.kafka.security))
    for key, address, protocol in servers:
        if key == "node.http" and config.http.authenticate:
            continue
        if protocol.startswith("sasl") or (protocol == "ssl" and certified):
            continue
        if not Address.parse(address).is_loopback:
            found.append(f"{key}={address}")
    return found


def load(path: Path | None = None, *, environ: Mapping[str, str] | None = None) -> Config:
    """Read the file (default ./tidemill.toml, which may be absent) and the environment.

    Raises InvalidError with one sentence that names the key and the correction.
    """
    environ = os.environ if environ is None else environ
    chosen = path or Path(environ.get("TIDEMILL_CONFIG", DEFAULT_FILE))
    if not chosen.exists():
        if path is not None or "TIDEMILL_CONFIG" in environ:
            raise InvalidError(f"no such configuration file: path={chosen}.", fix="Create it, or omit --config.")
        text = ""
    else:
        text = _read_text(chosen)
    try:
        values = tomllib.loads(_VARIABLE.sub(lambda m: _expand_variable(m.group(1), environ), text))
    except tomllib.TOMLDecodeError as error:
        raise InvalidError(f"{chosen} is not TOML: {error}.", fix="Correct that line.") from error
    _overlay_environment(values, environ)
    return parse(values, origin=str(chosen))


def parse(values: Mapping[str, Any], *, origin: str) -> Config:
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            near = _nearest_key(first["loc"])
            fix = f"Write {near}, or remove it." if near else "Remove it, or correct its spelling."
            raise InvalidError(f"unknown key in {origin}: {key}.", fix=fix) from error
        raise InvalidError(f"bad value in {origin}: {key}: {first['msg']}.", fix=f"Correct {key}.") from error
    base = Path(origin).parent if origin else Path()
    pipelines = {
        name: section.model_copy(update={"file": str((base / section.file).absolute())})
        for name, section in config.pipeline.items()
    }
    config = config.model_copy(update={"pipeline": pipelines, "security": _resolve_paths(config.security, base)})
    _check_security(config, origin)
    _check_registry(config, origin)
    for driver, names in pipelines_by_driver(config).items():
        _check_driver_settings(config, driver, names, origin)
    return config


def _resolve_paths(security: SecuritySection, base: Path) -> SecuritySection:
    """Resolve paths relative to the configuration's file."""

    def placed(section: Section, *keys: str) -> Section:
        found = {key: str((base / path).absolute()) for key in keys if (path := getattr(section, key))}
        return section.model_copy(update=found)

    tls, oauth = placed(security.tls, "certificate", "key", "client_ca"), placed(security.oauth, "jwks_file")
    return security.model_copy(update={"tls": tls, "oauth": oauth})


def listener_protocols(config: Config) -> list[str]:
    """Return the security protocols of the Kafka listeners, each once."""
    listeners = config.kafka.listeners.values()
    return sorted({config.kafka.security, *(each.security or config.kafka.security for each in listeners)})


def _check_security(config: Config, origin: str) -> None:
    """Check the security settings. Raises InvalidError if a feature lacks its prerequisites."""
    tls, oauth, used = config.security.tls, config.security.oauth, listener_protocols(config)
    over_tls = [f"kafka.security={protocol}" for protocol in used if protocol.endswith("ssl")]
    over_tls += ["http.tls=true"] if config.http.tls else []
    if over_tls and not (tls.certificate and tls.key):
        raise InvalidError(
            f"no certificate for TLS in {origin}: {over_tls[0]}.",
            fix="Set security.tls.certificate and security.tls.key to PEM files.",
        )
    sources = [key for key in ("jwks_file", "jwks_url", "secret") if getattr(oauth, key)]
    if len(sources) > 1:
        raise InvalidError(
            f"token keys are configured in several places in {origin}: {sources}.", fix="Keep only one of them."
        )
    if (
        any(protocol.startswith("sasl") for protocol in used)
        and "OAUTHBEARER" in config.security.sasl.mechanisms
        and not sources
    ):
        raise InvalidError(
            f"OAUTHBEARER has no keys in {origin}: security.sasl.mechanisms.",
            fix="Set security.oauth.jwks_file, security.oauth.jwks_url or security.oauth.secret.",
        )
    for name, shape in config.shape.items():
        if shape.claims and not config.http.authenticate:
            raise InvalidError(
                f"a shape uses claims, but HTTP authentication is off in {origin}: shape.{name}.params.",
                fix="Set http.authenticate = true.",
            )


def _check_registry(config: Config, origin: str) -> None:
    """Check the registry settings. Raises InvalidError if a capture needs the schema registry and it is disabled."""
    for name, section in config.capture.items():
        if section.envelope == AVRO and not config.registry.enabled:
            raise InvalidError(
                f"Avro needs the schema registry, which is disabled in {origin}: capture.{name}.envelope={AVRO}.",
                fix='Set registry.enabled = true, or envelope = "debezium".',
            )


def is_authorization_on(config: Config) -> bool:
    """Return whether ACLs are checked. The default: if any listener authenticates its clients."""
    if config.security.authorize is not None:
        return config.security.authorize
    used, certified = listener_protocols(config), config.security.tls.client_auth != "none"
    return any(protocol.startswith("sasl") or (protocol == "ssl" and certified) for protocol in used)


def pipelines_by_driver(config: Config) -> dict[str, list[str]]:
    """Return the pipelines of each named driver, in the order of the file."""
    found: dict[str, list[str]] = {}
    for name, section in config.pipeline.items():
        if section.driver:
            found.setdefault(section.driver, []).append(name)
    return found


def _check_driver_settings(config: Config, driver: str, names: list[str], origin: str) -> None:
    """Check that pipelines of one driver agree on its settings: there is one session, with one JVM.

    Raises InvalidError.
    """

    def driver_settings(name: str) -> dict[str, object]:
        section = config.pipeline[name].spark
        plain = section.model_dump(exclude={"conf"}) | {"master": section.master or config.spark.master}
        return plain | {f"conf.{key}": value for key, value in section.conf.items()}

    first = driver_settings(names[0])
    for name in names[1:]:
        other = driver_settings(name)
        different = sorted(key for key in first | other if first.get(key) != other.get(key))
        if different:
            raise InvalidError(
                f"pipelines of one driver share a Spark session, but differ in {origin}: driver={driver}"
                f" pipelines={names[0]},{name} spark.{different[0]}.",
                fix=f"Give pipeline.{name} the same spark.{different[0]}, or another driver.",
            )


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


def _nearest_key(place: tuple[int | str, ...]) -> str:
    """Return the full name of the known key most similar to the unknown one at `place`, or ""."""
    model: Any = Config
    for part in place[:-1]:
        if isinstance(model, dict):
            model = model["of"]
            continue
        kind = model.model_fields[part].annotation
        arguments = getattr(kind, "__args__", ())
        model = {"of": arguments[-1]} if arguments else kind
    near = nearest_name(str(place[-1]), model.model_fields)
    return ".".join([*(str(part) for part in place[:-1]), near]) if near else ""


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidError(
            f"the configuration cannot be read: path={path} reason={reason}.", fix="Use a readable TOML file."
        ) from error


def _expand_variable(name: str, environ: Mapping[str, str]) -> str:
    if name not in environ:
        raise InvalidError(f"the configuration uses ${{{name}}}, which is not set.", fix=f"Export {name}.")
    return environ[name].replace("\\", "\\\\").replace('"', '\\"')


def _overlay_environment(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    for variable, value in environ.items():
        if not variable.startswith("TIDEMILL_") or "__" not in variable:
            continue
        *path, last = variable.removeprefix("TIDEMILL_").lower().split("__")
        section = values
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise InvalidError(
                    f"an environment variable sets a key below a plain value: variable={variable} key={part}.",
                    fix=f"Unset it, or make {part} a section of the file.",
                )
        section[last] = value
