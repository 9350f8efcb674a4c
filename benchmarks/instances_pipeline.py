"""Harbour Shop's pipeline and a keyed topic whose rows change and go; by the name `lone` the same into other shards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # a driver runs this file without the path of the benchmarks
from demo import pipeline as shop
from tidemill.spark import Pipeline

LONE = "lone_"
CARTS = "carts"


class Renamed:
    """Declares every table under another name, and derived ones from those."""

    def __init__(self, pipeline: Pipeline, prefix: str) -> None:
        self._pipeline = pipeline
        self._prefix = prefix
        self.capture = pipeline.capture
        self.topic = pipeline.topic

    def table(self, name: str, source: Any) -> None:
        self._pipeline.table(self._prefix + name, source)

    def derived(self, name: str, *, inputs: tuple[str, ...], **options: Any) -> Callable[[Any], Any]:
        return self._pipeline.derived(
            self._prefix + name, inputs=tuple(self._prefix + one for one in inputs), **options
        )


def build(p: Pipeline) -> None:
    renamed: Any = Renamed(p, LONE if p.name == "lone" else "")
    shop.build(renamed)
    renamed.table(CARTS, p.topic(CARTS, key="cart_id", schema="cart_id string, product_id long, pieces long"))
