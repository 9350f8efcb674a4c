"""The end of a process directly after calls to a bucket: the bucket library's threads have left the interpreter."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.waiting import until
from tidemill.base.clock import Rand
from tidemill.base.errors import UnavailableError
from tidemill.objects.buckets import pending_calls
from tidemill.objects.buckets.pending_calls import count_pending_calls
from tidemill.objects.buckets.s3 import S3Objects

CONFIG = {"endpoint": "http://127.0.0.1:1", "region": "us-east-1", "access_key_id": "x", "secret_access_key": "y"}
PROCESSES = 16
SCRIPT = f"""
import asyncio
from tidemill.base.clock import Rand
from tidemill.objects.buckets.s3 import S3Objects

async def main():
    store = S3Objects("none", "", {CONFIG}, Rand())
    found = await asyncio.gather(*(store.get("key") for _ in range(4)), return_exceptions=True)
    assert all(isinstance(each, Exception) for each in found)

asyncio.run(main())
"""


@pytest.fixture
def _own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the calls of this test alone: errors that other tests hold may hold their calls, too."""
    monkeypatch.setattr(pending_calls, "_pending", weakref.WeakSet())


def test_a_process_that_ends_with_a_call_to_a_bucket_exits_with_its_own_code() -> None:
    """Two of five such processes abort if the interpreter ends without a wait."""

    def exit_code(_: int) -> int:
        return subprocess.run([sys.executable, "-c", SCRIPT], check=False).returncode

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(exit_code, range(PROCESSES))) == [0] * PROCESSES


@pytest.mark.usefixtures("_own_calls")
async def test_calls_are_pending_until_the_library_has_finished_with_them_also_after_a_cancellation() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = S3Objects("none", "", {**CONFIG, "endpoint": endpoint}, Rand())
        calls = [asyncio.ensure_future(store.get("key")) for _ in range(4)]
        await until(lambda: count_pending_calls() == 4)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: count_pending_calls() == 0)


@pytest.mark.usefixtures("_own_calls")
async def test_a_failed_put_is_not_pending_while_its_error_is_held() -> None:
    store = S3Objects("none", "", CONFIG, Rand())
    gc.disable()  # a cycle would end only with a collection
    try:
        with pytest.raises(UnavailableError) as held:
            await store.put("key", b"value")
        await until(lambda: count_pending_calls() == 0)
        assert held.value.__cause__ is not None
    finally:
        gc.enable()
