"""Notices to other nodes about transactions: one log per node, of transactional ids.

Registers are authoritative: a lost notice only costs time, because its sender retries.

    log    kafka/transaction-hints/<node>    a record is a transactional id; its node truncates what it has read
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, TidemillError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks, error_sentence
from tidemill.consensus.api import Consensus

log = structlog.get_logger()

WAIT_S = 60.0
TRIES = 8


def hint_log(node: str) -> str:
    return f"kafka/transaction-hints/{node}"


async def send(consensus: Consensus, rand: Rand, node: str, transactional_id: str) -> None:
    """Append a notice. One of unknown outcome counts as sent. Raises UnavailableError."""
    name = hint_log(node)
    for _ in range(TRIES):
        head = await consensus.log_head(name)
        try:
            await consensus.append(name, 0, head.next, [transactional_id.encode()], rand.nonce())
        except ConflictError:
            continue
        except UnknownOutcomeError:
            pass
        return


class TransactionHints:
    """Notices of one node. `look` checks a transactional id; its errors are raised."""

    def __init__(self, consensus: Consensus, rand: Rand, node: str, look: Callable[[str], Awaitable[None]]) -> None:
        self._consensus = consensus
        self._rand = rand
        self._node = node
        self._look = look
        self._sending: set[tuple[str, str]] = set()
        self._tasks = Tasks(lambda name, error: log.error("transaction.hint_broke", error=error_sentence(error)))

    def send(self, node: str, transactional_id: str) -> None:
        """Send a notice soon. Ignores notices to this node or to no node."""
        if node and node != self._node and (node, transactional_id) not in self._sending:
            self._sending.add((node, transactional_id))
            self._tasks.spawn(self._send(node, transactional_id), name=f"hint {node}")

    async def _send(self, node: str, transactional_id: str) -> None:
        try:
            await send(self._consensus, self._rand, node, transactional_id)
        except TidemillError as error:
            log.info("transaction.hint_not_sent", node=node, id=transactional_id, cause=str(error))
        finally:
            self._sending.discard((node, transactional_id))

    async def follow(self) -> None:
        """Receive notices forever.

        Earlier notices are skipped: call it before the first scan of all transactions.
        """
        name = hint_log(self._node)
        position = (await self._consensus.log_head(name)).next
        while True:
            if not await self._consensus.wait(name, position, WAIT_S):
                continue
            found = await self._consensus.read(name, position)
            for transactional_id in dict.fromkeys(record.data.decode() for record in found.records):
                await self._look(transactional_id)
            position += len(found.records)
            await self._consensus.truncate(name, position)

    async def aclose(self) -> None:
        await self._tasks.aclose()
