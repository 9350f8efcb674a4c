"""Topic configs: every key of Kafka 4, what it means here, and what values it takes. Names are Kafka's own.

honoured   does what Kafka documents
shown      asks for something that cannot be otherwise here, or that this design has not got: any value that Kafka
           takes is stored and shown, and changes nothing (tools set them by habit, Kafka Streams always)
single     would change what clients see, and is not served: one value is taken, every other one refused by name
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
"""Of one value: a topic is one row of the metastore."""

_INT: Final = 2**31 - 1
_LONG: Final = 2**63 - 1


AS_SENT: Final = -1
_CODECS: Final = {"uncompressed": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4, "producer": AS_SENT}
"""Numbers of a batch's attributes (`batch.codecs`)."""


class TopicConfig(msgspec.Struct, frozen=True):
    """What is honoured, typed. retention_ms, retention_bytes: −1 keeps everything; bytes are of one partition, as in
    Kafka. append_time: records get the time at which they are stored. ahead_max_ms: how far beyond now a record's own
    time may lie. codec: by what batches are compressed; AS_SENT leaves it to producers. cleanup: what is done with the
    past; the four after it say when it is compacted (`keeper`). captured, which is no config: it is a captured
    table's topic, in which a record without a key empties its partition."""

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
    def asks_keys(self) -> bool:
        """Of every record."""
        return self.compacts and not self.captured

    @property
    def compacts(self) -> bool:
        return "compact" in self.cleanup

    @property
    def forgets(self) -> bool:
        """By time or by size."""
        return "delete" in self.cleanup and (self.retention_ms >= 0 or self.retention_bytes >= 0)


class Setting(msgspec.Struct, frozen=True):
    """One config as it is listed.

    kind       boolean, string, int, long, double or list, as Kafka types it
    field      its place in TopicConfig, for one that is honoured
    low, high  bounds of a number; values: what a string, or an item of a list, may be ((): anything)
    single     only the default is taken
    broker     the broker's config that Kafka takes the default from, "" = none
    says       what it means here, in a sentence: the documentation of DescribeConfigs and docs/kafka.md
    fix        what to do instead, for one that is refused
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
        """The value, typed. Raises InvalidError."""
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
    """The items of a config of kind list."""
    return tuple(item.strip() for item in value.split(",") if item.strip())


def _segments(kind: str, default: int, low: int, broker: str) -> Setting:
    high = _INT if kind == "int" else _LONG
    says = "Nothing: there are no segment files. Records lie in objects of the bucket."
    return Setting(str(default), kind, says, low=low, high=high, broker=broker)


def _level(default: int, low: int, high: int) -> Setting:
    return Setting(str(default), "int", "Nothing: what is compressed here is so at a middle level.", low=low, high=high)


def _tiers(default: str, kind: str) -> Setting:
    says = "There is no second tier: everything is in the bucket from the first byte on."
    return Setting(default, kind, says, single=True, fix="Leave it out: old records cost object storage already.")


def _throttle() -> Setting:
    return Setting("", "list", "Nothing: no replica follows another, so there is no traffic to throttle.")


SETTINGS: Final[dict[str, Setting]] = {
    "cleanup.policy": Setting(
        "delete", "list", "delete: what retention takes goes. compact: the newest of each key stays. Empty: all does.",
        "cleanup", values=("compact", "delete"), broker="log.cleanup.policy",
    ),
    "compression.gzip.level": _level(-1, -1, 9),
    "compression.lz4.level": _level(9, 1, 17),
    "compression.type": Setting(
        "producer", "string", "By what batches are compressed, here where a producer did otherwise. producer: as sent.",
        "codec", values=tuple(_CODECS), broker="compression.type",
    ),
    "compression.zstd.level": _level(3, -131072, 22),
    "delete.retention.ms": Setting(
        "86400000", "long", "A tombstone of a compacted topic stays so long after what it deletes has gone.",
        "delete_retention_ms", 0, _LONG, broker="log.cleaner.delete.retention.ms",
    ),
    "file.delete.delay.ms": _segments("long", 60_000, 0, "log.segment.delete.delay.ms"),
    "flush.messages": Setting(
        str(_LONG), "long", "Nothing: every acknowledged record is durable.", low=1, high=_LONG,
        broker="log.flush.interval.messages",
    ),
    "flush.ms": Setting(
        str(_LONG), "long", "Nothing: every acknowledged record is durable.", high=_LONG,
        broker="log.flush.interval.ms",
    ),
    "follower.replication.throttled.replicas": _throttle(),
    "index.interval.bytes": _segments("int", 4096, 0, "log.index.interval.bytes"),
    "leader.replication.throttled.replicas": _throttle(),
    "local.retention.bytes": _tiers("-2", "long"),
    "local.retention.ms": _tiers("-2", "long"),
    "max.compaction.lag.ms": Setting(
        str(_LONG), "long", "A compacted topic is compacted when it holds a superseded record that is so old.",
        "compaction_lag_max_ms", 1, _LONG, broker="log.cleaner.max.compaction.lag.ms",
    ),
    "max.message.bytes": Setting(
        str(KAFKA_REQUEST_BYTES), "int", "The largest record batch that is taken, as it is stored.",
        "max_message_bytes", BATCH_BYTES_MIN, KAFKA_REQUEST_BYTES, broker="message.max.bytes",
    ),
    "message.timestamp.after.max.ms": Setting(
        "3600000", "long", "A batch with a record later than now by more is refused (INVALID_TIMESTAMP).",
        "ahead_max_ms", 0, _LONG, broker="log.message.timestamp.after.max.ms",
    ),
    "message.timestamp.before.max.ms": Setting(
        str(_LONG), "long", "Records of any age are taken.", single=True,
        broker="log.message.timestamp.before.max.ms", fix="Leave it out, or set message.timestamp.type=LogAppendTime.",
    ),
    "message.timestamp.type": Setting(
        "CreateTime", "string", "CreateTime: the producer's times. LogAppendTime: the time at which a batch is stored.",
        "append_time", values=("CreateTime", "LogAppendTime"), broker="log.message.timestamp.type",
    ),
    "min.cleanable.dirty.ratio": Setting(
        "0.5", "double", "A partition is compacted when such a part of its bytes came since it was compacted last.",
        "dirty_ratio", 0, 1, broker="log.cleaner.min.cleanable.ratio",
    ),
    "min.compaction.lag.ms": Setting(
        "0", "long", "A record younger than this is not compacted away.",
        "compaction_lag_ms", 0, _LONG, broker="log.cleaner.min.compaction.lag.ms",
    ),
    "min.insync.replicas": Setting(
        "1", "int", "Nothing: whatever it asks for, an acknowledged record is durable in the bucket.",
        low=1, high=_INT, broker="min.insync.replicas",
    ),
    "preallocate": Setting("false", "boolean", "Nothing: there are no segment files.", broker="log.preallocate"),
    "remote.log.copy.disable": _tiers("false", "boolean"),
    "remote.log.delete.on.disable": _tiers("false", "boolean"),
    "remote.storage.enable": _tiers("false", "boolean"),
    "retention.bytes": Setting(
        "-1", "long", "Of each partition the oldest batches go beyond it, what no pipeline has read excepted.",
        "retention_bytes", -1, _LONG, broker="log.retention.bytes",
    ),
    "retention.ms": Setting(
        "-1", "long", "Batches whose newest record is older go, what no pipeline has read excepted.",
        "retention_ms", -1, _LONG, broker="log.retention.ms",
    ),
    "segment.bytes": _segments("int", 1 << 30, 14, "log.segment.bytes"),
    "segment.index.bytes": _segments("int", 10 << 20, 4, "log.index.size.max.bytes"),
    "segment.jitter.ms": _segments("long", 0, 0, "log.roll.jitter.ms"),
    "segment.ms": _segments("long", 604_800_000, 1, "log.roll.ms"),
    "unclean.leader.election.enable": Setting(
        "false", "boolean", "Nothing: no election loses a record.", broker="unclean.leader.election.enable"
    ),
}  # fmt: skip


_WORDS: Final[dict[str, dict[str, int]]] = {
    "append_time": {"CreateTime": False, "LogAppendTime": True},
    "codec": _CODECS,
}


def topic_config(config: Mapping[str, str]) -> TopicConfig:
    """The config of a topic's row. Raises InvalidError, naming the first config that is unknown or not served so, or
    two that contradict each other."""
    found = _typed(config)
    check_together(found)
    return found


def check_together(config: TopicConfig) -> None:
    """Raises InvalidError where a record would have to be compacted before it may be, as Kafka does."""
    least, most = config.compaction_lag_ms, config.compaction_lag_max_ms
    if least > most:
        raise InvalidError(
            f"they contradict each other: {LAGS[0]}={least} {LAGS[1]}={most}.",
            fix=f"Set {LAGS[0]} to {LAGS[1]} at most.",
        )


LAGS: Final = ("min.compaction.lag.ms", "max.compaction.lag.ms")


def _typed(config: Mapping[str, str]) -> TopicConfig:
    fields: dict[str, object] = {}
    for name, value in sorted(config.items()):
        setting = SETTINGS.get(name)
        if setting is None:
            raise InvalidError(f"unknown topic config: name={name}.", fix=f"Known are {', '.join(SETTINGS)}.")
        if setting.single:
            if value != setting.default:
                raise InvalidError(f"not served: name={name} value={value[:80]!r}.", fix=setting.fix)
            continue
        parsed = setting.parse(name, value)
        if setting.field:
            fields[setting.field] = _WORDS[setting.field][str(parsed)] if setting.field in _WORDS else parsed
    return msgspec.convert(fields, TopicConfig)


def stored_config(config: Mapping[str, str]) -> TopicConfig:
    """As `topic_config`, of a row that may be older than the checks: what is not served now is passed over, and what
    contradicts stands."""
    fields: dict[str, str] = {}
    for name, value in config.items():
        with contextlib.suppress(InvalidError):
            _typed({name: value})
            fields[name] = value
    return _typed(fields)
