"""Move settled batches of the partitions led here into L1, one object of a topic at a time (RFC 0005 §5).

    rows of the topic ─► corrections ─► read batches ─► register ─► put ─► add ─► Advance(reconciled) in each log

Invariant (bounds): no offset is moved beyond the last stable offset, nor beyond the partition's checkpoint row (RFC
0005, X1).

Invariant (interruptible): a round interrupted at any point leaves nothing that a log or a reader refers to. The next
round continues where L1 ends, and corrects the logs first.

Invariant (isolation): a failure of one partition leaves out that partition only. A failure of an object leaves the logs
unchanged.

Invariant (verified): a batch that does not match its checksum is read again (`batch_reads.read_batches`) before L1
stores it. Damage in the object itself is copied and reported: consumers detect it by the same checksum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from tidemill.base.errors import CorruptError, TidemillError
from tidemill.metastore.rows.l1 import l1_key
from tidemill.objects.store import Buffer
from tidemill.topics.batch_reads import INLINE_BATCHES, RangeReader, read_batches
from tidemill.topics.l0.object_cache import ObjectCache
from tidemill.topics.l1.builder import ObjectBuilder
from tidemill.topics.l1.extent_store import ExtentStore, PartitionRows
from tidemill.topics.l1.format import Footer, object_id
from tidemill.topics.l1.object_planner import OBJECT_PARTITIONS_MAX, PartitionPiece, cut_piece
from tidemill.topics.l1.row_transitions import AddRequest
from tidemill.topics.lost_objects import is_dropped
from tidemill.topics.partition.leader import LeaderDeps, PartitionLeader

PartitionKey = tuple[str, int]
PieceBatches = tuple[PartitionPiece, list[Buffer]]
"""The piece of one partition in an object, and its batches."""
T = TypeVar("T")

_log = structlog.get_logger()


class ReconcilerFigures(msgspec.Struct):
    """Counters since the start of this node.

    `left_out`: partitions left out of an object because of an error.
    `corrected`: logs that lacked extents of the rows.
    `let_go`: skipped batches of lost objects.
    """

    objects: int = 0
    moved_bytes: int = 0
    left_out: int = 0
    corrected: int = 0
    let_go: int = 0


class RoundResult(msgspec.Struct, frozen=True):
    """Result of a round.

    `full`: there was more than the object could take.
    `failed`: the error that prevented some or all of the move.
    `batches`: of the partition with the most.
    """

    size_bytes: int = 0
    full: bool = False
    failed: TidemillError | None = None
    batches: int = 0


class Reconciler:
    """Reconciler of one node, for the partitions that it leads."""

    def __init__(
        self,
        rows: ExtentStore,
        around: LeaderDeps,
        l0: RangeReader,
        cache: ObjectCache,
        led: Mapping[PartitionKey, PartitionLeader],
    ) -> None:
        self._rows = rows
        self._objects = around.objects
        self._clock = around.clock
        self._rand = around.rand
        self._settings = around.settings
        self._l0 = l0
        self._cache = cache
        self._led = led
        self._waiting: dict[PartitionKey, int] = {}
        """Partition with more to move, to the last round that took from it: those that waited longest go first."""
        self._round = 0
        self.figures = ReconcilerFigures()

    async def run_round(self, topic_id: str, partitions: Collection[int]) -> RoundResult:
        """Move at most one object of these partitions of a topic. Does not raise TidemillError: see
        `RoundResult.failed`."""
        try:
            return await self._move_object(topic_id, partitions)
        except TidemillError as error:
            return RoundResult(failed=error)

    async def _move_object(self, topic_id: str, partitions: Collection[int]) -> RoundResult:
        self._round += 1
        pieces, full = await self._choose_pieces(topic_id, partitions)
        if not pieces:
            return RoundResult()
        found = await read_batches(self._l0, [piece.refs for piece in pieces], self._cache)
        failed: TidemillError | None = None
        taken: list[PieceBatches] = []
        for piece, batches in zip(pieces, found, strict=True):
            if isinstance(batches, CorruptError):
                piece, batches = await self._skip_dropped_objects(topic_id, piece, batches)
            if isinstance(batches, list):
                taken.append((piece, batches))
            else:
                failed = batches
                self._record_left_out(topic_id, piece.partition, failed)
        if not taken:
            return RoundResult(full=full, failed=failed)
        size = await self._upload(topic_id, taken)
        return RoundResult(size, full, failed, max(len(batches) for _, batches in taken))

    async def _skip_dropped_objects(
        self, topic_id: str, piece: PartitionPiece, error: TidemillError
    ) -> tuple[PartitionPiece, list[Buffer] | TidemillError]:
        """Remove the batches of dropped objects from the piece, and read the others. The piece retains its offsets."""
        keys = {ref.object_key for ref in piece.refs if self._cache.get(ref.object_key) is None}
        gone = {key for key in sorted(keys) if await is_dropped(self._objects, key)}
        if not gone:
            return piece, error
        left = replace(piece, refs=[ref for ref in piece.refs if ref.object_key not in gone])
        for ref in piece.refs:
            if ref.object_key in gone:
                _log.warning(
                    "lost records skipped", partition=f"{topic_id}/{piece.partition}", offset=ref.base_offset,
                    count=ref.record_count, key=ref.object_key,
                )  # fmt: skip
        self.figures.let_go += len(piece.refs) - len(left.refs)
        (found,) = await read_batches(self._l0, [left.refs], self._cache)
        return left, found

    async def _choose_pieces(self, topic_id: str, partitions: Collection[int]) -> tuple[list[PartitionPiece], bool]:
        """Select the pieces of the next object; return them and whether there is more."""
        led = {
            partition: each
            for partition in partitions
            if (each := self._led.get((topic_id, partition))) is not None
            and each.is_open
            and each.last_stable > each.state.hot_start
        }
        places = await self._rows.partition_rows(topic_id, sorted(led))
        room = self._settings.l1_object_bytes
        pieces: list[PartitionPiece] = []
        full = False
        for partition in sorted(led, key=lambda p: (self._waiting.get((topic_id, p), 0), p)):
            try:
                start, end = await self._movable_range(led[partition], places[partition])
            except TidemillError as error:
                self._record_left_out(topic_id, partition, error)
                continue
            state = led[partition].state
            if not led[partition].is_open or start < state.hot_start or end <= start:
                continue
            piece = (
                cut_piece(state, partition, start, end, room, at_least_one=not pieces)
                if len(pieces) < OBJECT_PARTITIONS_MAX
                else None
            )
            if piece is not None:
                pieces.append(piece)
                room -= piece.size_bytes
            if piece is None or piece.end < end:
                full = True
                if piece is not None:
                    self._waiting[topic_id, partition] = self._round
            else:
                self._waiting.pop((topic_id, partition), None)
        return pieces, full

    def _record_left_out(self, topic_id: str, partition: int, error: TidemillError) -> None:
        self.figures.left_out += 1
        _log.warning("a partition is left out of an L1 object", partition=f"{topic_id}/{partition}", cause=str(error))

    async def _movable_range(self, led: PartitionLeader, place: PartitionRows) -> tuple[int, int]:
        """Return the offsets that may move now. Correct the log if the rows are ahead of it."""
        state, copy, row = led.state, place.checkpoint, place.l1
        if copy is None:
            return 0, 0
        end = min(led.last_stable, copy.next_offset)
        if row is None:
            # L1 may not begin above the checkpoint's log start (RFC 0005, X1).
            return (state.log_start if state.log_start <= copy.log_start else end), end
        if row.next < state.reconciled:
            raise CorruptError(
                f"L1 lacks offsets that a log has removed: partition={led.topic_id}/{led.partition} next={row.next} "
                f"reconciled={state.reconciled}.",
                fix="Restore the cluster from its bucket.",
            )
        if row.next > state.reconciled:
            self.figures.corrected += 1
            led.advance_reconciled(min(row.next, state.high_watermark))
        start = state.log_start
        if row.next >= start:
            return row.next, end
        if copy.log_start < start:
            return end, end
        # Retention has passed everything in L1, so L1 continues at the log start.
        await self._rows.set_start(led.topic_id, led.partition, start)
        return start, end

    async def _upload(self, topic_id: str, taken: Sequence[PieceBatches]) -> int:
        """Upload and add an object; return its size.

        Raises UnavailableError, UnknownOutcomeError, InvalidError: L1 does not refer to the object, or the next round
        finds that it does.
        """
        parts, footer = await _run_in_thread_if_large(partial(_build_object, topic_id), taken)
        name = object_id(self._clock.now_ms(), self._rand.nonce())
        await self._rows.register(topic_id, name)
        await self._objects.put(l1_key(topic_id, name), parts)
        terms = {piece.partition: piece.terms for piece, _ in taken}
        size = sum(len(part) for part in parts)
        nexts = await self._rows.add(AddRequest(topic_id, name, size, footer.regions, terms))
        for piece, _ in taken:
            led, following = self._led.get((topic_id, piece.partition)), nexts[piece.partition]
            self.figures.corrected += following != piece.end
            if led is not None:
                aborted_start = await self._aborted_start(led)
                led.advance_reconciled(min(following, led.state.high_watermark), aborted_start)
        self.figures.objects += 1
        self.figures.moved_bytes += size
        return size

    async def _aborted_start(self, led: PartitionLeader) -> int:
        """Return the offset below which no reader needs aborted transactions: compaction has removed their records."""
        if not led.config.is_compacted or not len(led.state.aborted):
            return 0
        row, _ = await self._rows.compaction_progress(led.topic_id, led.partition)
        return row.settled


async def _run_in_thread_if_large(work: Callable[[Sequence[PieceBatches]], T], taken: Sequence[PieceBatches]) -> T:
    if sum(len(batches) for _, batches in taken) > INLINE_BATCHES:
        return await asyncio.to_thread(work, taken)
    return work(taken)


def _build_object(topic_id: str, taken: Sequence[PieceBatches]) -> tuple[list[Buffer], Footer]:
    build = ObjectBuilder(topic_id)
    for piece, batches in taken:
        build.begin_range(piece.partition, piece.start)
        for ref, batch in zip(piece.refs, batches, strict=True):
            build.add(batch, ref.base_offset, ref.base_offset + ref.record_count, ref.max_timestamp_ms)
        build.end(piece.end)
    return build.finish()
