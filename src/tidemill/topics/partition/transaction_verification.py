"""Which transactions may begin in a partition (KIP-890). Pure bookkeeping of one leader, in one term.

    first batch ─► permit issued ─► coordinator asked ─► batch placed, if its permit is not void by then
                        a marker of its producer decided ─┘ └─ void: it came late, and is refused

X4  A permit is issued by a leader that is open before it asks the coordinator, and a marker takes it back: no batch
    stands behind the marker of its own transaction, so no transaction hangs.
X5  Transactions of one epoch follow each other (version 1), and a marker may come late: of a coordinator that was
    deposed, when the next one has ended its transaction and the producer has begun another. So who marks looks at what
    is open here, reads the register then, and ends just that: what was not there before the register still said
    "prepared" may be the next transaction's.
"""

from __future__ import annotations

import asyncio

from tidemill.topics.api import Here
from tidemill.topics.partition.transactions import Open


class Permit:
    """Of one producer in one epoch. `answer`: ends when the coordinator has confirmed, or with its refusal."""

    __slots__ = ("answer", "epoch", "void")

    def __init__(self, epoch: int, answer: asyncio.Future[None]) -> None:
        self.epoch = epoch
        self.answer = answer
        self.void = False


def as_seen(opened: Open | None, granted: Permit | None) -> Here:
    return (opened.first_offset if opened is not None else -1, granted)


class TransactionVerification:
    """`lasting`: test-only, a marker takes nothing back."""

    def __init__(self, *, lasting: bool = False) -> None:
        self._permits: dict[int, Permit] = {}
        self._lasting = lasting

    def __len__(self) -> int:
        return len(self._permits)

    def of(self, producer_id: int, epoch: int) -> Permit | None:
        found = self._permits.get(producer_id)
        return found if found is not None and found.epoch == epoch else None

    def granted(self, producer_id: int) -> Permit | None:
        found = self._permits.get(producer_id)
        return found if found is not None and found.answer.done() else None

    def issue(self, producer_id: int, epoch: int, answer: asyncio.Future[None]) -> Permit:
        permit = Permit(epoch, answer)
        self._permits[producer_id] = permit
        return permit

    def refused(self, producer_id: int, permit: Permit) -> None:
        """The next batch asks again."""
        if self._permits.get(producer_id) is permit:
            del self._permits[producer_id]

    def void(self, producer_id: int, below: int) -> None:
        """Those of epochs below: what a marker ends."""
        found = self._permits.get(producer_id)
        if found is not None and found.epoch < below:
            del self._permits[producer_id]
            found.void = not self._lasting
