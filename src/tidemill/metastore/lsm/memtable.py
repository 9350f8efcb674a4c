"""Rows in memory: a stack of layers, each two dicts and, once it is scanned, a sorted list of keys (RFC 0002 §3).

    newest   layer   pins = 0: the next batch is written here; pins > 0: the next batch opens a new layer
             layer   never written again
    frozen   layer   being flushed
             layer   being flushed

- Invariant (pinned layers do not change): only the newest layer is ever written, and only while it is not pinned. So a
  reader that holds the stack's layers and a pin on the newest one has a stable snapshot.
- Invariant (folding copies): folding makes a new layer; the old layers stay unchanged for their readers.
- Invariant (depth): every layer below the newest has at least twice the rows of the layer above it, or the two together
  have more than FOLD_ROWS. So the depth of a stack is that logarithm plus one layer per FOLD_ROWS rows, a row is
  folded at most that often, and no fold takes longer than a few milliseconds.

A batch is validated before it is applied, without Python code per row: in a few loops in C.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import islice, repeat

from tidemill.base.errors import InvalidError
from tidemill.base.limits import (
    METASTORE_BATCH_BYTES,
    METASTORE_BATCH_ROWS,
    METASTORE_KEY_BYTES,
    METASTORE_VALUE_BYTES,
)

SORT_ROWS = 4_096
"""Keys sorted in one step: a millisecond. A hundred thousand in one step would take fifty."""

INSERT_SHARE = 256
"""New keys are inserted one by one if they are fewer than one in INSERT_SHARE, else sorted and merged."""

FOLD_ROWS = 20_000
"""Layers are folded up to this size: some milliseconds."""

ROW_OVERHEAD_BYTES = 240
"""Memory cost of a row in addition to the bytes of its key and value: two object headers, its entries in two dicts and
in the lists of its batch, its place in the sorted list. Measured as resident memory with all of them: 145 to 232, the
maximum right after the dicts have grown."""


class Layer:
    """Rows with one value per key, all newer than those of the layers below. `values` and `seqnos` are read-only."""

    __slots__ = ("_fresh", "_runs", "_seqnos", "_taken", "_undated", "last_seqno", "pins", "size_bytes", "values")

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.last_seqno = 0
        self.size_bytes = 0
        self.pins = 0
        self._seqnos: dict[bytes, int] = {}
        self._undated: list[tuple[int, tuple[bytes, ...]]] = []  # batches, in order, not added to _seqnos yet
        self._runs: list[list[bytes]] = []  # sorted, disjoint; one when sorting is done
        self._fresh: list[bytes] = []  # keys that are not in a run yet
        self._taken = 0  # number of keys in _runs and _fresh

    def put(self, seqno: int, keys: Sequence[bytes], values: Sequence[bytes], size_bytes: int) -> None:
        if len(keys) == 1:
            self.values[keys[0]] = values[0]
        else:
            self.values.update(zip(keys, values, strict=True))
        # Most reads need no seqno, so the work is left to those that do, and to the flush.
        if len(keys) > 1 or self._undated:
            self._undated.append((seqno, tuple(keys)))
        else:
            self._seqnos[keys[0]] = seqno
        self.last_seqno = seqno
        self.size_bytes += size_bytes

    @staticmethod
    def fold(elder: Layer, younger: Layer) -> Layer:
        """Return both layers as one; rows of the younger one win. The arguments do not change."""
        one = Layer()
        one.values = {**elder.values, **younger.values}
        one._seqnos = {**elder.seqnos, **younger.seqnos}
        one.last_seqno = younger.last_seqno
        one.size_bytes = elder.size_bytes + younger.size_bytes
        return one

    @property
    def seqnos(self) -> dict[bytes, int]:
        """Map from key to the seqno of its row."""
        while not self.index_seqnos_step():
            pass
        return self._seqnos

    def index_seqnos_step(self) -> bool:
        """Add some thousand keys to `seqnos`; return True when all are added."""
        rows = 0
        for done, (seqno, keys) in enumerate(self._undated, start=1):
            self._seqnos.update(zip(keys, repeat(seqno)))
            rows += len(keys)
            if rows >= SORT_ROWS:
                del self._undated[:done]
                return not self._undated
        self._undated.clear()
        return True

    # incremental sorting ---------------------------------------------------------------------------

    @property
    def sorted_keys(self) -> list[bytes] | None:
        """All keys ascending, or None while `sort_step` has work to do. Unchanged as long as the layer is."""
        if self._taken != len(self.values) or self._fresh or len(self._runs) > 1:
            return None
        return self._runs[0] if self._runs else []

    def sort_step(self) -> bool:
        """Sort for a few milliseconds at most; return True when the keys are sorted.

        Scans of one layer share the work: any of them may execute the next step.
        """
        if new := len(self.values) - self._taken:
            # Keys are never removed from the dict, so the new ones are its last ones, even if rows were overwritten.
            self._fresh.extend(islice(reversed(self.values), new))
            self._taken += new
        runs, fresh = self._runs, self._fresh
        if len(runs) > 1 and (not fresh or len(runs[-2]) < 2 * len(runs[-1])):
            younger = runs.pop()
            one = runs.pop() + younger  # a new list: sort() empties its list while it runs
            one.sort()  # two ascending runs: timsort merges them
            runs.append(one)
        elif fresh:
            chunk = fresh[-SORT_ROWS:]
            del fresh[-SORT_ROWS:]
            if len(runs) == 1 and len(chunk) * INSERT_SHARE <= len(runs[0]):
                for key in chunk:
                    insort(runs[0], key)
            else:
                chunk.sort()
                runs.append(chunk)
        return not fresh and len(runs) <= 1


class Memtable:
    """Stack of layers. `layers` is newest first."""

    def __init__(self) -> None:
        self.layers: tuple[Layer, ...] = ()
        self.frozen: tuple[Layer, ...] = ()
        """Layers at the end of `layers` that a flush is writing."""
        self.size_bytes = 0
        """Size of all layers, with ROW_OVERHEAD_BYTES per row. Overwritten rows count, since the log behind the
        database stores them too."""
        self.live_bytes = 0
        """Size of the layers that are not frozen."""
        self._open: Layer | None = None  # the newest layer, if it may be written while not pinned

    @property
    def rows(self) -> int:
        """Number of stored rows: a key in two layers counts twice."""
        return sum(len(layer.values) for layer in self.layers)

    def put(self, seqno: int, keys: Sequence[bytes], values: Sequence[bytes], data_bytes: int) -> bool:
        """Write one batch, into a new layer if the newest is pinned or frozen. Return True if `layers` changed."""
        layer = self._open
        new = layer is None or layer.pins > 0
        if layer is None or new:
            live = self.layers[: len(self.layers) - len(self.frozen)]
            self._open = layer = Layer()
            self.layers = (layer, *_fold_layers(live), *self.frozen)
        size_bytes = data_bytes + ROW_OVERHEAD_BYTES * len(keys)
        layer.put(seqno, keys, values, size_bytes)
        self.size_bytes += size_bytes
        self.live_bytes += size_bytes
        return new

    def freeze(self) -> tuple[Layer, ...]:
        """Freeze and return all layers, including those of a failed flush, newest first; () if there is no row.

        Synchronous, so that the seqno that the caller reads in the same step covers exactly these rows.
        """
        self.frozen = self.layers
        self.live_bytes = 0
        self._open = None
        return self.frozen

    def drop_frozen(self) -> None:
        """Drop the frozen layers: the flush is done and their rows are in files."""
        self.layers = self.layers[: len(self.layers) - len(self.frozen)]
        self.frozen = ()
        self.size_bytes = self.live_bytes

    def thaw(self) -> None:
        """Make the frozen layers ordinary ones again: the flush failed."""
        self.frozen = ()
        self.live_bytes = self.size_bytes

    def drop_through(self, seqno: int) -> None:
        """Drop the layers whose rows are all at or below `seqno`, and seal the newest. For followers.

        A layer that has newer rows too is kept whole. Its older rows agree with the files: a batch newer than those
        rows and at or below `seqno` would be in this layer or in one above it.
        """
        self.layers = tuple(layer for layer in self.layers if layer.last_seqno > seqno)
        self.size_bytes = self.live_bytes = sum(layer.size_bytes for layer in self.layers)
        self._open = None


def _fold_layers(newest_first: Sequence[Layer]) -> list[Layer]:
    """Return the same rows in layers that satisfy the depth invariant."""
    layers: list[Layer] = []  # oldest first
    for layer in reversed(newest_first):
        layers.append(layer)
        while len(layers) > 1:
            younger, elder = len(layers[-1].values), len(layers[-2].values)
            if elder >= 2 * younger or elder + younger > FOLD_ROWS:
                break
            layers[-2:] = [Layer.fold(layers[-2], layers[-1])]
    layers.reverse()
    return layers


def batch_bytes(keys: Sequence[bytes], values: Sequence[bytes]) -> int:
    """Return the size of all keys and values. Raises InvalidError for a batch that is empty, too large or has
    different numbers of keys and values, for an empty key, and for a key or value above its limit. Of a key that occurs
    twice the last row counts.
    """
    rows = len(keys)
    if not rows:
        raise InvalidError("a batch needs at least one row: rows=0.", fix="Add rows, or apply no batch.")
    if rows != len(values):
        raise InvalidError(
            f"a batch needs one value for each key: keys={rows} values={len(values)}.",
            fix="Pass a value for each key, the empty one to delete it.",
        )
    if not all(keys):
        raise InvalidError(
            f"a key must not be empty: row={list(map(len, keys)).index(0)}.", fix="Give every row a key."
        )
    if rows == 1:
        keys_bytes, values_bytes = len(keys[0]), len(values[0])
    else:
        keys_bytes, values_bytes = len(b"".join(keys)), len(b"".join(values))
    # If the sum is within the limit of one, none needs to be checked individually.
    if keys_bytes > METASTORE_KEY_BYTES and (longest := max(map(len, keys))) > METASTORE_KEY_BYTES:
        raise InvalidError(
            f"a key is too long: size_bytes={longest} limit_bytes={METASTORE_KEY_BYTES}.", fix="Use a shorter key."
        )
    if values_bytes > METASTORE_VALUE_BYTES and (largest := max(map(len, values))) > METASTORE_VALUE_BYTES:
        raise InvalidError(
            f"a value is too large: size_bytes={largest} limit_bytes={METASTORE_VALUE_BYTES}.",
            fix="Store it in an object and keep the object's name.",
        )
    if keys_bytes + values_bytes > METASTORE_BATCH_BYTES or rows > METASTORE_BATCH_ROWS:
        raise InvalidError(
            f"a batch is too large: size_bytes={keys_bytes + values_bytes} limit_bytes={METASTORE_BATCH_BYTES} "
            f"rows={rows} limit_rows={METASTORE_BATCH_ROWS}.",
            fix="Split it, if its rows need not become visible together.",
        )
    return keys_bytes + values_bytes
