"""Sections of the configuration about the servers of a node: HTTP, Kafka, and their security (TLS, SASL, tokens, signed
URLs).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from tidemill.base.address import Address
from tidemill.base.config.sections import NAME, NOT_A_NAME, Section, check_address

KEY_BYTES_MIN = 32

KafkaSecurity = Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]


def _check_advertised(value: str) -> str:
    """Check an address that clients can open, or ""."""
    if value and (Address.parse(value).port == 0 or Address.parse(value).is_wildcard):
        raise ValueError("write the host:port by which clients reach this node, e.g. kafka.example.com:9094")
    return value


RESERVED_PAGES = frozenset(
    {"api", "compatibility", "config", "console", "contexts", "freshz", "healthz", "iceberg", "metrics", "mode",
     "readyz", "schemas", "subjects", "v1"}
)  # fmt: skip


class HttpSection(Section):
    """See `node.http.limits.HttpLimits`, created by `node.settings_from_config`.

    pages  first part of a path → directory whose files are served there, relative to the configuration's file
    """

    authenticate: bool = False
    tls: bool = False
    connections: int = Field(4_096, ge=16, le=1_000_000)
    per_address: int = Field(1_000, ge=1, le=1_000_000)
    address_connections: int = Field(2_048, ge=1, le=1_000_000)
    header_timeout_s: float = Field(20.0, ge=0.1, le=3600.0)
    header_kb: int = Field(64, ge=8, le=64)
    body_kb: int = Field(1_024, ge=1, le=1_048_576)
    pages: dict[str, str] = {}

    @field_validator("pages")
    @classmethod
    def _check_pages(cls, value: dict[str, str]) -> dict[str, str]:
        for name, directory in value.items():
            if not NAME.match(name):
                raise ValueError(NOT_A_NAME.format(name))
            if name in RESERVED_PAGES:
                raise ValueError(f"the node itself serves /{name}: choose another name")
            if not directory:
                raise ValueError(f"the page {name} has no directory")
        return value


class TlsSection(Section):
    """TLS of Kafka and HTTP; paths are relative to the configuration's file.

    certificate  PEM, the server's own certificate first, then its chain
    key          its private key in PEM, without a password
    client_ca    PEM of the CAs that sign client certificates
    """

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
    """Keys of bearer tokens: one of `jwks_file`, `jwks_url`, `secret`. `issuer` and `audience` are required of a token
    unless empty."""

    jwks_file: str = ""
    jwks_url: str = ""
    secret: str = ""
    issuer: str = ""
    audience: str = ""
    principal_claim: str = "sub"
    leeway_s: int = Field(30, ge=0, le=3_600)


class SigningSection(Section):
    """Keys of signed URLs, by id; see `shapes.definition.signed_urls.SigningKeys`, created by
    `node.settings_from_config`.
    """

    keys: dict[str, str] = {}
    use: str = ""
    max_s: int = Field(7 * 86_400, ge=1, le=366 * 86_400)
    leeway_s: int = Field(30, ge=0, le=3_600)

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, value: dict[str, str]) -> dict[str, str]:
        for name, key in value.items():
            if not NAME.match(name):
                raise ValueError(NOT_A_NAME.format(name))
            if len(key.encode()) < KEY_BYTES_MIN:
                raise ValueError(f"the key {name} is too short: use at least {KEY_BYTES_MIN} bytes")
        return value

    @field_validator("use")
    @classmethod
    def _check_use(cls, value: str, info: ValidationInfo) -> str:
        if value and value not in info.data.get("keys", {}):
            raise ValueError(f"{value!r} is not one of security.signing.keys")
        return value


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
        return check_address(value)

    @field_validator("advertised")
    @classmethod
    def _check_advertised_field(cls, value: str) -> str:
        return _check_advertised(value)


class KafkaSection(Section):
    """See also `kafka.settings.KafkaSettings`: limits that are not configured."""

    security: KafkaSecurity = "plaintext"
    advertised: str = ""
    listeners: dict[str, KafkaListenerSection] = {}
    auto_create_topics: bool = True
    """Metadata requests that allow it create missing topics with `default_partitions`."""
    default_partitions: int = Field(4, ge=1, le=10_000)
    partitions_max: int = Field(20_000, ge=1)
    """Maximum number of partitions of all topics: clients cannot create topics beyond it.

    Each partition with records costs a node a few kB.
    """
    connections_max: int = Field(1_000, ge=1)
    """Maximum number of connections.

    It is lowered if the process may open fewer than twice as many files, because stores need the rest.
    """
    connections_per_address_max: int = Field(500, ge=1)
    """Maximum number of connections from one address: a half, so that a faulty machine does not lock all others out."""
    fetch_sessions_max: int = Field(1_000, ge=0)
    """Maximum number of fetch sessions (Kafka's max.incremental.fetch.session.cache.slots)."""
    groups_max: int = Field(10_000, ge=1)
    """Maximum number of consumer groups in memory: groups with members, and groups that were requested recently."""
    group_members_max: int = Field(1_000, ge=1)
    """Maximum number of members of one group (Kafka's group.max.size)."""
    group_initial_rebalance_delay_ms: int = Field(3_000, ge=0)
    """Time for which a group that was empty waits for more members; each member that joins restarts it (as in Kafka).
    """
    group_min_session_timeout_ms: int = Field(6_000, ge=1)
    group_max_session_timeout_ms: int = Field(1_800_000, ge=1)
    group_consumer_session_timeout_ms: int = Field(45_000, ge=1)
    group_consumer_heartbeat_interval_ms: int = Field(5_000, ge=1, validate_default=True)
    """Session timeout and heartbeat interval of members of the consumer protocol, which cannot choose their own."""
    group_consumer_min_session_timeout_ms: int = Field(45_000, ge=1)
    group_consumer_max_session_timeout_ms: int = Field(60_000, ge=1)
    group_consumer_min_heartbeat_interval_ms: int = Field(5_000, ge=1)
    group_consumer_max_heartbeat_interval_ms: int = Field(15_000, ge=1)
    """Bounds of the same values in a group's own configs. The node's own value is always within them."""
    group_consumer_migration_policy: Literal["bidirectional", "upgrade", "downgrade", "disabled"] = "bidirectional"
    """Policy for changing the protocol of a group that has members."""
    retention_ms: int = Field(-1, ge=-1)
    retention_bytes: int = Field(-1, ge=-1)
    """Retention of topics that clients create without their own values."""
    transaction_timeout_max_ms: int = Field(900_000, ge=1_000)
    """Longest transaction.timeout.ms that a producer may request (Kafka's transaction.max.timeout.ms).

    An open transaction can hold back read_committed consumers, and tables, for this long.
    """
    transactional_id_expires_ms: int = Field(604_800_000, ge=60_000)
    """Time after which a transactional id without a transaction expires (transactional.id.expiration.ms)."""

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
