"""Coordinator of the groups of this node: takes a group over at its first request, and releases it when it moves.

A group is in memory while it has members, and for a minute after its last request. A group that only has offsets uses
no memory. Groups with members are taken over proactively when nodes join or leave, so that the sessions of members that
died together with their coordinator time out.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog
from prometheus_client import Gauge

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import Backoff, Tasks, error_sentence
from tidemill.base.status.status import StatusTracker
from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic.state import GroupLimits
from tidemill.kafka.groups.consumer.state import ConsumerGroup
from tidemill.kafka.groups.group_runner import GroupRunner
from tidemill.kafka.groups.group_store import GroupFencedError, GroupStore
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUPS

log = structlog.get_logger()

OPENING_S = 5.0
"""Time for which a request waits for the takeover of its group; after that the client must retry."""
GROUP_BYTES = 512
"""Maximum bytes of a group's name in a key: with a topic id or member id it fits into one."""
COUNT_EVERY_S = 1.0
REPORTED_S = 30.0
REPORTED_GROUPS_MAX = 100

_LOADED = Gauge("tidemill_kafka_groups", "Consumer groups in memory on this node")


def is_group_name(group: str) -> bool:
    """Return whether the string is a valid group name."""
    return bool(group) and len(GROUPS.key(group)) <= GROUP_BYTES


class GroupUnavailableError(Exception):
    """The group cannot be served here; `code` is Kafka's reason."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class CoordinatorLimits(NamedTuple):
    """Limits of a node's groups. `of_group(group)` are the current ones of one group; after a change `apply_configs`
    is called."""

    of_group: Callable[[str], GroupLimits]
    groups_max: int
    bytes_max: int


class GroupCoordinator:
    """Coordinator of groups. `is_own(group)` is true if this node coordinates the group in its current view."""

    def __init__(
        self,
        metastore: Metastore,
        is_own: Callable[[str], bool],
        clock: Clock,
        rand: Rand,
        *,
        node: str,
        limits: CoordinatorLimits,
        tracker: StatusTracker,
    ) -> None:
        self.rows = GroupStore(metastore, f"{node}/{rand.nonce()[:12]}", clock, rand)
        self._rand = rand
        self._is_own = is_own
        self._clock = clock
        self._limits = limits
        self._tracker = tracker
        self._counted_bytes = 0
        self._count_again_s = 0.0
        self._led: dict[str, GroupRunner] = {}
        self._opening: dict[str, asyncio.Task[GroupRunner]] = {}
        self._failing: set[str] = set()
        self._tasks = Tasks(self._task_failed)
        self._adopting = False
        self._moved = False
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """Size of the metadata and assignments of all groups in memory, and of the names that their patterns match.

        Groups share the names of equal patterns.
        """
        groups = [led.group for led in self._led.values()]
        names = {
            id(each): each for group in groups if isinstance(group, ConsumerGroup) for each in group.matched_names()
        }
        return sum(group.size_bytes for group in groups) + sum(map(sys.getsizeof, names.values()))

    def new_member_suffix(self) -> str:
        """Return the suffix of a new member's id."""
        return self._rand.uuid()

    def loaded_groups(self) -> Sequence[GroupRunner]:
        return list(self._led.values())

    def loaded_group(self, group: str) -> GroupRunner | None:
        """Return the group if it is in memory here."""
        return self._led.get(group)

    async def get(self, group: str, *, creates: bool = True) -> GroupRunner:
        """Return the group, taken over if necessary. `creates` False marks a request of a member, which only an
        existing group can have. Raises GroupUnavailableError, with UNKNOWN_MEMBER_ID if there is no such group.
        """
        if not is_group_name(group):
            raise GroupUnavailableError(error_codes.INVALID_GROUP_ID)
        if self._closed or not self._is_own(group):
            raise GroupUnavailableError(error_codes.NOT_COORDINATOR)
        led = self._led.get(group)
        if led is not None:
            return led
        if not creates and group not in self._opening:
            if not await self._exists(group):
                raise GroupUnavailableError(error_codes.UNKNOWN_MEMBER_ID)
            return await self.get(group)  # every check again: the answer took time
        if group not in self._opening:
            if len(self._led) + len(self._opening) >= self._limits.groups_max:
                log.warning(
                    "kafka.groups_full", groups=len(self._led), limit=self._limits.groups_max, key="kafka.groups_max"
                )
                raise GroupUnavailableError(error_codes.COORDINATOR_NOT_AVAILABLE)
            self._opening[group] = self._tasks.spawn(self._open(group), name=f"open group {group}")
        try:
            async with asyncio.timeout(OPENING_S):
                led = await asyncio.shield(self._opening[group])
        except TimeoutError:
            raise GroupUnavailableError(error_codes.COORDINATOR_LOAD_IN_PROGRESS) from None
        except GroupUnavailableError:
            raise
        except Exception as error:
            # Any error here is a fault of this group only; its task reports it (`_task_failed`).
            raise GroupUnavailableError(error_codes.COORDINATOR_NOT_AVAILABLE) from error
        if led.is_closed:
            raise GroupUnavailableError(error_codes.NOT_COORDINATOR)
        return led

    async def _exists(self, group: str) -> bool:
        try:
            async with asyncio.timeout(OPENING_S):
                return await self.rows.head(group) is not None
        except TimeoutError:
            raise GroupUnavailableError(error_codes.COORDINATOR_LOAD_IN_PROGRESS) from None
        except TidemillError as error:
            raise GroupUnavailableError(error_codes.COORDINATOR_NOT_AVAILABLE) from error

    def check_room(self, led: GroupRunner, member_id: str, instance_id: str | None) -> None:
        """Raise GroupUnavailableError with a retriable code if these ids would be a new member's and the byte limit is
        exceeded. A member that joins again is never refused: its client would end.
        """
        known = member_id in led.group.members or (instance_id is not None and instance_id in led.group.instances)
        if not known and self._is_full():
            log.warning("kafka.groups_full", used_bytes=self._counted_bytes, limit_bytes=self._limits.bytes_max)
            raise GroupUnavailableError(error_codes.COORDINATOR_NOT_AVAILABLE)

    def _is_full(self) -> bool:
        """Return whether the byte limit is exceeded, at most a second ago: counting every member for each join would
        cost more than the join.
        """
        now_s = self._clock.monotonic_s()
        if now_s >= self._count_again_s:
            self._counted_bytes, self._count_again_s = self.used_bytes, now_s + COUNT_EVERY_S
        return self._counted_bytes > self._limits.bytes_max

    async def _open(self, group: str) -> GroupRunner:
        try:
            if not self._is_own(group):  # the task may start later: no other coordinator is fenced then
                raise GroupUnavailableError(error_codes.NOT_COORDINATOR)
            taken = await self.rows.take_over(group)
            if self._closed or not self._is_own(group):
                raise GroupUnavailableError(error_codes.NOT_COORDINATOR)
            led = GroupRunner(
                self.rows, taken, self._limits.of_group(group), self._clock, self._tasks, self._group_ended
            )
            self._led[group] = led
            _LOADED.set(len(self._led))
            return led
        finally:
            del self._opening[group]

    def apply_configs(self) -> None:
        """Apply changed configs. Members follow from their next heartbeat on."""
        for led in self._led.values():
            led.group.limits = self._limits.of_group(led.group.name)

    def _group_ended(self, led: GroupRunner, fault: BaseException | None) -> None:
        name = led.group.name
        if self._led.get(name) is led:
            del self._led[name]
        _LOADED.set(len(self._led))
        if fault is None or isinstance(fault, GroupFencedError):
            return
        log.error("kafka.group_ended", group=name, error=error_sentence(fault), exc_info=fault)
        self._report_failure(name, fault)

    def _report_failure(self, name: str, fault: BaseException) -> None:
        """Report a failure for a while under the group's own stage, or under one stage of all groups if many fail
        together.
        """
        mark = f"group:{name}" if len(self._failing) < REPORTED_GROUPS_MAX else "groups"
        self._failing.add(mark)
        self._tracker.fail(mark, error_sentence(fault), now_ms=self._clock.now_ms())
        asyncio.get_running_loop().call_later(REPORTED_S, self._report_recovery, mark)

    def _report_recovery(self, mark: str) -> None:
        self._failing.discard(mark)
        self._tracker.clear_failure(mark)

    # nodes come and go ----------------------------------------------------------------------------
    def apply_ownership(self) -> None:
        """Release groups that moved away, and take over those that moved here.

        Called at every change of the nodes, and once at start.
        """
        for led in self.loaded_groups():
            if not self._is_own(led.group.name):
                led.end(error_codes.NOT_COORDINATOR)
        self._moved = True
        if not self._adopting and not self._closed:
            self._adopting = True
            self._tasks.spawn(self._adopt_all(), name="adopt groups")

    async def _adopt_all(self) -> None:
        """Take over every group that has members and belongs to this node; failed takeovers are retried."""
        restarts = Backoff()
        try:
            while self._moved:
                self._moved = False
                began_s = self._clock.monotonic_s()
                try:
                    left = await self._adopt_once()
                except TidemillError as error:
                    left = error_sentence(error)
                if left and not self._moved:
                    log.info("kafka.groups_not_taken_over", cause=left)
                    await asyncio.sleep(restarts.pause_s(self._clock.monotonic_s() - began_s))
                    self._moved = True
        finally:
            self._adopting = False

    async def _adopt_once(self) -> str:
        """Take over groups once. Return why one of them could not be taken over, or ""."""
        left = ""
        for head in await self.rows.heads():
            if head.members and head.group not in self._led and self._is_own(head.group):
                try:
                    await self.get(head.group)
                except GroupUnavailableError as refused:
                    left = f"group={head.group} code={refused.code}"
        return left

    def _task_failed(self, name: str, error: BaseException) -> None:
        """Report a failed takeover. The requests that wait for the group are answered with a retriable code."""
        if isinstance(error, GroupUnavailableError):
            return
        log.error("kafka.groups_task_broke", task=name, error=error_sentence(error), exc_info=error)
        self._report_failure(name.removeprefix("open group "), error)

    async def aclose(self) -> None:
        self._closed = True
        for led in self.loaded_groups():
            led.end(error_codes.NOT_COORDINATOR)
        await self._tasks.aclose()
