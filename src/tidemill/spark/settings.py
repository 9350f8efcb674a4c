"""Settings of one driver of a pipeline, as its process is started with them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidemill.base.limits import FRESHNESS_BUDGET_MS
from tidemill.spark.stores import Urls


class DriverSettings(msgspec.Struct, frozen=True):
    """`instance` tells identical drivers apart; `conf` are Spark settings that win over ours.

    `domains` of the metastore as configured, 0 = as the cluster has.
    """

    name: str
    file: Path
    urls: Urls
    master: str
    scratch: Path
    instance: str = ""
    driver_memory: str = "1g"
    conf: dict[str, str] = {}
    domains: int = 0
    budget_ms: int = FRESHNESS_BUDGET_MS

    @property
    def process(self) -> str:
        """Under which the pipeline reports."""
        return ":".join(part for part in ("pipeline", self.name, self.instance) if part)
