from __future__ import annotations

import pytest

from contracts.consensus import ConsensusContract, OpenClient
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.api import Consensus
from tidemill.consensus.open import open_consensus

pytestmark = pytest.mark.postgres


class TestPostgres(ConsensusContract):
    @pytest.fixture
    def open_client(self, postgres_dsn: str) -> OpenClient:
        async def open_one() -> Consensus:
            return await open_consensus(postgres_dsn, SystemClock(), Rand())

        return open_one
