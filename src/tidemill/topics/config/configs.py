"""Topic configs: every key of Kafka 4, with its meaning here and its values. Names are Kafka's own.

honoured   does what Kafka documents
shown      concerns a mechanism that is fixed here or does not exist: any value that Kafka accepts is stored and
           shown, and has no effect (tools set them by habit, Kafka Streams always)
single     would change what clients see, and is not supported: one value is accepted, every other one rejected
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.base.limits import KAFKA_REQUEST_BYTES

BATCH_BYTES_MIN: Final = 1024
VALUE_CHARS_MAX: Final = 4096
"""Limit of one value: a topic is one row of the metastore."""

_INT: Final = 2**31 - 1
_LONG: Final = 2**63 - 1


AS_SENT: Final = -1
_CODECS: Final = {"uncompressed": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4, "producer": AS_SENT}
"""Codec numbers in a batch's attributes (`batch.compression`)."""


class TopicConfig(msgspec.Struct, frozen=True):
    """Typed values of the honoured configs.

    retention_ms, retention_bytes: −1 retains everything; bytes are per partition, as in Kafka. append_time: records get
    the time at which they are stored. ahead_max_ms: how far in the future a record's own time may be. codec:
    compression of batches; AS_SENT leaves it to producers. cleanup: treatment of old records; the four fields after it
    determine when a partition is compacted (`maintenance`). captured (no config): the topic is a captured table's, in
    which a record without a key empties its partition.
    """

    max_message_bytes: int = KAFKA_REQUEST_BYTES
    retention_ms: int = -1
    retention_bytes: int = -1
    append_time: bool = False
    ahead_max_ms: int = 3_600_000
    codec: int = AS_SENT
    cleanup: tuple[str, ...] = ("delete",)
    delete_retention_ms: int = 86_400_000
    compaction_lag_ms: int = 0
    compaction_lag_max_ms: int = _LONG
    dirty_ratio: float = 0.5
    captured: bool = False

    @property
    def requires_keys(self) -> bool:
        """True if every record must have a key."""
        return self.is_compacted and not self.captured

    @property
    def is_compacted(self) -> bool:
        return "compact" in self.cleanup

    @property
    def has_retention(self) -> bool:
        """True if records are deleted by time or by size."""
        return "delete" in self.cleanup and (self.retention_ms >= 0 or self.retention_bytes >= 0)


class Setting(msgspec.Struct, frozen=True):
    """One config as listed.

    kind       boolean, string, int, long, double or list, as Kafka types it
    field      its field of TopicConfig, if it is honoured
    low, high  bounds of a number; values: allowed values of a string, or of a list's items ((): any)
    single     only the default is accepted
    broker     the broker's config that Kafka takes the default from, "" = none
    says       its meaning here, in a sentence: the documentation of DescribeConfigs and docs/reference/kafka.md
    fix        alternative to a rejected value
    """

    default: str
    kind: str
    says: str
    field: str = ""
    low: float = 0
    high: float = 0
    values: tuple[str, ...] = ()
    single: bool = False
    broker: str = ""
    fix: str = ""

    @property
    def meaning(self) -> str:
        return "honoured" if self.field else "single" if self.single else "shown"

    def parse(self, name: str, value: str) -> int | float | bool | str | tuple[str, ...]:
        """Parse the value. Raises InvalidError."""
        if len(value) > VALUE_CHARS_MAX:
            raise InvalidError(f"bad value: name={name} chars={len(value)}.", fix=f"Use {VALUE_CHARS_MAX} at most.")
        if self.kind == "boolean":
            return bool(_one_of(name, value.strip().lower(), ("false", "true")) == "true")
        if self.kind in _NUMBERS:
            return self._number(name, value)
        if self.kind == "list":
            items = split_list(value)
            for item in items if self.values else ():
                _one_of(name, item, self.values)
            return items
        return _one_of(name, value, self.values) if self.values else value

    def _number(self, name: str, value: str) -> int | float:
        try:
            number = _NUMBERS[self.kind](value)
        except ValueError:
            number = self.low - 1
        if not self.low <= number <= self.high or not value.isascii():
            raise InvalidError(f"bad value: name={name} value={value!r}.", fix=f"Use {self.low} to {self.high}.")
        return number


_NUMBERS: Final[dict[str, Callable[[str], int | float]]] = {"int": int, "long": int, "double": float}


def _one_of(name: str, value: str, values: tuple[str, ...]) -> str:
    if value not in values:
        raise InvalidError(f"bad value: name={name} value={value!r}.", fix=f"Use one of {', '.join(values)}.")
    return value


def split_list(value: str) -> tuple[str, ...]:
    """Split the value of a list config into its items."""
    return tuple(item.strip() for item in value.split(",") if item.strip())


def _segment_setting(kind: str, default: int, low: int, broker: str) -> Setting:
    high = _INT if kind == "int" else _LONG
    says = "No effect: there are no segment files. Records are stored in objects of the bucket."
    return Setting(str(default), kind, says, low=low, high=high, broker=broker)


def _compression_level_setting(default: int, low: int, high: int) -> Setting:
    return Setting(str(default), "int", "No effect: batches compressed here use a medium level.", low=low, high=high)


def _tier_setting(default: str, kind: str) -> Setting:
    says = "There is no second tier: all records are in the bucket from the beginning."
    return Setting(default, kind, says, single=True, fix="Omit it: old records are in object storage already.")


def _throttle_setting() -> Setting:
    return Setting("", "list", "No effect: there are no follower replicas, so no replication traffic.")


SETTINGS: Final[dict[str, Setting]] = {
    "cleanup.policy": Setting(
        "delete", "list", "delete: by retention. compact: the newest record of each key remains. Empty: all remain.",
        "cleanup", values=("compact", "delete"), broker="log.cleanup.policy",
    ),
    "compression.gzip.level": _compression_level_setting(-1, -1, 9),
    "compression.lz4.level": _compression_level_setting(9, 1, 17),
    "compression.type": Setting(
        "producer", "string", "Codec of stored batches; others are recompressed. producer: as sent.",
        "codec", values=tuple(_CODECS), broker="compression.type",
    ),
    "compression.zstd.level": _compression_level_setting(3, -131072, 22),
    "delete.retention.ms": Setting(
        "86400000", "long", "How long a tombstone remains after compaction has removed the records that it deletes.",
        "delete_retention_ms", 0, _LONG, broker="log.cleaner.delete.retention.ms",
    ),
    "file.delete.delay.ms": _segment_setting("long", 60_000, 0, "log.segment.delete.delay.ms"),
    "flush.messages": Setting(
        str(_LONG), "long", "No effect: every acknowledged record is durable.", low=1, high=_LONG,
        broker="log.flush.interval.messages",
    ),
    "flush.ms": Setting(
        str(_LONG), "long", "No effect: every acknowledged record is durable.", high=_LONG,
        broker="log.flush.interval.ms",
    ),
    "follower.replication.throttled.replicas": _throttle_setting(),
    "index.interval.bytes": _segment_setting("int", 4096, 0, "log.index.interval.bytes"),
    "leader.replication.throttled.replicas": _throttle_setting(),
    "local.retention.bytes": _tier_setting("-2", "long"),
    "local.retention.ms": _tier_setting("-2", "long"),
    "max.compaction.lag.ms": Setting(
        str(_LONG), "long", "Age of a superseded record at which its topic is compacted.",
        "compaction_lag_max_ms", 1, _LONG, broker="log.cleaner.max.compaction.lag.ms",
    ),
    "max.message.bytes": Setting(
        str(KAFKA_REQUEST_BYTES), "int", "The largest record batch that is accepted, as stored.",
        "max_message_bytes", BATCH_BYTES_MIN, KAFKA_REQUEST_BYTES, broker="message.max.bytes",
    ),
    "message.timestamp.after.max.ms": Setting(
        "3600000", "long", "A batch with a record further in the future is rejected (INVALID_TIMESTAMP).",
        "ahead_max_ms", 0, _LONG, broker="log.message.timestamp.after.max.ms",
    ),
    "message.timestamp.before.max.ms": Setting(
        str(_LONG), "long", "Records of any age are accepted.", single=True,
        broker="log.message.timestamp.before.max.ms", fix="Omit it, or set message.timestamp.type=LogAppendTime.",
    ),
    "message.timestamp.type": Setting(
        "CreateTime", "string", "CreateTime: the producer's times. LogAppendTime: the time at which a batch is stored.",
        "append_time", values=("CreateTime", "LogAppendTime"), broker="log.message.timestamp.type",
    ),
    "min.cleanable.dirty.ratio": Setting(
        "0.5", "double", "Share of bytes written since its last compaction at which a partition is compacted.",
        "dirty_ratio", 0, 1, broker="log.cleaner.min.cleanable.ratio",
    ),
    "min.compaction.lag.ms": Setting(
        "0", "long", "A record younger than this is not compacted away.",
        "compaction_lag_ms", 0, _LONG, broker="log.cleaner.min.compaction.lag.ms",
    ),
    "min.insync.replicas": Setting(
        "1", "int", "No effect: every acknowledged record is durable in the bucket.",
        low=1, high=_INT, broker="min.insync.replicas",
    ),
    "preallocate": Setting("false", "boolean", "No effect: there are no segment files.", broker="log.preallocate"),
    "remote.log.copy.disable": _tier_setting("false", "boolean"),
    "remote.log.delete.on.disable": _tier_setting("false", "boolean"),
    "remote.storage.enable": _tier_setting("false", "boolean"),
    "retention.bytes": Setting(
        "-1", "long", "Size of a partition beyond which its oldest batches are deleted, once pipelines have read them.",
        "retention_bytes", -1, _LONG, broker="log.retention.bytes",
    ),
    "retention.ms": Setting(
        "-1", "long", "Age of its newest record at which a batch is deleted, once pipelines have read it.",
        "retention_ms", -1, _LONG, broker="log.retention.ms",
    ),
    "segment.bytes": _segment_setting("int", 1 << 30, 14, "log.segment.bytes"),
    "segment.index.bytes": _segment_setting("int", 10 << 20, 4, "log.index.size.max.bytes"),
    "segment.jitter.ms": _segment_setting("long", 0, 0, "log.roll.jitter.ms"),
    "segment.ms": _segment_setting("long", 604_800_000, 1, "log.roll.ms"),
    "unclean.leader.election.enable": Setting(
        "false", "boolean", "No effect: no election loses a record.", broker="unclean.leader.election.enable"
    ),
}  # fmt: skip


_VALUE_NUMBERS: Final[dict[str, dict[str, int]]] = {
    "append_time": {"CreateTime": False, "LogAppendTime": True},
    "codec": _CODECS,
}


def parse_topic_config(config: Mapping[str, str]) -> TopicConfig:
    """Parse the config of a topic's row.

    Raises InvalidError with the first config that is unknown or not supported, or with two that contradict each other.
    """
    found = _parse_config(config)
    check_consistency(found)
    return found


def check_consistency(config: TopicConfig) -> None:
    """Raise InvalidError if a record would have to be compacted before it may be, as Kafka does."""
    least, most = config.compaction_lag_ms, config.compaction_lag_max_ms
    if least > most:
        raise InvalidError(
            f"two configs contradict each other: {COMPACTION_LAGS[0]}={least} {COMPACTION_LAGS[1]}={most}.",
            fix=f"Set {COMPACTION_LAGS[0]} to {COMPACTION_LAGS[1]} at most.",
        )


COMPACTION_LAGS: Final = ("min.compaction.lag.ms", "max.compaction.lag.ms")


def _parse_config(config: Mapping[str, str]) -> TopicConfig:
    fields: dict[str, object] = {}
    for name, value in sorted(config.items()):
        setting = SETTINGS.get(name)
        if setting is None:
            raise InvalidError(f"unknown topic config: name={name}.", fix=f"Known are {', '.join(SETTINGS)}.")
        if setting.single:
            if value != setting.default:
                raise InvalidError(f"config value not supported: name={name} value={value[:80]!r}.", fix=setting.fix)
            continue
        parsed = setting.parse(name, value)
        if setting.field:
            fields[setting.field] = (
                _VALUE_NUMBERS[setting.field][str(parsed)] if setting.field in _VALUE_NUMBERS else parsed
            )
    return msgspec.convert(fields, TopicConfig)


def parse_stored_config(config: Mapping[str, str]) -> TopicConfig:
    """Parse the config of a row that may be older than the checks.

    Unsupported configs are ignored, and contradictions remain.
    """
    fields: dict[str, str] = {}
    for name, value in config.items():
        with contextlib.suppress(InvalidError):
            _parse_config({name: value})
            fields[name] = value
    return _parse_config(fields)
