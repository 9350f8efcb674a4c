from __future__ import annotations

import pytest

from contracts.consensus import ConsensusContract, OpenClient
from tidemill.base.clock import SystemClock
from tidemill.consensus.api import Consensus
from tidemill.consensus.memory import MemoryConsensus, MemoryState


class TestMemory(ConsensusContract):
    @pytest.fixture
    def open_client(self) -> OpenClient:
        state = MemoryState()

        async def open_one() -> Consensus:
            return MemoryConsensus(SystemClock(), state)

        return open_one
