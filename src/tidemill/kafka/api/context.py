"""Shared context of all handlers: the rooms below, the node's own name and settings, the shared caches, and the
coordinators of groups and transactional ids.

Groups and transactional ids are assigned to coordinating nodes by rendezvous hashing over the live nodes, as partitions
are assigned to leaders. Equal views give equal owners, and views converge within a poll. While they differ, two nodes
may both claim a group or id. Their writes are fenced (groups) or compare-and-set (transactions), so at most one of them
makes progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.runtime.coop import STRETCH_S, CoopBudget
from tidemill.kafka import error_codes
from tidemill.kafka.api.authorizer import RequestAuthorizer
from tidemill.kafka.metadata.encoded_partitions import EncodedPartitions
from tidemill.kafka.metadata.topic_cache import TopicCache
from tidemill.kafka.net.listeners import DEFAULT, AdvertisedListener
from tidemill.kafka.settings import KafkaSettings
from tidemill.kafka.transactions.state import key_of
from tidemill.metastore.catalogue import Catalogue
from tidemill.security.audit import Audit
from tidemill.security.quotas import QuotaCache
from tidemill.security.users import Users
from tidemill.topics.api import TopicLog
from tidemill.topics.membership import rendezvous_leader
from tidemill.topics.produce.producer_ids import ProducerIds

if TYPE_CHECKING:
    from tidemill.kafka.fetch_sessions.implicit import ImplicitSessions
    from tidemill.kafka.fetch_sessions.sessions import FetchSessions
    from tidemill.kafka.groups.configs import GroupConfigCache
    from tidemill.kafka.groups.coordinator import GroupCoordinator
    from tidemill.kafka.groups.topic_patterns import TopicPatterns
    from tidemill.kafka.transactions.coordinator import TransactionCoordinator

_KEY_BYTES_MAX: Final = 900


class NodeAddress(Protocol):
    """One live node as the cluster view lists it."""

    @property
    def name(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def kafka_port(self) -> int: ...
    @property
    def node_id(self) -> int: ...
    @property
    def listeners(self) -> Mapping[str, tuple[str, int]]: ...


class Nodes(Protocol):
    def members(self) -> Sequence[NodeAddress]: ...
    def on_change(self, callback: Callable[[], None]) -> None: ...


class Broker(msgspec.Struct, frozen=True):
    """Node as clients see it."""

    node_id: int
    name: str
    host: str
    port: int


@dataclass(eq=False, kw_only=True)
class Context:
    """Context of a request, as a client of one listener sees it."""

    topics: TopicLog
    catalogue: Catalogue
    cache: TopicCache
    producer_ids: ProducerIds
    users: Users
    access: RequestAuthorizer
    quotas: QuotaCache
    group_configs: GroupConfigCache
    nodes: Nodes | None
    clock: Clock
    audit: Audit
    settings: KafkaSettings
    own: Broker
    """Broker entry of this node, with the address of `listener`."""
    listeners: Sequence[AdvertisedListener] = ()
    """All listeners of this node."""
    listener: str = DEFAULT
    """Listener through which the client connected."""
    layouts: EncodedPartitions = field(default_factory=EncodedPartitions)
    pace: CoopBudget = field(init=False)
    """Budget of loop time for the work of all requests."""
    beginnings: CoopBudget = field(init=False)
    """Budget of loop time for the handling of their frames."""
    owners: CoordinatorLookup = field(init=False)
    groups: GroupCoordinator = field(init=False)
    transactions: TransactionCoordinator = field(init=False)
    fetch_sessions: FetchSessions = field(init=False)
    repeats: ImplicitSessions = field(init=False)
    subscribable: TopicPatterns = field(init=False)

    def __post_init__(self) -> None:
        self.pace = CoopBudget(self.clock)
        self.beginnings = CoopBudget(self.clock, 2 * STRETCH_S)

    def coordinator_nodes(self) -> list[Broker]:
        """Return the nodes that all live nodes count on.

        This node is included only if membership lists it, or if there is no other node.
        """
        names = {member.name for member in self.nodes.members()} if self.nodes is not None else set()
        return [broker for broker in self.brokers() if broker.name in names] or [self.own]

    def for_listener(self, listener: str, own: Broker) -> Context:
        """Return the context for clients of another listener; both share all objects."""
        found = copy(self)
        found.listener, found.own = listener, own
        return found

    def brokers(self) -> list[Broker]:
        """Return the live nodes that have this listener, by node id. This node is always among them."""
        found = {self.own.node_id: self.own}
        for member in self.nodes.members() if self.nodes is not None else ():
            default = (member.host, member.kafka_port)
            host, port = default if self.listener == DEFAULT else member.listeners.get(self.listener, ("", 0))
            if member.name != self.own.name and port > 0:
                found[member.node_id] = Broker(member.node_id, member.name, host, port)
        return [found[node_id] for node_id in sorted(found)]


class CoordinatorLookup:
    def __init__(self, context: Context) -> None:
        self._context = context

    def group_coordinator(self, group: str) -> Broker:
        return self._coordinator_of(f"group/{group}")

    def transaction_coordinator(self, transactional_id: str) -> Broker:
        return self._coordinator_of(f"transaction/{transactional_id}")

    def coordinates_group(self, group: str) -> bool:
        return self.group_coordinator(group).name == self._context.own.name

    def coordinates_transaction(self, transactional_id: str) -> bool:
        return self.transaction_coordinator(transactional_id).name == self._context.own.name

    def _coordinator_of(self, place: str) -> Broker:
        """Return the owner of a place.

        A node that has not joined yet, or has left, coordinates nothing as long as there is another one.
        """
        brokers = self._context.coordinator_nodes()
        if len(brokers) == 1:
            return brokers[0]
        name = rendezvous_leader([broker.name for broker in brokers], place, 0)
        return next(broker for broker in brokers if broker.name == name)


def coordinator_error(context: Context, transactional_id: str) -> int:
    """Return the error code if this node cannot serve the id, else 0."""
    if not transactional_id or len(key_of(transactional_id)) > _KEY_BYTES_MAX:
        return error_codes.INVALID_REQUEST
    return 0 if context.owners.coordinates_transaction(transactional_id) else error_codes.NOT_COORDINATOR
