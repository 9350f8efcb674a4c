"""Groups on nodes to which their coordinator moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.memory import MemoryConsensus
from tidemill.kafka.groups.classic.state import GroupLimits, JoinRequest, SyncRequest
from tidemill.kafka.groups.coordinator import CoordinatorLimits, GroupCoordinator
from tidemill.kafka.groups.group_runner import GroupRunner
from tidemill.metastore.factory import create_metastore
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_OFFSETS
from tidemill.objects.memory import MemoryObjects

LIMITS = GroupLimits(initial_delay_ms=0)


class World:
    """One metastore, and as many nodes that coordinate everything as a test wants."""

    def __init__(self) -> None:
        self.clock, self.rand = SystemClock(), Rand(7)
        self.consensus = MemoryConsensus(self.clock)
        self.metastore: Metastore = create_metastore(self.consensus, MemoryObjects(self.clock), self.clock, self.rand)
        self.tracker = StatusTracker()
        self.nodes: list[GroupCoordinator] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            await node.aclose()
        await self.metastore.aclose()

    def node(
        self, is_own: Callable[[str], bool] = lambda _: True, *, groups_max: int = 100, bytes_max: int = 1 << 20
    ) -> GroupCoordinator:
        made = GroupCoordinator(
            self.metastore, is_own, self.clock, self.rand, node=f"n{len(self.nodes)}", tracker=self.tracker,
            limits=CoordinatorLimits(lambda _: LIMITS, groups_max, bytes_max),
        )  # fmt: skip
        self.nodes.append(made)
        return made

    async def offsets(self) -> list[int]:
        return [row.offset for row in await self.metastore.rows(GROUP_OFFSETS, "g")]


def ask(member_id: str = "", new_id: str = "m1", **more: Any) -> JoinRequest:
    values: dict[str, Any] = {
        "instance_id": None,
        "client_id": "c",
        "client_host": "/h",
        "session_ms": 10_000,
        "rebalance_ms": 10_000,
        "protocol_type": "consumer",
        "protocols": (("range", b"meta"),),
    }
    return JoinRequest(member_id, new_id, **{**values, **more})


async def stable(led: GroupRunner, member_id: str = "", new_id: str = "m1") -> str:
    """One member with an assignment."""
    answer = await led.join(ask(member_id, new_id))
    assert answer.error == 0
    ask_sync = SyncRequest(answer.member_id, None, answer.generation, assignments=((answer.member_id, b"all"),))
    assert (await led.sync(ask_sync)).assignment == b"all"
    return answer.member_id
