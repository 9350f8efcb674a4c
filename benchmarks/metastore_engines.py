"""Tidemill's engine, RocksDB and SlateDB behind the same few calls, configured alike, on a local directory.

                     Tidemill                    RocksDB (rocksdict, raw mode)    SlateDB (slatedb.uniffi)
    own log          none                        WAL off                          WAL off
    write buffer     write_buffer_bytes          write_buffer_size                l0_sst_size_bytes
    block            8 KiB, LZ4                  8 KiB, LZ4                       8 KiB, LZ4
    filter           12 bits per key             12 bits per key                  12 bits per key
    block cache      cache_bytes (as decoded)    LRU                              Moka
    flush            fdatasync, directory fsync  fsync                            none (its local store never syncs)

Where the peers have a choice they get the faster one: RocksDB keeps indexes and filters outside its cache.
Loops are written once per engine, so that each pays only its own call.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

MIB = 1 << 20
Rows = tuple[Sequence[bytes], Sequence[bytes]]


class Engine(Protocol):
    async def open(self, folder: Path, buffer_bytes: int, cache_bytes: int) -> None: ...
    async def put_batch(self, keys: list[bytes], values: list[bytes]) -> None: ...
    async def put_each(self, keys: list[bytes], values: list[bytes]) -> None: ...
    async def get_each(self, keys: list[bytes]) -> list[bytes | None]: ...
    def scan(self) -> AsyncIterator[Rows]: ...
    async def walk(self) -> int:
        """A full scan that touches every row; bytes of all values."""
        ...

    async def prefix(self, prefix: bytes) -> Rows: ...
    async def flush(self) -> None: ...
    async def compact(self) -> None:
        """Everything into one sorted run. SlateDB's package has no such call: it waits for its compactor."""
        ...

    async def settle(self) -> None:
        """Wait until nothing more is merged in the background."""
        ...

    async def close(self) -> None: ...
    def facts(self) -> dict[str, Any]: ...


class Rocks:
    def __init__(self) -> None:
        self._db: Any = None

    async def open(self, folder: Path, buffer_bytes: int, cache_bytes: int) -> None:
        from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteOptions

        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(buffer_bytes)
        options.set_compression_type(DBCompressionType.lz4())
        options.set_target_file_size_base(16 * MIB)
        options.set_max_bytes_for_level_base(64 * MIB)
        table = BlockBasedOptions()
        table.set_block_size(8 << 10)
        table.set_bloom_filter(12, False)
        table.set_block_cache(Cache(cache_bytes))
        options.set_block_based_table_factory(table)
        self._db = Rdict(str(folder), options)
        write = WriteOptions()
        write.disable_wal = True
        self._db.set_write_options(write)

    async def put_batch(self, keys: list[bytes], values: list[bytes]) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        put = batch.put
        for key, value in zip(keys, values, strict=True):
            put(key, value)
        self._db.write(batch)

    async def put_each(self, keys: list[bytes], values: list[bytes]) -> None:
        put = self._db.put
        for key, value in zip(keys, values, strict=True):
            put(key, value)

    async def get_each(self, keys: list[bytes]) -> list[bytes | None]:
        get = self._db.get
        return [get(key) for key in keys]

    async def scan(self) -> AsyncIterator[Rows]:
        from itertools import islice

        rows = self._db.items()
        while chunk := list(islice(rows, 1000)):
            keys, values = zip(*chunk, strict=True)
            yield keys, values

    async def walk(self) -> int:
        total = 0
        for _, value in self._db.items():
            total += len(value)
        return total

    async def prefix(self, prefix: bytes) -> Rows:
        # An upper bound in ReadOptions takes longer to build than the whole scan: stop by hand.
        keys, values = [], []
        for key, value in self._db.items(from_key=prefix):
            if not key.startswith(prefix):
                break
            keys.append(key)
            values.append(value)
        return keys, values

    async def flush(self) -> None:
        self._db.flush()

    async def compact(self) -> None:
        self._db.compact_range(None, None)

    async def settle(self) -> None:
        names = ("rocksdb.num-running-compactions", "rocksdb.compaction-pending", "rocksdb.num-running-flushes")
        while any(self._db.property_int_value(name) for name in names):
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        self._db.close()

    def facts(self) -> dict[str, Any]:
        return {"files": len(self._db.live_files())}


class Slate:
    def __init__(self) -> None:
        self._db: Any = None

    async def open(self, folder: Path, buffer_bytes: int, cache_bytes: int) -> None:
        from slatedb import uniffi as slate

        folder.mkdir(exist_ok=True)
        self._store = slate.ObjectStore.resolve("file:///")
        self._path = str(folder).lstrip("/")  # it wants the directory here, not in the store's address
        settings = slate.Settings.default()
        for name, setting in {
            "wal_enabled": False,
            "l0_sst_size_bytes": buffer_bytes,
            "max_unflushed_bytes": max(4 * buffer_bytes, 64 * MIB),
            "compression_codec": "Lz4",
            # Its default interval of five seconds would stall the load.
            "compactor_options.poll_interval": "100ms",
            "compactor_options.worker.compactions_poll_interval": "100ms",
            "compactor_options.worker.compression_codec": "Lz4",
            "compactor_options.worker.max_sst_size": 16 * MIB,
        }.items():
            settings.set(name, json.dumps(setting))
        builder = slate.DbBuilder(self._path, self._store)
        builder.with_settings(settings)
        builder.with_sst_block_size(slate.SstBlockSize.BLOCK8_KIB)
        builder.with_filter_policies(
            [slate.FilterPolicy.bloom_with_options(slate.BloomFilterOptions(bits_per_key=12), None)]
        )
        cache = slate.MokaCacheOptions(max_capacity=cache_bytes, time_to_live=None, time_to_idle=None)
        builder.with_db_cache(slate.DbCache.new_moka_cache(cache), 1)
        self._slate = slate
        self._everything = slate.KeyRange(start=None, start_inclusive=False, end=None, end_inclusive=False)
        self._db = await builder.build()

    async def put_batch(self, keys: list[bytes], values: list[bytes]) -> None:
        batch = self._slate.WriteBatch()
        put = batch.put
        for key, value in zip(keys, values, strict=True):
            put(key, value)
        await self._db.write(batch)

    async def put_each(self, keys: list[bytes], values: list[bytes]) -> None:
        put = self._db.put
        for key, value in zip(keys, values, strict=True):
            await put(key, value)

    async def get_each(self, keys: list[bytes]) -> list[bytes | None]:
        get = self._db.get
        return [await get(key) for key in keys]

    async def scan(self) -> AsyncIterator[Rows]:
        rows = await self._db.scan(self._everything)
        while chunk := await rows.next_batch(500):
            yield [row.key for row in chunk], [row.value for row in chunk]

    async def walk(self) -> int:
        total = 0
        rows = await self._db.scan(self._everything)
        while chunk := await rows.next_batch(500):
            for row in chunk:
                total += len(row.value)
        return total

    async def prefix(self, prefix: bytes) -> Rows:
        rows = await self._db.scan_prefix(prefix, self._everything)
        chunk = await rows.next_batch(100)
        return [row.key for row in chunk], [row.value for row in chunk]

    async def flush(self) -> None:
        flush_type = self._slate.FlushType.MEM_TABLE
        await self._db.flush_with_options(self._slate.FlushOptions(flush_type=flush_type))

    async def compact(self) -> None:
        await self.settle()

    async def settle(self) -> None:
        admin = self._slate.AdminBuilder(self._path, self._store).build()
        before = None
        while True:
            manifest = await admin.read_manifest(None)
            state = (manifest.id, len(manifest.l0), len(manifest.compacted))
            if state == before:
                return
            before = state
            await asyncio.sleep(1.0)

    async def close(self) -> None:
        await self._db.shutdown()

    def facts(self) -> dict[str, Any]:
        return {}


def make(name: str) -> Engine:
    if name == "tidemill":
        from metastore_tidemill import Tidemill

        return Tidemill()
    return {"rocksdict": Rocks, "slatedb": Slate}[name]()


def directory_bytes(folder: Path) -> int:
    return sum(os.stat(os.path.join(where, name)).st_size for where, _, names in os.walk(folder) for name in names)
