from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys

import pytest

from tidemill.base.runtime import file_descriptors
from tidemill.base.runtime.file_descriptors import (
    OWN_DESCRIPTORS,
    RESERVE_DESCRIPTORS,
    DescriptorReserve,
    shares_of_limit,
)


@pytest.mark.parametrize("limit", [256, 1024, 4096, 65_536])
def test_the_shares_leave_what_the_process_needs_for_itself(limit: int) -> None:
    found = shares_of_limit(limit)
    if limit > OWN_DESCRIPTORS + RESERVE_DESCRIPTORS + 64:
        assert found.kafka + found.http + found.sequencer <= limit - OWN_DESCRIPTORS - RESERVE_DESCRIPTORS
    assert min(found.kafka, found.http, found.sequencer) >= 8


def test_the_limit_is_raised_to_the_hard_one_and_shown() -> None:
    code = (
        "import resource; from tidemill.base.runtime import file_descriptors as descriptors;"
        " resource.setrlimit(resource.RLIMIT_NOFILE, (128, 900)); found = descriptors.raise_limit();"
        " facts = descriptors.descriptor_facts();"
        " print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], found.limit, facts['limit'], facts['open'] > 0)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["900", "900", "900", "True"]


def test_a_reserve_is_to_be_had_when_nothing_else_is() -> None:
    reserve = DescriptorReserve(4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    hoard: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 10, hard))
    try:
        with contextlib.suppress(OSError):
            while len(hoard) < 100:
                hoard.append(os.open(os.devnull, os.O_RDONLY))
        assert len(hoard) < 100
        with reserve.released():
            for fd in [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]:
                os.close(fd)
        assert len(reserve) == 4
        with reserve.released():
            hoard += [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
        assert len(reserve) == 1
        os.close(hoard.pop())
        reserve.fill()
        assert len(reserve) == 2
    finally:
        for fd in hoard:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        reserve.close()
    assert file_descriptors.open_count() > 0
