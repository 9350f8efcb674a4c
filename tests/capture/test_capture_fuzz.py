"""A few seconds of the fuzzing that `./dev bench fuzz pgoutput` does for minutes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from fuzz_pgoutput import corpus, fuzz

pytestmark = pytest.mark.postgres

KINDS = {b"B", b"C", b"R", b"I", b"U", b"D", b"T", b"M", b"Y"}


def test_mutated_messages_are_poison_or_read_and_never_anything_else(postgres_dsn: str) -> None:
    messages = corpus(postgres_dsn)
    assert {m[:1] for m in messages} >= KINDS, "every kind is mutated"
    found = asyncio.run(fuzz(messages, 3.0, 7))
    assert not found["failures"], found
    assert found["poisoned"] > 100 and found["fragments"] > 1000
