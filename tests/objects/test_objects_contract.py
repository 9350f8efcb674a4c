"""The contract of stores on memory, local and S3 (moto's server): used directly, and through `open_objects`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from contracts.objects import ObjectsContract, OpenStore
from support.objects.moto_access import CREDENTIALS
from tidemill.base.clock import Rand, SystemClock
from tidemill.objects import MemoryObjects, ObjectStore, open_objects
from tidemill.objects.local import LocalObjects


class TestMemory(ObjectsContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        @asynccontextmanager
        async def opened() -> AsyncIterator[ObjectStore]:
            yield MemoryObjects(SystemClock())

        return opened


class TestLocal(ObjectsContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        @asynccontextmanager
        async def opened() -> AsyncIterator[ObjectStore]:
            store = LocalObjects.open(tmp_path / "objects", SystemClock(), Rand())
            yield store
            await store.aclose()

        return opened


class TestLocalOpened(ObjectsContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        @asynccontextmanager
        async def opened() -> AsyncIterator[ObjectStore]:
            store = await open_objects(f"file://{tmp_path}/a/b", SystemClock(), Rand())
            yield store
            await store.aclose()

        return opened


class TestS3Bare(ObjectsContract):
    @pytest.fixture
    def open_store(self, s3_endpoint: str, new_bucket: Callable[[], str]) -> OpenStore:
        from tidemill.objects.factory import parse_s3
        from tidemill.objects.s3 import S3Objects

        @asynccontextmanager
        async def opened() -> AsyncIterator[ObjectStore]:
            bucket, prefix, config = parse_s3(f"s3://{new_bucket()}?endpoint={s3_endpoint}", CREDENTIALS)
            yield S3Objects(bucket, prefix, config, Rand())

        return opened


class TestS3Opened(ObjectsContract):
    @pytest.fixture
    def open_store(self, s3_endpoint: str, new_bucket: Callable[[], str]) -> OpenStore:
        @asynccontextmanager
        async def opened() -> AsyncIterator[ObjectStore]:
            url = f"s3://{new_bucket()}/some/prefix?endpoint={s3_endpoint}&region=us-east-1"
            store = await open_objects(url, SystemClock(), Rand(), env=CREDENTIALS)
            yield store
            await store.aclose()

        return opened
