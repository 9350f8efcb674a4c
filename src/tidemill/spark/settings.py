"""Settings with which the process of one pipeline driver is started, the URLs of its stores, and the names of its
environment variables. Every user of the machine can read a command line, but not an environment.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.base.limits import FRESHNESS_BUDGET_MS

OBJECTS_VARIABLE = "TIDEMILL_OBJECTS__URL"
CONSENSUS_VARIABLE = "TIDEMILL_CONSENSUS__URL"
"""Names that the configuration itself reads."""

CONF_VARIABLE = "TIDEMILL_DRIVER_CONF"
"""Spark settings of a driver as a JSON object. They are not on the command line because some are secrets."""


class StoreUrls(msgspec.Struct, frozen=True):
    """URLs of the two durable stores. An empty one is read from the environment: workers receive secrets only there."""

    objects: str
    consensus: str

    def resolve(self) -> StoreUrls:
        """Fill in empty URLs from the environment. Raises InvalidError if a variable is not set."""
        return StoreUrls(resolve_url(self.objects, OBJECTS_VARIABLE), resolve_url(self.consensus, CONSENSUS_VARIABLE))


IN_ENVIRONMENT = StoreUrls("", "")


def resolve_url(url: str, variable: str) -> str:
    """Return the URL, from the environment if it is empty. Raises InvalidError if the variable is not set."""
    found = url or os.environ.get(variable, "")
    if not found:
        raise InvalidError(f"no URL of a store: variable={variable}.", fix="Set it to the URL in tidemill.toml.")
    return found


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
