"""Exact conversion of decimals into Arrow, or an error; conversion of floats to a narrower type. Pure.

Arrow (26) checks too little when it changes a decimal's scale:

    the factor    10^n is looked up in a table without a bounds check: 1e-2000000000 ends the process
    the product   overflow beyond 2^128 is detected only if the wrapped product is smaller, e.g. not in 4e20 as (38,18)

So Arrow only rescales values that fit: texts without an exponent, by a factor and to a product within range.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.shards.parts.arrow_rows import Mask

DIGITS = 38
"""Digits of a decimal128: a value with at most this many digits in total does not wrap."""
_WIDE_DIGITS = 76


def wide_type(kind: pa.Decimal128Type) -> pa.DataType:
    """Return the type to which any decimal of 38 digits can be rescaled without a wrap: 10^38 · 10^38 < 2^256."""
    return pa.decimal256(_WIDE_DIGITS, kind.scale)


def decimals_to_arrow(values: Sequence[Decimal | None], kind: pa.Decimal128Type) -> pa.Array:
    """Convert Python decimals. Raises ValueError for a value that the type does not hold exactly."""
    return pa.array([None if v is None else _quantize_exactly(v, kind) for v in values], kind)


def decimal_texts_to_arrow(texts: pa.Array, kind: pa.Decimal128Type) -> pa.Array:
    """Convert texts by column, for plain digits.

    Raises ArrowInvalid if a text is anything else, or may be too large: the caller then uses `decimals_to_arrow`.
    """
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    if data is None or not len(texts) or places[0] == places[-1]:
        return texts.cast(kind)
    characters = np.frombuffer(data, dtype=np.uint8)[places[0] : places[-1]]
    if ((characters | 0x20) == ord("e")).any():
        raise pa.ArrowInvalid("a decimal with an exponent")
    if int(np.diff(places).max()) + kind.scale > DIGITS:
        seen = pc.min_max(pc.abs(texts.cast(pa.float64())))["max"].as_py()
        # A product below 2 · 10^38 does not wrap, and Arrow compares it with the precision.
        if not seen < 2 * 10.0 ** (DIGITS - kind.scale):
            raise pa.ArrowInvalid("a decimal that may be too large")
    return texts.cast(kind)


def rescale_decimals(column: Any, kind: pa.Decimal128Type) -> Any:
    """Rescale decimals to another precision and scale. Raises ArrowInvalid if a value would change."""
    if pa.types.is_decimal256(column.type):
        column = column.cast(pa.decimal128(DIGITS, column.type.scale))
    return column.cast(wide_type(kind)).cast(kind)


def _quantize_exactly(value: Decimal, kind: pa.Decimal128Type) -> Decimal:
    try:
        if value.is_finite():
            return value.quantize(_unit(kind.scale), context=_context(kind.precision))
    except DecimalException:
        pass
    raise ValueError(f"not a decimal({kind.precision},{kind.scale}): value={_shortened(value)}")


def _shortened(value: Decimal) -> str:
    return f"{value}"[:80]


@lru_cache(maxsize=64)
def _unit(scale: int) -> Decimal:
    return Decimal(1).scaleb(-scale)


@lru_cache(maxsize=64)
def _context(precision: int) -> Context:
    """Return a shared context. Threads change only its flags, which are never read."""
    return Context(prec=precision, traps=[Inexact, InvalidOperation])


def narrow_to_float32(doubles: pa.Array) -> tuple[pa.Array, Mask]:
    """Convert float64s to float32s; also return a mask of the finite values that become infinite."""
    narrow = doubles.cast(pa.float32(), safe=False)
    found = is_infinite(narrow)
    return narrow, found & ~is_infinite(doubles) if found.any() else found


def is_infinite(floats: Any) -> Mask:
    """Return a mask of ±infinity."""
    found: Mask = np.isinf(floats.to_numpy(zero_copy_only=False))  # null is NaN there
    return found
