"""Lookup of the cluster that a reader refers to: the most specific source wins.

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

from tidemill.base.errors import InvalidError
from tidemill.consensus.factory import sqlite_path_of_url
from tidemill.spark.settings import CONSENSUS_VARIABLE, OBJECTS_VARIABLE, StoreUrls

FIX = "Set config=/path/of/tidemill.toml, or start with TIDEMILL_CONFIG set, or in the directory of that file."


def find_cluster(
    objects: str = "",
    consensus: str = "",
    config: str = "",
    registered: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> StoreUrls:
    """Return the URLs. Raises InvalidError if a file is invalid, or no cluster exists there: a read never creates
    one."""
    env = os.environ if environ is None else environ
    if not (objects and consensus):
        found = _configured_urls(config, registered or {}, env)
        objects, consensus = objects or found.objects, consensus or found.consensus
    if not (objects and consensus):
        raise InvalidError("objects or consensus is missing: both are needed.", fix=FIX)
    file = sqlite_path_of_url(consensus)
    if file is not None and not file.exists():
        raise InvalidError(f"there is no cluster here: consensus={consensus} directory={Path.cwd()}.", fix=FIX)
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
