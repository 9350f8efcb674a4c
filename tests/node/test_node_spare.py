"""A process without free descriptors reports it, using a few that it keeps in reserve."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tidemill.node.descriptor_reserve import RESERVE_SIZE, DescriptorReserve


@contextmanager
def exhausted() -> Iterator[None]:
    """Use up all descriptors below the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    least = min(set(range(max(used) + 2)) - used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    held: list[int] = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_f616_a_process_without_a_free_descriptor_says_so_and_can_still_open_some() -> None:
    spare = DescriptorReserve()
    spare.refill_and_probe()
    assert spare.trouble() == ""
    with exhausted():
        spare.refill_and_probe()
        said = spare.trouble()
        assert "No file descriptor is left in this process (EMFILE): pid=" in said
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(RESERVE_SIZE)]
        spare.refill_and_probe()
        assert spare.trouble()
        for each in files:
            os.close(each)
        spare.refill_and_probe()
        assert spare.trouble(), "what it gave up itself is no descriptor to be had"
    spare.refill_and_probe()
    assert spare.trouble() == ""
    spare._reserve.close()
