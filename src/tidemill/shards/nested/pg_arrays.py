"""PostgreSQL's text of arrays (`array_out`) → the texts of their elements. Pure.

    {1,2,NULL}                 elements without quotes: none has a quote, backslash, brace, comma or blank, and NULL is
                               null
    {"a b","q\\"t","NULL",""}  elements in quotes, in which a backslash escapes the next character
    {}                         no elements
    [0:1]={1,2}                lower bounds other than 1: they are dropped
    {{1,2},{3,4}}              more than one dimension: no list of elements

Only the text of types whose delimiter is the comma is read. Source: PostgreSQL, "Arrays", "Array Input and Output
Syntax".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.shards.nested.values import Mask

_TEXTS = pa.list_(pa.field("element", pa.string()))
_BOUNDS = re.compile(r"(?:\[-?\d+:-?\d+\])+=", re.ASCII)
_ELEMENT = re.compile(r'(?:"([^"\\]*(?:\\.[^"\\]*)*)"|([^{},"\\]+))([,}])', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_PLAIN = r'^\{(?:[^{}",\\]+(?:,[^{}",\\]+)*)?\}$'
"""Texts with elements without quotes, one dimension and no bounds."""


class DimensionsError(ValueError):
    """The array has more than one dimension."""

    def __init__(self) -> None:
        super().__init__("it has more than one dimension")


def split_array(text: str) -> list[str | None]:
    """Return the texts of the elements. Raises DimensionsError, and ValueError for any other text."""
    bounds = _BOUNDS.match(text)
    at = bounds.end() if bounds else 0
    if text[at : at + 1] != "{":
        raise ValueError("it does not begin with {")
    at += 1
    if text[at : at + 1] == "{":
        raise DimensionsError
    if text[at:] == "}":
        return []
    out: list[str | None] = []
    mark = ","
    while mark == ",":
        found = _ELEMENT.match(text, at)
        if found is None:
            raise ValueError("an element does not end")
        quoted, plain, mark = found.groups()
        if plain is not None:
            out.append(None if plain == "NULL" else plain)
        else:
            out.append(_ESCAPED.sub(r"\1", quoted) if "\\" in quoted else quoted)
        at = found.end()
    if at != len(text):
        raise ValueError("text follows the closing brace")
    return out


def split_arrays(texts: pa.Array) -> tuple[pa.Array, Mask]:
    """Split texts into lists of texts. Return the lists, and a mask of the texts that do not parse; their lists are
    null.

    Texts without quotes are split by columns.
    """
    valid = _to_mask(texts.is_valid())
    plain = _to_mask(pc.match_substring_regex(texts, _PLAIN))
    wrong = np.zeros(len(texts), dtype=bool)
    places = np.flatnonzero(valid & ~plain)
    lists = _split_plain(texts if plain.all() else pc.if_else(pa.array(plain), texts, None), plain)
    if not len(places):
        return lists, wrong
    found: list[list[str | None] | None] = []
    for place, text in zip(places.tolist(), texts.take(pa.array(places)).to_pylist(), strict=True):
        try:
            found.append(split_array(text))
        except ValueError:
            wrong[place] = True
            found.append(None)
    taken = np.arange(len(texts))
    taken[places] = len(texts) + np.arange(len(places))
    return pa.concat_arrays([lists, pa.array(found, _TEXTS)]).take(pa.array(taken)), wrong


def _split_plain(texts: pa.Array, valid: Mask) -> pa.Array:
    split = pc.split_pattern(pc.utf8_slice_codeunits(texts, 1, -1), ",")
    offsets = np.asarray(split.offsets, dtype=np.int64)
    words = split.values.slice(offsets[0], offsets[-1] - offsets[0])
    counts = np.diff(offsets)
    empty = _to_mask(pc.equal(texts, "{}")) | ~valid
    if empty.any():  # the text {} is split into one empty word
        words = words.filter(pa.array(np.repeat(~empty, counts)))
        counts = np.where(empty, 0, counts)
    null = _to_mask(pc.equal(words, "NULL"))
    if null.any():  # taken, because a null has no bytes then
        words = words.take(pa.array(np.arange(len(words)), mask=null))
    return list_array(counts, words, valid)


def map_elements(lists: pa.Array, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Return lists with their elements converted, all in one call."""
    counts = np.asarray(lists.value_lengths().fill_null(0), dtype=np.int64)
    return list_array(counts, convert(lists.flatten()), _to_mask(lists.is_valid()))


def list_array(counts: npt.NDArray[np.int64], elements: pa.Array, valid: Mask) -> pa.Array:
    """Return lists of these lengths with consecutive elements; null where not `valid`."""
    ends = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=ends[1:])
    kind = pa.list_(pa.field("element", elements.type))
    mask = None if valid.all() else pa.array(~valid)
    return pa.ListArray.from_arrays(pa.array(ends), elements, type=kind, mask=mask)


def lists_of(values: list[list[str | None] | None]) -> tuple[npt.NDArray[np.int64], list[str | None], Mask]:
    """Return the lengths, elements and validity of lists, for `list_array`."""
    counts = np.array([0 if v is None else len(v) for v in values], dtype=np.int64)
    elements = list(chain.from_iterable(v for v in values if v is not None))
    return counts, elements, np.array([v is not None for v in values], dtype=bool)


def _to_mask(array: pa.Array) -> Mask:
    return np.asarray(array.fill_null(False).to_numpy(zero_copy_only=False), dtype=bool)
