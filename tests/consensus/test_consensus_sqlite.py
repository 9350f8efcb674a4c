from __future__ import annotations

from pathlib import Path

import pytest

from contracts.consensus import ConsensusContract, OpenClient
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.api import Consensus
from tidemill.consensus.factory import open_consensus


class TestSqlite(ConsensusContract):
    @pytest.fixture
    def open_client(self, tmp_path: Path) -> OpenClient:
        async def open_one() -> Consensus:
            return await open_consensus(f"sqlite://{tmp_path}/consensus.db", SystemClock(), Rand())

        return open_one
