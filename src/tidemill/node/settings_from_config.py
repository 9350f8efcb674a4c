"""Conversion of sections of the configuration to the settings of the rooms. It is separate from the configuration,
because reading the configuration must not load those rooms.

`convert` takes the values that a section and its room's settings hold under the same name and in the same unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from msgspec import convert
from msgspec.structs import replace

from tidemill.base.address import Address
from tidemill.base.clock import Clock, Rand
from tidemill.base.config.config import Config, listener_protocols
from tidemill.base.config.listeners import HttpSection
from tidemill.base.config.sections import StorageSection
from tidemill.base.config.shapes import BoundParam, ShapeSection, ShapesSection
from tidemill.kafka.net.listener_security import ListenerSecurity
from tidemill.kafka.net.listeners import DEFAULT, Listener
from tidemill.node.http.limits import HttpLimits
from tidemill.security.oauth_tokens import TokenVerifier
from tidemill.security.principals import principal_rules
from tidemill.security.sasl import Authenticator
from tidemill.security.tls import ServerCertificates
from tidemill.security.users import Users
from tidemill.shapes.definition.server_defined import FromClaim, FromClient, Param, ServerDefinedShape
from tidemill.shapes.definition.signed_urls import SigningKeys
from tidemill.shapes.http.authorization import ShapeAuthorizer
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.settings import CacheAges, ShapeSettings
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.topics.config.settings import TopicSettings


def http_limits(section: HttpSection) -> HttpLimits:
    return replace(
        convert(section, HttpLimits, from_attributes=True),
        header_bytes=section.header_kb << 10,
        body_bytes=section.body_kb << 10,
    )


def build_authenticator(config: Config, users: Users, clock: Clock, rand: Rand) -> Authenticator:
    """Build the authenticator. Raises InvalidError."""
    oauth = config.security.oauth
    given = oauth.jwks_file or oauth.jwks_url or oauth.secret
    return Authenticator(users, rand, TokenVerifier(oauth, clock) if given else None)


def kafka_listeners(config: Config, authenticator: Authenticator, advertised: Mapping[str, Address]) -> list[Listener]:
    """Return all Kafka listeners of the node, node.kafka first. Listeners of one protocol share a gate. `advertised`:
    the result of `advertised_addresses`. Raises InvalidError."""
    gates = {protocol: kafka_gate(config, protocol, authenticator) for protocol in listener_protocols(config)}
    bound = Address.parse(config.node.kafka)
    found = [Listener(DEFAULT, *bound, *advertised["node.kafka"], gates[config.kafka.security])]
    for name, section in config.kafka.listeners.items():
        bound = Address.parse(section.address)
        gate = gates[section.security or config.kafka.security]
        key = f"kafka.listeners.{name}.address"
        found.append(Listener(name, *bound, *advertised[key], gate, key))
    return found


def kafka_gate(config: Config, protocol: str, authenticator: Authenticator) -> ListenerSecurity:
    """Build the gate of one protocol. Raises InvalidError for a principal rule that does not parse."""
    tls, sasl = config.security.tls, config.security.sasl
    return ListenerSecurity(
        ServerCertificates(tls) if protocol.endswith("ssl") else None,
        principal_rules(tls.principal_rules),
        authenticator=authenticator,
        mechanisms=sasl.mechanisms if protocol.startswith("sasl") else (),
        session_lifetime_s=sasl.session_lifetime_s,
    )


def topic_settings(section: StorageSection) -> TopicSettings:
    return TopicSettings(
        reconcile=section.l1,
        l1_object_bytes=section.l1_object_mb << 20,
        reconcile_min_s=section.l1_min_s,
        reconcile_max_s=max(section.l1_min_s, section.l1_max_s),
    )


def shapes_directory(config: Config) -> Path | None:
    """Return the directory of this node's shapes. It is the node's own even if several nodes share a data directory."""
    if not config.shapes.disk_mb:
        return None
    return Path(config.node.data).absolute() / "shapes" / quote(config.node.name, safe="")


def shape_settings(section: ShapesSection, directory: Path | None = None) -> ShapeSettings:
    return replace(
        convert(section, ShapeSettings, from_attributes=True),
        directory=directory,
        disk_bytes=section.disk_mb << 20,
        memory_bytes=section.memory_mb << 20,
        subset_bytes=section.subset_mb << 20,
        limits=LogLimits(section.chunk_kb << 10, section.log_mb << 20, section.base_mb << 20),
        backlog=BacklogLimits(section.backlog_mb << 20, section.backlog_s),
        cache=CacheAges(section.cache_initial_s, section.cache_later_s, section.cache_live_s, section.cache_stale_s),
    )


def build_grants(config: Config, clock: Clock) -> ShapeAuthorizer:
    """Build the grants of server-defined shapes. Raises InvalidError for a definition that could never be served."""
    section = config.security.signing
    signing = SigningKeys(section.keys, section.max_s, section.leeway_s)
    return ShapeAuthorizer(clock, [_named_shape(name, shape) for name, shape in config.shape.items()], signing)


def _named_shape(name: str, section: ShapeSection) -> ServerDefinedShape:
    return ServerDefinedShape(
        name,
        section.table,
        section.where,
        tuple(_shape_param(each) for each in section.params),
        tuple(section.columns),
        section.replica,
        section.narrow,
    )


def _shape_param(param: str | BoundParam) -> Param:
    if isinstance(param, str):
        return param
    return FromClaim(param.claim) if param.claim else FromClient(param.client)
