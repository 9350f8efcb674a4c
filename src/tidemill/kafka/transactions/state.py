"""One transactional id, as its register holds it.

register   kafka/transaction/<transactional id, percent-encoded>
value      msgpack array of the fields of `Transaction`, in order; fields are only ever appended, with a default.
           Empty: nobody knows the id (any more).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from tidemill.base.errors import CorruptError

PREFIX: Final = "kafka/transaction/"

EPOCH_LAST: Final = 2**15 - 2
"""The last epoch a producer is given; the one above it is left for the marker that fences it."""


class State(IntEnum):
    """As Kafka names them."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5

    @property
    def prepared(self) -> bool:
        return self in (State.PREPARE_COMMIT, State.PREPARE_ABORT)

    @property
    def kafka_name(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("_"))


class GroupOffset(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


Offsets = dict[str, dict[int, GroupOffset]]
"""topic id → partition → what the group is to have there"""
Places = dict[str, tuple[int, ...]]
"""topic id → partitions, ascending"""


class Transaction(msgspec.Struct, frozen=True, array_like=True):
    """
    producer_id, epoch   of its producer; while it is prepared, those of its markers
    partitions           that hold records of it; once it is prepared, those that are not marked yet
    offsets              by group, to be committed with it; once it is prepared, of the groups that lack them
    started_ms           when it was opened; −1 where none is open or prepared
    updated_ms           of the last change
    last_id, last_epoch  what its producer had before it got a new epoch, and may still believe to have; −1 = nothing
    number               of its transaction, among those of one epoch
    bumped               once it is prepared: its epoch is the one after that of its records
    next_id              its producer id once it is complete, where its epochs are used up; −1 = the same
    """

    producer_id: int
    epoch: int
    state: State
    timeout_ms: int
    partitions: Places = {}
    offsets: dict[str, Offsets] = {}
    started_ms: int = -1
    updated_ms: int = 0
    last_id: int = -1
    last_epoch: int = -1
    number: int = 0
    next_id: int = -1
    bumped: bool = False

    def holds(self, topic_id: str, partition: int) -> bool:
        return partition in self.partitions.get(topic_id, ())

    @property
    def identity(self) -> tuple[int, int]:
        """What its producer goes on with."""
        return (self.next_id, 0) if self.next_id >= 0 else (self.producer_id, self.epoch)

    @property
    def due_ms(self) -> int:
        """When an open one is aborted."""
        return self.started_ms + self.timeout_ms


def key_of(transactional_id: str) -> str:
    return PREFIX + quote(transactional_id, safe="")


def id_of(key: str) -> str:
    return unquote(key.removeprefix(PREFIX))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Transaction)


def encode(transaction: Transaction) -> bytes:
    return _encoder.encode(transaction)


def decode(data: bytes, transactional_id: str) -> Transaction | None:
    """Raises CorruptError."""
    try:
        return _decoder.decode(data) if data else None
    except msgspec.DecodeError as error:
        raise CorruptError(
            f"the state of a transactional id is unreadable: id={transactional_id!r} cause={error}."
        ) from error
