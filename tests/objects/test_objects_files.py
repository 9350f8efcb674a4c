"""An object as a file: equal to a file of the same bytes, and only requested ranges are fetched."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.clock import SystemClock
from tidemill.base.errors import MissingError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.reads import ObjectFile


class Noted(MemoryObjects):
    fetched = 0

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        found = await super().get(key, start, end)
        self.fetched += len(found)
        return found


@given(st.binary(max_size=50), st.lists(st.tuples(st.integers(0, 60), st.integers(-1, 60)), max_size=8))
def test_it_reads_as_a_file_of_the_same_bytes(data: bytes, reads: list[tuple[int, int]]) -> None:
    with BlockingPortal() as portal:
        objects = MemoryObjects(SystemClock())
        portal.call(objects.put("k", data))
        found, want = ObjectFile(portal, objects, "k", len(data)), io.BytesIO(data)
        for at, size in reads:
            assert (found.seek(at), found.read(size), found.tell()) == (want.seek(at), want.read(size), want.tell())
        assert (found.seek(0, io.SEEK_END), found.read()) == (want.seek(0, io.SEEK_END), want.read())
        into = bytearray(7)
        found.seek(0)
        assert found.readinto(into) == len(data[:7]) and into[: len(data)] == data[:7].ljust(min(7, len(data)), b"\0")


def test_of_a_parquet_file_only_the_footer_and_the_wanted_columns_are_fetched() -> None:
    table = pa.table({"wide": [f"{n:>200}" for n in range(2_000)], "narrow": list(range(2_000))})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, use_dictionary=False, compression="none")
    with BlockingPortal() as portal:
        objects = Noted(SystemClock())
        portal.call(objects.put("k", sink.getvalue().to_pybytes()))
        file = pq.ParquetFile(ObjectFile(portal, objects, "k", sink.getvalue().size))
        assert file.read(columns=["narrow"]).column("narrow").to_pylist() == list(range(2_000))
        assert objects.fetched < sink.getvalue().size // 3


def test_an_object_that_is_gone_says_so_through_arrow() -> None:
    with BlockingPortal() as portal, pytest.raises(MissingError):
        pq.ParquetFile(ObjectFile(portal, MemoryObjects(SystemClock()), "k", 1_000))
