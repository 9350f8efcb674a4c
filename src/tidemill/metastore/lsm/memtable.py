"""Rows in memory: a stack of layers, each two dicts and, once somebody scans, a sorted list of keys (RFC 0002 §3).

    newest   layer   pins = 0: the next batch goes in; pins > 0: the next batch opens a new layer
             layer   never written again
    frozen   layer   being flushed
             layer   being flushed

M1  Only the newest layer is ever written, and only while nobody pins it. So whoever holds the stack as
    it was, and a pin on its newest layer, sees it stand still.
M2  Folding makes a new layer and leaves the old ones to those who hold them.
M3  Below the newest one a layer has at least twice the rows of the layer above it, or the two have more
    than FOLD_ROWS: so a stack is as deep as the logarithm of that plus one layer for every so many
    rows, a row is folded that often at most, and no fold takes longer than a few milliseconds.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import islice, repeat

SORT_ROWS = 4_096
"""Keys sorted in one go: a millisecond. A hundred thousand at once are fifty."""

INSERT_SHARE = 256
"""New keys are inserted one by one when they are fewer than one in so many, else sorted and merged."""

FOLD_ROWS = 20_000
"""Layers are folded up to this size: some milliseconds."""

ROW_OVERHEAD_BYTES = 240
"""What a row costs in memory beside the bytes of its key and value: two objects' headers, its entries in
two dicts and in the lists of its batch, its place in the sorted list. Measured as resident memory with all of
them: 145 to 232, most of all right after the dicts have grown."""


class Layer:
    """Rows with one value per key, all newer than those of the layers below. `values` and `seqnos` are for reading."""

    __slots__ = ("_fresh", "_runs", "_seqnos", "_taken", "_undated", "last_seqno", "pins", "size_bytes", "values")

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.last_seqno = 0
        self.size_bytes = 0
        self.pins = 0
        self._seqnos: dict[bytes, int] = {}
        self._undated: list[tuple[int, tuple[bytes, ...]]] = []  # batches, in order, whose keys are to go into _seqnos
        self._runs: list[list[bytes]] = []  # sorted, disjoint; one when the work is done
        self._fresh: list[bytes] = []  # keys in neither a run nor a chunk yet
        self._taken = 0  # keys in _runs and _fresh

    def put(self, seqno: int, keys: Sequence[bytes], values: Sequence[bytes], size_bytes: int) -> None:
        if len(keys) == 1:
            self.values[keys[0]] = values[0]
        else:
            self.values.update(zip(keys, values, strict=True))
        # Most readers want no seqno: who wants one, or flushes, pays for it.
        if len(keys) > 1 or self._undated:
            self._undated.append((seqno, tuple(keys)))
        else:
            self._seqnos[keys[0]] = seqno
        self.last_seqno = seqno
        self.size_bytes += size_bytes

    @staticmethod
    def fold(elder: Layer, younger: Layer) -> Layer:
        """Both as one; the younger one's rows win. Neither argument changes (M2)."""
        one = Layer()
        one.values = {**elder.values, **younger.values}
        one._seqnos = {**elder.seqnos, **younger.seqnos}
        one.last_seqno = younger.last_seqno
        one.size_bytes = elder.size_bytes + younger.size_bytes
        return one

    @property
    def seqnos(self) -> dict[bytes, int]:
        """Key to the seqno of its row."""
        while not self.date_step():
            pass
        return self._seqnos

    def date_step(self) -> bool:
        """Some thousand keys' worth of work for `seqnos`; True when it is done."""
        rows = 0
        for done, (seqno, keys) in enumerate(self._undated, start=1):
            self._seqnos.update(zip(keys, repeat(seqno)))
            rows += len(keys)
            if rows >= SORT_ROWS:
                del self._undated[:done]
                return not self._undated
        self._undated.clear()
        return True

    # sorted keys, by and by ------------------------------------------------------------------------

    @property
    def sorted_keys(self) -> list[bytes] | None:
        """All keys ascending, or None while `sort_step` has work to do. Stands still while the layer does."""
        if self._taken != len(self.values) or self._fresh or len(self._runs) > 1:
            return None
        return self._runs[0] if self._runs else []

    def sort_step(self) -> bool:
        """A few milliseconds of sorting at most; True when the keys are sorted.

        Scans of one layer share the work: any of them may take the next step.
        """
        if new := len(self.values) - self._taken:
            # No key ever leaves the dict, so the new ones are its last ones, whatever was overwritten.
            self._fresh.extend(islice(reversed(self.values), new))
            self._taken += new
        runs, fresh = self._runs, self._fresh
        if len(runs) > 1 and (not fresh or len(runs[-2]) < 2 * len(runs[-1])):
            younger = runs.pop()
            one = runs.pop() + younger  # a new list: sort() empties its own while it works
            one.sort()  # two ascending runs: merged, not sorted anew
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
    """The stack. `layers` is newest first."""

    def __init__(self) -> None:
        self.layers: tuple[Layer, ...] = ()
        self.frozen: tuple[Layer, ...] = ()
        """The layers at the end of `layers` that a flush is writing out."""
        self.size_bytes = 0
        """Of all layers, with ROW_OVERHEAD_BYTES a row: rows as they were put, so an overwritten one counts twice.
        The log behind the database holds it twice as well."""
        self.live_bytes = 0
        """Of those that are not frozen."""
        self._open: Layer | None = None  # the newest layer, if it may be written but for its pins

    @property
    def rows(self) -> int:
        """As stored: a key in two layers counts twice."""
        return sum(len(layer.values) for layer in self.layers)

    def put(self, seqno: int, keys: Sequence[bytes], values: Sequence[bytes], data_bytes: int) -> bool:
        """Put one batch, into a new layer when the newest is pinned or frozen (M1). True when `layers` changed."""
        layer = self._open
        new = layer is None or layer.pins > 0
        if layer is None or new:
            live = self.layers[: len(self.layers) - len(self.frozen)]
            self._open = layer = Layer()
            self.layers = (layer, *_folded(live), *self.frozen)
        size_bytes = data_bytes + ROW_OVERHEAD_BYTES * len(keys)
        layer.put(seqno, keys, values, size_bytes)
        self.size_bytes += size_bytes
        self.live_bytes += size_bytes
        return new

    def freeze(self) -> tuple[Layer, ...]:
        """Everything there is, left-overs of a failed flush too, newest first; () when there is no row.

        Plain, so that the seqno the caller takes beside it covers exactly these rows (L4).
        """
        self.frozen = self.layers
        self.live_bytes = 0
        self._open = None
        return self.frozen

    def drop_frozen(self) -> None:
        """The flush is done: its rows are in files."""
        self.layers = self.layers[: len(self.layers) - len(self.frozen)]
        self.frozen = ()
        self.size_bytes = self.live_bytes

    def thaw(self) -> None:
        """The flush failed: its rows are ordinary elder layers again."""
        self.frozen = ()
        self.live_bytes = self.size_bytes

    def drop_through(self, seqno: int) -> None:
        """For followers: leave out the layers whose rows are all at or below `seqno`, and seal the newest.

        A layer with newer rows too stays as it is. Its other rows say the same as the files: a batch
        newer than those rows and at or below `seqno` would be in this layer or in one above it.
        """
        self.layers = tuple(layer for layer in self.layers if layer.last_seqno > seqno)
        self.size_bytes = self.live_bytes = sum(layer.size_bytes for layer in self.layers)
        self._open = None


def _folded(newest_first: Sequence[Layer]) -> list[Layer]:
    """The same rows in layers that keep M3."""
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
