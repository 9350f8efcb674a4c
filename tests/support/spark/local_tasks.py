"""The part of a SparkContext that distributed steps need, computed immediately in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any


class LocalTasks:
    master = "local[4,4]"
    defaultParallelism = 4

    def parallelize(self, items: Iterable[Any], _: int) -> Rows:
        return Rows([list(items)])


class Rows:
    def __init__(self, partitions: list[list[Any]]) -> None:
        self.partitions = partitions

    def flatMap(self, call: Callable[[Any], Iterable[Any]]) -> Rows:
        return Rows([[out for item in items for out in call(item)] for items in self.partitions])

    def partitionBy(self, count: int, place: Callable[[Any], int]) -> Rows:
        out: list[list[Any]] = [[] for _ in range(count)]
        for key, value in (pair for items in self.partitions for pair in items):
            out[place(key)].append((key, value))
        random.Random(len(out)).shuffle(out[0])  # messages arrive in any order
        return Rows(out)

    def mapPartitionsWithIndex(self, call: Callable[[int, Iterable[Any]], Iterable[Any]]) -> Rows:
        return Rows([list(call(index, items)) for index, items in enumerate(self.partitions)])

    def collect(self) -> list[Any]:
        return [item for items in self.partitions for item in items]
