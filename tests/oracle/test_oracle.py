"""Random schemas, clauses, transactions and changes of descriptions against real servers, with SIGKILL at random
points.

`./dev bench oracle` runs the same without a limit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle_world import Plan, world

pytestmark = [pytest.mark.postgres, pytest.mark.node]


def test_every_client_and_topic_of_a_random_world_ends_equal_to_select(postgres_dsn: str, tmp_path: Path) -> None:
    with world(Plan(seed=1, rounds=1, round_s=4.0), postgres_dsn, tmp_path) as made:
        made.run()
        assert made.faults and made.judge.counts["views"] and made.judge.counts["topics"]
