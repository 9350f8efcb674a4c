"""`tidemill.toml` as plain data. Components are not configured here but passed in; `${NAME}` expands a variable of the
environment, or of the file `.env` next to it.

Every value may also come from the environment as TIDEMILL_<SECTION>__<KEY>, which overrides the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError, field_validator

from tidemill.base.address import Address
from tidemill.base.config.environment import ENV_FILE, expand_variables, overlay_environment
from tidemill.base.config.listeners import HttpSection, KafkaSection, SecuritySection
from tidemill.base.config.sections import (
    NAME,
    NOT_A_NAME,
    CaptureSection,
    ConsensusSection,
    FreshnessSection,
    LakeSection,
    MetastoreSection,
    NodeSection,
    ObjectsSection,
    PipelineSection,
    RegistrySection,
    RetentionSection,
    Section,
    SparkSection,
    StorageSection,
    TopicSection,
)
from tidemill.base.config.shapes import ShapeSection, ShapesSection
from tidemill.base.errors import InvalidError, nearest_name
from tidemill.base.pgtypes.avro import AVRO

DEFAULT_FILE = "tidemill.toml"
_PLAIN_IN_PATHS = "/:@!$&'()*+,;="
"""Characters that stand for themselves in the path of a URL (RFC 3986, section 3.3)."""


class Config(Section):
    node: NodeSection = NodeSection()
    objects: ObjectsSection = ObjectsSection()
    consensus: ConsensusSection = ConsensusSection()
    metastore: MetastoreSection = MetastoreSection()
    retention: RetentionSection = RetentionSection()
    storage: StorageSection = StorageSection()
    lake: LakeSection = LakeSection()
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
        return self.objects.url or _directory_url(Path(self.node.data).absolute() / "objects")

    @property
    def consensus_url(self) -> str:
        return self.consensus.url or f"sqlite://{Path(self.node.data).absolute()}/consensus.db"


def _directory_url(directory: Path) -> str:
    """Return the URL of a directory. Characters with a meaning in URLs (`#`, `?`, `%`) are quoted."""
    return f"file://{quote(os.fsencode(directory), safe=_PLAIN_IN_PATHS)}"


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


def advertised_addresses(config: Config) -> dict[str, Address]:
    """Return the address to which clients of each server are sent, by the key of its bound address. May wait for
    DNS."""
    own_host = config.node.advertised_host
    servers = {"node.kafka": (config.node.kafka, config.kafka.advertised), "node.http": (config.node.http, "")}
    for name, section in config.kafka.listeners.items():
        servers[f"kafka.listeners.{name}.address"] = section.address, section.advertised
    return {
        key: Address.parse(advertised) if advertised else Address.parse(bound).advertised(own_host)
        for key, (bound, advertised) in servers.items()
    }


def find_file(path: Path | None = None, *, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the file that `load` reads; None when none was named and the default one is absent.

    Raises InvalidError when a named file does not exist, or its directory cannot be entered.
    """
    environ = os.environ if environ is None else environ
    chosen = path or Path(environ.get("TIDEMILL_CONFIG", DEFAULT_FILE))
    try:
        chosen.stat()
        return chosen
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise _unreadable(chosen, error) from error
    if path is not None:
        raise InvalidError(f"no such configuration file: path={chosen}.", fix="Create it, or correct --config.")
    if "TIDEMILL_CONFIG" in environ:
        raise InvalidError(
            f"no such configuration file: TIDEMILL_CONFIG={chosen}.", fix="Create it, or unset TIDEMILL_CONFIG."
        )
    return None


def load(path: Path | None = None, *, environ: Mapping[str, str] | None = None) -> Config:
    """Read the file (default ./tidemill.toml, which may be absent) and the environment.

    Raises InvalidError with one sentence that names the key and the correction.
    """
    environ = os.environ if environ is None else environ
    found = find_file(path, environ=environ)
    return parse_text(_read_text(found) if found else "", found or Path(DEFAULT_FILE), environ)


def parse_text(text: str, path: Path, environ: Mapping[str, str]) -> Config:
    """Parse the text of a file, which need not exist yet, with the environment. Raises InvalidError as `load`."""
    try:
        values = tomllib.loads(expand_variables(text, environ, path.parent / ENV_FILE))
    except tomllib.TOMLDecodeError as error:
        raise InvalidError(f"{path} is not TOML: {error}.", fix="Correct that line.") from error
    overlay_environment(values, environ, Config)
    return parse(values, origin=str(path))


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
    pages = {name: str((base / directory).absolute()) for name, directory in config.http.pages.items()}
    config = config.model_copy(
        update={
            "pipeline": pipelines,
            "security": _resolve_paths(config.security, base),
            "http": config.http.model_copy(update={"pages": pages}),
            "node": config.node.model_copy(update={"data": str((base / config.node.data).absolute())}),
            "objects": ObjectsSection(url=_resolve_url(config.objects.url, base)),
            "consensus": ConsensusSection(url=_resolve_url(config.consensus.url, base)),
        }
    )
    _check_security(config, origin)
    _check_registry(config, origin)
    _check_lake(config, origin)
    for driver, names in pipelines_by_driver(config).items():
        _check_driver_settings(config, driver, names, origin)
    return config


def _resolve_url(url: str, base: Path) -> str:
    """Resolve a URL of a local store, whose path may be relative to the configuration's file."""
    scheme, colon, path = url.partition(":")
    if scheme == "sqlite" and colon and path and not path.startswith("/"):
        return f"sqlite:{(base / path).absolute()}"
    if url and not url.startswith("~") and (not colon or "/" in scheme):
        return str((base / url).absolute())
    return url


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


def _check_lake(config: Config, origin: str) -> None:
    """Check that keys of the bucket are handed out to authenticated clients or on this machine. Raises InvalidError."""
    public = not config.http.authenticate and not Address.parse(config.node.http).is_loopback
    if config.lake.credentials != "none" and public:
        raise InvalidError(
            f"keys of the bucket would be handed out without authentication in {origin}:"
            f" lake.credentials={config.lake.credentials} node.http={config.node.http}.",
            fix="Set http.authenticate = true, or a loopback address as node.http.",
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
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> InvalidError:
    reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
    return InvalidError(
        f"the configuration cannot be read: path={path} reason={reason}.", fix="Use a readable TOML file."
    )
