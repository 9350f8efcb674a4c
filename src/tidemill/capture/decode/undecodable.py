"""Decode one message of the stream and, if that fails, determine its position, its table, and whether only that table
is affected. Pure.
"""

from __future__ import annotations

from tidemill.base.errors import CorruptError, InvalidError, TidemillError
from tidemill.base.lsn import ChangePosition, Lsn
from tidemill.base.runtime.tasks import error_sentence
from tidemill.capture.changes import Fragment
from tidemill.capture.decode.row_tuples import OldRowMissingError
from tidemill.capture.decode.transaction_builder import RelationSeen, TransactionBuilder
from tidemill.capture.postgres.pgoutput import LOGICAL_MESSAGE, decode_message, kind_of, oid_of
from tidemill.capture.postgres.replication_stream import MESSAGE_BYTES, FramedMessage


class UndecodableMessageError(CorruptError):
    """A message that cannot be read. `table`: the one table that the message is about, "" if it is about none or
    several (a begin, a truncate of two tables, an unknown kind), and its `oid`. `position`: position of its change,
    None outside a transaction. `no_old_row`: it lacks an old row, which a copy of the table can replace.
    """

    def __init__(
        self, message: str, *, table: str, oid: int, position: ChangePosition | None, fix: str = "",
        no_old_row: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(message, fix=fix)
        self.table = table
        self.oid = oid
        self.position = position
        self.no_old_row = no_old_row


def feed_frame(item: FramedMessage, converter: TransactionBuilder) -> Fragment | RelationSeen | None:
    """Decode a message and feed it to the converter. Raises UndecodableMessageError for every error, and no other
    error.
    """
    try:
        if item.left_out and item.payload[:1] == LOGICAL_MESSAGE:
            converter.count_oversized_marker(item.payload)
            return None
        if item.left_out:
            raise InvalidError(f"a row is too large to be carried: limit={MESSAGE_BYTES}.", fix="Shorten it.")
        return converter.feed_message(decode_message(item.payload), len(item.payload))
    except Exception as error:
        raise explain_decode_failure(item, converter, error) from error


def explain_decode_failure(
    item: FramedMessage, converter: TransactionBuilder, error: Exception
) -> UndecodableMessageError:
    """Return the meaning of `error`, which was raised while `item` was decoded or fed to `converter`."""
    oid = oid_of(item.payload)
    relation = converter.relations.get(oid) if oid is not None else None
    table, position = relation.name if relation is not None else "", converter.next_position
    about = f" table={table}" if table else f" oid={oid}" if oid is not None else ""
    cause = error.message if isinstance(error, TidemillError) else error_sentence(error)
    inside = f" commit={Lsn(position.commit_lsn)} ordinal={position.ordinal}" if position is not None else ""
    return UndecodableMessageError(
        f"a message of the stream cannot be read: lsn={Lsn(item.lsn)}{inside} kind={kind_of(item.payload)}{about}"
        f" size={item.size_bytes} error={cause!r}.",
        table=table,
        oid=oid or 0,
        position=position,
        no_old_row=isinstance(error, OldRowMissingError),
        fix=getattr(error, "fix", "") or "Leave the table out of the capture, or start the capture over.",
    )
