"""State of one transactional id, as its register stores it.

register   kafka/transaction/<transactional id, percent-encoded>
value      msgpack array of the fields of `Transaction`, in order; fields are only ever appended, with a default.
           Empty: the id is unknown (or deleted).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from tidemill.base.errors import CorruptError

PREFIX: Final = "kafka/transaction/"

EPOCH_LAST: Final = 2**15 - 2
"""Last epoch that a producer gets; the next one is reserved for the marker that fences it."""


class State(IntEnum):
    """States under Kafka's names."""

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
"""Topic id → partition → offset that the group commits there."""
Places = dict[str, tuple[int, ...]]
"""Topic id → partitions, ascending."""


class Transaction(msgspec.Struct, frozen=True, array_like=True):
    """State of a transactional id.

    producer_id, epoch   identity of its producer; while it is prepared, of its markers
    partitions           partitions with records of it; once it is prepared, those that are not marked yet
    offsets              by group, to be committed with it; once it is prepared, of the groups that lack them
    started_ms           time when it was opened; −1 if none is open or prepared
    updated_ms           time of the last change
    last_id, last_epoch  identity that its producer had before a new epoch, and may still use; −1 = none
    number               number of the transaction within its epoch
    bumped               once it is prepared: its epoch is the one after that of its records
    next_id              its producer id once it is complete, if its epochs are exhausted; −1 = the same
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

    def contains(self, topic_id: str, partition: int) -> bool:
        return partition in self.partitions.get(topic_id, ())

    @property
    def identity(self) -> tuple[int, int]:
        """Identity of the producer's next transaction."""
        return (self.next_id, 0) if self.next_id >= 0 else (self.producer_id, self.epoch)

    @property
    def due_ms(self) -> int:
        """Time at which an open transaction is aborted."""
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
    """Decode a register. Raises CorruptError if it is unreadable."""
    try:
        return _decoder.decode(data) if data else None
    except msgspec.DecodeError as error:
        raise CorruptError(
            f"the state of a transactional id is unreadable: id={transactional_id!r} cause={error}."
        ) from error
