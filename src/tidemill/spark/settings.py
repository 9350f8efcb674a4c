"""Settings with which the process of one pipeline driver is started."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidemill.base.limits import FRESHNESS_BUDGET_MS
from tidemill.spark.stores import StoreUrls


class DriverSettings(msgspec.Struct, frozen=True):
    """Settings of one driver.

    `instance` distinguishes drivers of the same pipeline; `conf` are Spark settings that override the defaults.
    `domains` of the metastore as configured, 0 = the cluster's number.
    """

    name: str
    file: Path
    urls: StoreUrls
    master: str
    scratch: Path
    instance: str = ""
    driver_memory: str = "1g"
    conf: dict[str, str] = {}
    domains: int = 0
    budget_ms: int = FRESHNESS_BUDGET_MS

    @property
    def process(self) -> str:
        """Name of the process under which the pipeline reports."""
        return ":".join(part for part in ("pipeline", self.name, self.instance) if part)
