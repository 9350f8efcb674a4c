"""The four updates of a domain's state; names in brackets are rows of the acceptance table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.scenarios.metastore_plants import apply_lower_manifest, apply_without_delta
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, CorruptError, InvalidError, TidemillError
from tidemill.base.limits import METASTORE_BATCH_BYTES, METASTORE_KEY_BYTES, METASTORE_VALUE_BYTES
from tidemill.consensus.memory import MemoryConsensus
from tidemill.consensus.state_log.state_log import StateLog, StateMachine
from tidemill.metastore.domain.apply import UnreadableRecordError, apply
from tidemill.metastore.domain.codec import decode_command, decode_state, encode_command, encode_state
from tidemill.metastore.domain.commands import Command, PersistManifest, ResetManifest, SetDomainUuid, WriteBatch
from tidemill.metastore.domain.commit.write_path import checked_size
from tidemill.metastore.domain.state import (
    DomainState,
    PersistedManifest,
    VolatileBatch,
    assert_invariants,
    batch_bytes,
)

UUID = "6a4b"


def proposed(log: StateLog[Any], command: bytes) -> asyncio.Future[Any]:
    return log.propose_deferred(lambda _: command)


def do(state: DomainState, command: Command, position: int, term: int = 1) -> None:
    """Apply a command and check the invariants; a rejection must leave the same bytes."""
    before = encode_state(state)
    try:
        assert apply(state, encode_command(command), position, term) is state
    except TidemillError:
        assert encode_state(state) == before
        raise
    finally:
        assert_invariants(state)


def write(*rows: tuple[bytes, bytes], uuid: str = UUID) -> WriteBatch:
    return WriteBatch(uuid, [key for key, _ in rows], [value for _, value in rows])


def manifest(last_seqno: int, epoch: int = 1) -> PersistedManifest:
    return PersistedManifest(b"manifest %d" % last_seqno, last_seqno, epoch)


def named() -> DomainState:
    state = DomainState()
    do(state, SetDomainUuid(UUID), 0)
    return state


def written(*seqnos: int) -> DomainState:
    state = named()
    for seqno in seqnos:
        do(state, write((b"k%d" % seqno, b"v")), seqno)
    return state


# set domain uuid ------------------------------------------------------------------------------------------------


def test_a_domain_uuid_is_set_once() -> None:
    """[uuid once]"""
    state = named()
    assert state.domain_uuid == UUID
    with pytest.raises(ConflictError, match="already has a uuid") as caught:
        do(state, SetDomainUuid("other"), 1)
    assert caught.value.current == UUID
    with pytest.raises(InvalidError, match="cannot be empty"):
        do(DomainState(), SetDomainUuid(""), 0)


# write batch ----------------------------------------------------------------------------------------------------


def test_all_rows_of_a_write_have_the_seqno_of_their_record() -> None:
    """[write happy (all seqno 10)]"""
    state = named()
    do(state, write((b"a", b"1"), (b"b", b"2"), (b"c", b"")), 10)
    assert list(state.volatile) == [VolatileBatch(10, [b"a", b"b", b"c"], [b"1", b"2", b""])]
    assert state.volatile_bytes == batch_bytes([b"a", b"b", b"c"], [b"1", b"2", b""])
    assert state.newest_seqno == 10


def test_a_write_with_another_uuid_or_before_any_is_refused() -> None:
    """[write: wrong uuid]"""
    with pytest.raises(ConflictError, match="another domain: uuid='old'"):
        do(named(), write((b"a", b"1"), uuid="old"), 10)
    with pytest.raises(ConflictError, match="another domain"):
        do(DomainState(), write((b"a", b"1")), 10)
    with pytest.raises(ConflictError, match="another domain"):
        do(DomainState(), write((b"a", b"1"), uuid=""), 10)


def test_a_write_without_rows_is_refused() -> None:
    """[write: empty rows]"""
    with pytest.raises(InvalidError, match="needs rows"):
        do(named(), write(), 10)
    with pytest.raises(InvalidError, match="keys=1 values=0"):
        do(named(), WriteBatch(UUID, [b"a"], []), 10)


@pytest.mark.parametrize("position", [9, 10])
def test_a_seqno_that_does_not_exceed_the_newest_volatile_one_is_refused(position: int) -> None:
    state = written(10)
    with pytest.raises(ConflictError, match=f"would decrease: seqno={position} newest_seqno=10"):
        do(state, write((b"a", b"1")), position)


def test_a_seqno_that_does_not_exceed_the_persisted_one_is_refused() -> None:
    state = written(10)
    do(state, PersistManifest(UUID, manifest(10)), 11)
    assert not state.volatile
    with pytest.raises(ConflictError, match="would decrease"):
        do(state, write((b"a", b"1")), 10)
    do(state, write((b"a", b"1")), 12)


def test_a_batch_that_the_database_would_refuse_is_refused_before_it_is_proposed() -> None:
    with pytest.raises(InvalidError, match="at least one row"):
        checked_size([])
    with pytest.raises(InvalidError, match="key must not be empty"):
        checked_size([(b"", b"x")])
    with pytest.raises(InvalidError, match="key is too long"):
        checked_size([(b"k" * (METASTORE_KEY_BYTES + 1), b"x")])
    with pytest.raises(InvalidError, match="value is too large"):
        checked_size([(b"k", b"x" * (METASTORE_VALUE_BYTES + 1))])
    value = b"x" * METASTORE_VALUE_BYTES
    with pytest.raises(InvalidError, match="batch is too large"):
        checked_size([(b"%d" % i, value) for i in range(METASTORE_BATCH_BYTES // METASTORE_VALUE_BYTES + 1)])


# persist manifest -----------------------------------------------------------------------------------------------


def test_a_manifest_trims_what_it_covers_and_nothing_else() -> None:
    """[manifest trims ≤ 10]"""
    state = written(9, 10, 11)
    do(state, PersistManifest(UUID, manifest(10)), 12)
    assert [batch.seqno for batch in state.volatile] == [11]
    assert state.manifest == manifest(10) and state.persisted_seqno == 10


def test_a_manifest_of_another_uuid_is_refused() -> None:
    """[manifest: wrong uuid]"""
    with pytest.raises(ConflictError, match="another domain"):
        do(written(10), PersistManifest("old", manifest(10)), 11)


def test_a_manifest_of_a_lower_seqno_or_epoch_is_refused() -> None:
    """[manifest: lower seqno/epoch rejected]"""
    state = written(10, 20)
    do(state, PersistManifest(UUID, manifest(20, epoch=2)), 21, term=2)
    with pytest.raises(ConflictError, match="newer manifest is persisted") as caught:
        do(state, PersistManifest(UUID, manifest(10, epoch=2)), 22, term=2)
    assert caught.value.current == manifest(20, epoch=2)
    with pytest.raises(ConflictError, match="newer manifest is persisted"):
        do(state, PersistManifest(UUID, manifest(20, epoch=1)), 23, term=1)


def test_a_manifest_of_equal_seqno_and_epoch_is_accepted() -> None:
    """[manifest: equal accepted]"""
    state = written(10)
    do(state, PersistManifest(UUID, manifest(10)), 11)
    again = PersistedManifest(b"after a compaction", 10, 1)
    do(state, PersistManifest(UUID, again), 12)
    assert state.manifest == again


def test_an_elder_manifest_of_the_same_seqno_and_epoch_is_refused() -> None:
    """Found by the simulation: a merge does not change the seqno, and the files of the older manifest are already
    collected."""
    state = written(10)
    newer, elder = PersistedManifest(b"after a merge", 10, 1, 7), PersistedManifest(b"before it", 10, 1, 6)
    do(state, PersistManifest(UUID, newer), 11)
    with pytest.raises(ConflictError, match=r"number=6 .* stored_number=7"):
        do(state, PersistManifest(UUID, elder), 12)
    assert state.manifest == newer


def test_a_manifest_cannot_claim_what_was_never_written() -> None:
    """[F22]"""
    state = written(10)
    with pytest.raises(InvalidError, match="never written: last_seqno=11 newest_seqno=10"):
        do(state, PersistManifest(UUID, manifest(11)), 11)
    do(state, PersistManifest(UUID, manifest(10)), 12)
    with pytest.raises(InvalidError, match="never written"):
        do(state, PersistManifest(UUID, manifest(11)), 13)


@pytest.mark.parametrize(("epoch", "term"), [(1, 2), (3, 2)])
def test_a_manifest_is_accepted_in_its_own_term_only(epoch: int, term: int) -> None:
    with pytest.raises(ConflictError, match="in its own term"):
        do(written(10), PersistManifest(UUID, manifest(10, epoch)), 11, term=term)


# reset manifest -------------------------------------------------------------------------------------------------


def test_a_reset_goes_on_counting_where_the_manifest_ends() -> None:
    """[reset happy] The worked example: at offset 50, term 3 with (1000, epoch 5)."""
    state = named()
    do(state, ResetManifest("restored", manifest(1000, epoch=5)), 50, term=3)
    assert (state.domain_uuid, state.seqno_delta, state.epoch_delta) == ("restored", 950, 2)
    do(state, write((b"a", b"1"), uuid="restored"), 51, term=3)
    assert state.volatile[0].seqno == 1001
    do(state, PersistManifest("restored", manifest(1001, epoch=5)), 52, term=3)
    do(state, PersistManifest("restored", manifest(1001, epoch=9)), 53, term=7)


def test_a_reset_with_nothing_begins_at_one() -> None:
    """[reset none] At (10, term 2): deltas −10 and −2, and the next write gets 1."""
    state = named()
    do(state, ResetManifest("fresh", None), 10, term=2)
    assert (state.seqno_delta, state.epoch_delta, state.manifest) == (-10, -2, None)
    do(state, write((b"a", b"1"), uuid="fresh"), 11, term=2)
    assert state.volatile[0].seqno == 1


def test_a_reset_needs_an_empty_buffer() -> None:
    """[reset: non-empty buffer]"""
    with pytest.raises(ConflictError, match="not empty"):
        do(written(10), ResetManifest("restored", manifest(1000)), 11)


def test_a_reset_needs_no_manifest_or_one_of_seqno_zero() -> None:
    """[reset: existing data]"""
    state = written(10)
    do(state, PersistManifest(UUID, manifest(10)), 11)
    with pytest.raises(ConflictError, match="not empty"):
        do(state, ResetManifest("restored", manifest(1000)), 12)
    state = named()
    do(state, PersistManifest(UUID, manifest(0)), 1)
    do(state, ResetManifest("restored", manifest(1000, epoch=4)), 2)
    assert state.manifest == manifest(1000, epoch=4)


def test_a_reset_with_bad_numbers_or_no_name_is_refused() -> None:
    with pytest.raises(InvalidError, match="must not be negative"):
        do(named(), ResetManifest("restored", manifest(-1)), 1)
    with pytest.raises(InvalidError, match="cannot be empty"):
        do(named(), ResetManifest("", None), 1)


# codec ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        SetDomainUuid(UUID),
        write((b"\x00\xff", b"")),
        PersistManifest(UUID, manifest(7, 3)),
        ResetManifest(UUID, None),
        ResetManifest(UUID, manifest(7, 3)),
    ],
)
def test_commands_survive_their_bytes(command: Command) -> None:
    assert decode_command(encode_command(command)) == command


def test_the_layout_is_the_one_drawn() -> None:
    assert msgspec.msgpack.decode(encode_command(write((b"k", b"v")))) == [2, UUID, [b"k"], [b"v"]]
    assert msgspec.msgpack.decode(encode_command(PersistManifest(UUID, manifest(7, 3)))) == [
        3,
        UUID,
        [b"manifest 7", 7, 3, 0],
    ]
    state = written(10)
    assert msgspec.msgpack.decode(encode_state(state)) == [1, UUID, 0, 0, None, [[10, [b"k10"], [b"v"]]]]


def test_a_rollup_holds_the_whole_state() -> None:
    state = named()
    do(state, ResetManifest("restored", manifest(1000, epoch=5)), 50, term=3)
    do(state, write((b"a", b"1"), (b"b", b""), uuid="restored"), 51, term=3)
    again = decode_state(encode_state(state))
    for name in DomainState.__slots__:
        assert getattr(again, name) == getattr(state, name), name
    assert_invariants(again)


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([9, "x"]), msgspec.msgpack.encode([2, "x"])])
def test_a_record_that_cannot_be_read_is_no_refusal(data: bytes) -> None:
    with pytest.raises(CorruptError, match="cannot be read"):
        decode_command(data)
    with pytest.raises(UnreadableRecordError):
        apply(named(), data, 1, 1)


def test_a_rollup_of_another_format_names_both() -> None:
    with pytest.raises(CorruptError, match="format=2 known=1"):
        decode_state(msgspec.msgpack.encode([2, "another layout"]))
    for data in (b"", msgspec.msgpack.encode([]), msgspec.msgpack.encode([1, "x"])):
        with pytest.raises(CorruptError):
            decode_state(data)


# through a log --------------------------------------------------------------------------------------------------


def make(consensus: MemoryConsensus) -> StateLog[DomainState]:
    return StateLog(
        consensus,
        "metastore/main",
        StateMachine(DomainState, apply, encode_state, decode_state),
        Rand(1),
    )


async def test_a_refused_update_is_a_no_op_everywhere_and_its_proposer_is_told() -> None:
    """[F21]"""
    consensus = MemoryConsensus(SystemClock())
    leader, follower = make(consensus), make(consensus)
    await leader.lead(1)
    await leader.propose(encode_command(SetDomainUuid(UUID)))
    ours = proposed(leader, encode_command(write((b"a", b"1"))))
    stale = proposed(leader, encode_command(write((b"a", b"2"), uuid="old")))
    assert (await ours).position == 1
    with pytest.raises(ConflictError, match="another domain"):
        await stale
    await follower.catch_up()
    assert encode_state(follower.state) == encode_state(leader.state)
    assert [batch.values for batch in follower.state.volatile] == [[b"1"]]
    await leader.aclose()


async def test_a_rollup_moves_positions_and_seqnos_still_grow() -> None:
    consensus = MemoryConsensus(SystemClock())
    leader = make(consensus)
    await leader.lead(1)
    await leader.propose(encode_command(SetDomainUuid(UUID)))
    await leader.propose(encode_command(write((b"a", b"1"))))
    await leader.rollup()
    await leader.propose(encode_command(write((b"a", b"2"))))
    late = make(consensus)
    await late.catch_up()
    assert [batch.seqno for batch in late.state.volatile] == [1, 3]
    assert_invariants(late.state)
    await leader.aclose()


# planted faults -------------------------------------------------------------------------------------------------


def test_planted_lower_manifest_is_what_the_rule_prevents() -> None:
    state = written(10, 20)
    do(state, PersistManifest(UUID, manifest(20)), 21)
    apply_lower_manifest(state, encode_command(PersistManifest(UUID, manifest(10))), 22, 1)
    assert state.persisted_seqno == 10


def test_planted_forgotten_delta_is_what_the_reset_sets() -> None:
    state = named()
    reset = encode_command(ResetManifest("restored", manifest(1000, epoch=5)))
    apply_without_delta(state, reset, 50, 3)
    assert (state.seqno_delta, state.epoch_delta) == (0, 0)


# any sequence ---------------------------------------------------------------------------------------------------

_uuids = st.sampled_from([UUID, "other"])
_manifests = st.builds(manifest, st.integers(-1, 40), st.integers(0, 4))
_rows = st.lists(st.tuples(st.binary(max_size=3), st.binary(max_size=3)), max_size=3)
_commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(SetDomainUuid, _uuids),
    st.builds(lambda rows, uuid: write(*rows, uuid=uuid), _rows, _uuids),
    st.builds(PersistManifest, _uuids, _manifests),
    st.builds(ResetManifest, _uuids, st.none() | _manifests),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(_commands, st.integers(1, 3), st.integers(0, 1)), max_size=30))
@example([(SetDomainUuid(UUID), 1, 1), (PersistManifest(UUID, manifest(-1, 2)), 1, 0)])
def test_no_sequence_of_updates_breaks_the_invariants_or_turns_a_counter_back(
    steps: list[tuple[Command, int, int]],
) -> None:
    state, position, term = DomainState(), -1, 1
    for command, step, newer in steps:
        position, term = position + step, term + newer
        seqno, uuid = state.newest_seqno, state.domain_uuid
        epoch = state.manifest.epoch if state.manifest else 0
        try:
            do(state, command, position, term)
        except TidemillError:
            continue
        if not isinstance(command, ResetManifest):
            assert state.newest_seqno >= seqno
            assert (state.manifest.epoch if state.manifest else 0) >= epoch
            assert uuid in ("", state.domain_uuid)
        copied = decode_state(encode_state(state))
        assert_invariants(copied)
        assert encode_state(copied) == encode_state(state)


_Check = Callable[[DomainState], None]


@pytest.mark.parametrize(
    ("check", "state"),
    [
        (SetDomainUuid("x").check, named()),
        (write(uuid=UUID).check, named()),
        (PersistManifest(UUID, manifest(11)).check, written(10)),
        (ResetManifest("x", None).check, written(10)),
    ],
)
def test_the_same_rules_refuse_an_update_when_it_is_built(check: _Check, state: DomainState) -> None:
    with pytest.raises((ConflictError, InvalidError)):
        check(state)
