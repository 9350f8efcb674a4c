"""Rollups of a domain's log: encoding, turns of the loop, and a state that is too large for one append."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import CorruptError, InvalidError
from tidemill.consensus.api import LogHead
from tidemill.consensus.memory import MemoryConsensus
from tidemill.consensus.state_log.replica import ROLLUP
from tidemill.metastore.domain import codec
from tidemill.metastore.domain.codec import decode_state, decode_state_yielding, encode_state, encode_state_yielding
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext, DomainSettings
from tidemill.metastore.domain.state import DomainState, VolatileBatch, assert_invariants, batch_bytes
from tidemill.objects.memory import MemoryObjects


def state_of(batches: int, rows: int = 3) -> DomainState:
    state = DomainState()
    state.domain_uuid = "u"
    for seqno in range(1, batches + 1):
        keys = [b"%06d-%d" % (seqno, row) for row in range(rows)]
        state.volatile.append(VolatileBatch(seqno, keys, [b"v"] * rows))
        state.volatile_bytes += batch_bytes(keys, [b"v"] * rows)
    return state


async def turns_during(working: asyncio.Future[bytes] | asyncio.Future[DomainState]) -> int:
    turns = 0
    while not working.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


@pytest.mark.parametrize("batches", [0, 1, 15, 16, 65_535, 65_536])
async def test_slowly_or_at_once_a_rollup_has_the_same_bytes_and_comes_back_as_the_same_state(batches: int) -> None:
    state = state_of(batches, rows=1)
    data = await encode_state_yielding(state)
    assert data == encode_state(state)
    for again in (decode_state(data), await decode_state_yielding(data)):
        assert_invariants(again)
        assert again.volatile == state.volatile


async def test_a_full_buffer_is_encoded_and_decoded_in_slices() -> None:
    state = state_of(20 * codec.SLICE_ROWS // 3)
    encoding = asyncio.ensure_future(encode_state_yielding(state))
    assert await turns_during(encoding) >= 20
    decoding = asyncio.ensure_future(decode_state_yielding(encoding.result()))
    assert await turns_during(decoding) >= 20


def test_a_damaged_batch_within_a_rollup_is_corrupt() -> None:
    data = encode_state(state_of(2)).replace(b"000002-1", b"\xc1" * 8).replace(b"\xc4\x08\xc1", b"\xc1\x08\xc1")
    with pytest.raises(CorruptError):
        decode_state(data)


class NoRollups(MemoryConsensus):
    tried = 0

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        if log == "metastore/0" and records[0][0] == ROLLUP:
            self.tried += 1
            raise InvalidError("The append is too large.")
        return await super().append(log, term, expected_next, records, nonce)


async def test_a_state_that_cannot_be_rolled_up_ends_no_term() -> None:
    clock = SystemClock()
    consensus, objects = NoRollups(clock), MemoryObjects(clock)
    settings = DomainSettings(rollup_after_records=1)
    context = DomainContext(consensus, objects, "0", holder="n", clock=clock, rand=Rand(), settings=settings)
    domain = await Domain.open(context)
    await domain.wait_until_leading(10)
    term = domain.term
    for number in range(3):
        await domain.commit([(b"k", b"%d" % number)])
        await domain.flush(10)
        while consensus.tried <= number:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    assert domain.term == term and domain._failures.last is None
    await domain.aclose()
