"""What every handler may use: the rooms below, the node's own name and settings, the shared caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.pace import STRETCH_S, Pace
from tidemill.kafka.settings import KafkaSettings
from tidemill.kafka.topic_cache import TopicCache
from tidemill.metastore.catalogue import Catalogue
from tidemill.topics.front import TopicLog
from tidemill.topics.group_offsets import GroupOffsets
from tidemill.topics.producer_ids import ProducerIds


class NodeAddress(Protocol):
    """One live node as `topics.leadership` lists it."""

    @property
    def name(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def kafka_port(self) -> int: ...
    @property
    def node_id(self) -> int: ...


class Nodes(Protocol):
    def members(self) -> Sequence[NodeAddress]: ...


class Broker(msgspec.Struct, frozen=True):
    """A node as clients see it."""

    node_id: int
    name: str
    host: str
    port: int


class Context:
    """`pace`: of the work of all requests together; `beginnings`: of what happens while their frames are handled."""

    def __init__(
        self,
        *,
        topics: TopicLog,
        catalogue: Catalogue,
        cache: TopicCache,
        producer_ids: ProducerIds,
        group_offsets: GroupOffsets,
        nodes: Nodes | None,
        clock: Clock,
        settings: KafkaSettings,
        own: Broker,
    ) -> None:
        self.topics = topics
        self.catalogue = catalogue
        self.cache = cache
        self.producer_ids = producer_ids
        self.group_offsets = group_offsets
        self.clock = clock
        self.pace = Pace(clock)
        self.beginnings = Pace(clock, 2 * STRETCH_S)
        self.settings = settings
        self.own = own
        self._nodes = nodes

    def brokers(self) -> list[Broker]:
        """All live nodes by node id. This node is always among them, at the address it advertises."""
        found = {self.own.node_id: self.own}
        for member in self._nodes.members() if self._nodes is not None else ():
            if member.name != self.own.name and member.kafka_port > 0:
                found[member.node_id] = Broker(member.node_id, member.name, member.host, member.kafka_port)
        return [found[node_id] for node_id in sorted(found)]
