"""URLs of the stores and where they come from, and the settings with which the process of a pipeline driver is started.
Every user of the machine can read a command line, but not an environment.

The cluster that a reader refers to is looked up here; the most specific source wins:

    1  options objects and consensus                       each separately, as given
    2  option config                                       the URLs of that file
    3  the URLs given to `register`
    4  TIDEMILL_OBJECTS__URL and TIDEMILL_CONSENSUS__URL   set by a driver for its workers
    5  TIDEMILL_CONFIG, else ./tidemill.toml               overridden by TIDEMILL_<SECTION>__<KEY>, as for every command

A URL from a file or the environment is no option of the query, so neither Spark's plan nor its event log contains it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.base.limits import DEAD_LETTERS_KEEP_MS, FRESHNESS_BUDGET_MS, PIPELINE_FRESHNESS_MS
from tidemill.base.runtime.private_directories import is_present
from tidemill.consensus.factory import sqlite_path_of_url

OBJECTS_VARIABLE = "TIDEMILL_OBJECTS__URL"
CONSENSUS_VARIABLE = "TIDEMILL_CONSENSUS__URL"
"""Names that the configuration itself reads."""

CONF_VARIABLE = "TIDEMILL_DRIVER_CONF"
"""Spark settings of a driver as a JSON object. They are not on the command line because some are secrets."""

NO_CLUSTER_FIX = (
    "Set config=/path/of/tidemill.toml, or start with TIDEMILL_CONFIG set, or in the directory of that file."
)


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


def find_cluster(
    objects: str = "",
    consensus: str = "",
    config: str = "",
    registered: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> StoreUrls:
    """Return the URLs of the cluster that a reader refers to. Raises InvalidError if a file is invalid, or no cluster
    exists there: a read never creates one."""
    env = os.environ if environ is None else environ
    if not (objects and consensus):
        found = _configured_urls(config, registered or {}, env)
        objects, consensus = objects or found.objects, consensus or found.consensus
    if not (objects and consensus):
        raise InvalidError("objects or consensus is missing: both are needed.", fix=NO_CLUSTER_FIX)
    file = sqlite_path_of_url(consensus)
    if file is not None and not is_present(file):
        raise InvalidError(
            f"there is no cluster here: consensus={consensus} directory={Path.cwd()}.", fix=NO_CLUSTER_FIX
        )
    return StoreUrls(objects, consensus)


def _configured_urls(config: str, registered: Mapping[str, str], env: Mapping[str, str]) -> StoreUrls:
    variables = (OBJECTS_VARIABLE, CONSENSUS_VARIABLE)
    if registered and not config:
        return StoreUrls(registered.get("objects", ""), registered.get("consensus", ""))
    if all(env.get(name) for name in variables) and not config:
        return StoreUrls(*(env[name] for name in variables))
    from tidemill.base.config.config import load

    if config:
        env = {name: value for name, value in env.items() if name not in variables}
    found = load(Path(config).expanduser() if config else None, environ=env)
    return StoreUrls(found.objects_url, found.consensus_url)


class DriverSettings(msgspec.Struct, frozen=True):
    """Settings of one driver.

    `instance` distinguishes drivers of the same pipeline; `conf` are Spark settings that override the defaults.
    `domains` of the metastore as configured, 0 = the cluster's number. `budget_ms`: the time that a stage may stand
    below its target, without `freshness_ms`, for which the feeds gather records (feed.py). `dead_letters_ms`: the age
    at which a dead letter expires, 0 = never.
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
    freshness_ms: int = PIPELINE_FRESHNESS_MS
    dead_letters_ms: int = DEAD_LETTERS_KEEP_MS

    @property
    def process(self) -> str:
        """Name of the process under which the pipeline reports."""
        return ":".join(part for part in ("pipeline", self.name, self.instance) if part)
