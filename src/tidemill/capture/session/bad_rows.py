"""Handle a row of the stream that cannot be read or written. Only its table is paused, before that transaction; if the
table is being copied, its side topic ends there instead (side_topic.py). Both are durable before the transaction is
handed on.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.base.runtime.tasks import error_sentence
from tidemill.capture.changes import Fragment, Relation
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.decode.undecodable import UndecodableMessageError
from tidemill.capture.delivery.consumers import TapRegistry
from tidemill.capture.postgres.replication_stream import FramedMessage
from tidemill.capture.snapshot.side_topic import first_snapshot_of
from tidemill.capture.tables.table_reasons import PauseCause, recopy_instruction
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics.captured_table import CapturedTable, is_in_snapshot


class BadRowPolicy:
    """Policy for bad rows: pause the table, or end its side topic. `keep_wal()` is called when a side topic ends."""

    def __init__(
        self, states: TableStates, converter: TransactionBuilder, taps: TapRegistry, keep_wal: Callable[[], None]
    ) -> None:
        self._states = states
        self._converter = converter
        self._taps = taps
        self._keep_wal = keep_wal

    async def handle_message(self, item: FramedMessage, poisoned: UndecodableMessageError) -> None:
        """Handle a message that cannot be read. If it concerns one table, that table is paused; nothing happens if the
        capture does not have the table (another client published it). Otherwise the error ends the session.
        """
        if not poisoned.table or poisoned.position is None:
            raise poisoned
        lsn, xid = poisoned.position.commit_lsn, self._converter.xid
        await self._pause_or_end_side_topic(poisoned.oid, xid, lsn, poisoned, again=poisoned.no_old_row)
        self._converter.skip_message(item.payload)

    async def handle_unresolved_key(self, relation: Relation, fragment: Fragment, error: TidemillError) -> None:
        """Handle a relation for which it cannot be determined which row holds a key (deferrable_keys.py). A copy
        resolves that.
        """
        said = InvalidError(f"the row that holds a deferrable key cannot be read: {error.message}")
        await self._pause_or_end_side_topic(relation.oid, fragment.xid, fragment.commit_lsn, said, again=True)

    async def _pause_or_end_side_topic(
        self, oid: int, xid: int, lsn: int, error: TidemillError, *, again: bool
    ) -> None:
        row, copied = self._states.find_receiving(oid, xid, lsn), self._states.find_side_topic_table(oid)
        if copied is not None and not is_in_snapshot(xid, lsn, first_snapshot_of(copied, 0)):
            await self._states.end_side_topic(copied.table, lsn, error.message)
            self._keep_wal()
        elif row is not None:
            cause = PauseCause(error.message, _suggest_fix(error, row.table), again=again)
            await self._states.pause_table(row.table, lsn, cause)
        else:
            # No topic needs it, or the topic has it already; only followers of the stream lack it.
            self._states.following.end(oid)
            self._taps.lose_relation(oid, error.message)

    async def handle_row(self, table: CapturedTable, lsn: int, error: BaseException) -> None:
        """Handle a row of this table that the topic writer cannot write."""
        reason, copied = f"a row cannot be written: {_message_of(error)}", self._states.find_side_topic_table(table.oid)
        if copied is not None:
            await self._states.end_side_topic(copied.table, lsn, reason)
            self._keep_wal()
        else:
            await self._states.pause_table(table.name, lsn, PauseCause(reason, _suggest_fix(error, table.name)))


def _suggest_fix(error: BaseException, table: str) -> str:
    return f"{getattr(error, 'fix', '')} {recopy_instruction(table)}".strip()


def _message_of(error: BaseException) -> str:
    """Return the message of an error without its fix, which is reported separately."""
    return error.message if isinstance(error, TidemillError) else error_sentence(error)
