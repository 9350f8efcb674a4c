"""SPARK_HOME whose workers import pyspark from the installed package instead of from its zip.

Spark puts `python/lib/pyspark.zip` first on every worker's path. Python never caches the bytecode of modules in a zip,
so each worker process compiles pyspark again: 2.1 against 0.75 CPU-seconds per start (measured), enough on a busy
machine to exceed the ten seconds that Spark waits for a worker. Here directories with links to the installed packages
have the names of the two zips; everything else is linked unchanged.

    <cache>/spark-home-…/bin, jars, … → the pyspark package
                         python/lib/pyspark.zip/pyspark → the pyspark package
                         python/lib/py4j-…-src.zip/py4j → the py4j package
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

from tidemill.spark.session.java import cache_dir


def ensure_spark_home(environ: Mapping[str, str] | None = None) -> str:
    """Return the SPARK_HOME to use: the environment's if it is set, else ours; "" if ours cannot be created."""
    env = os.environ if environ is None else environ
    if env.get("SPARK_HOME"):
        return env["SPARK_HOME"]
    import py4j
    import pyspark

    packages = {"pyspark": Path(pyspark.__file__).parent, "py4j": Path(py4j.__file__).parent}
    zips = {
        path.name: name for name in packages for path in (packages["pyspark"] / "python" / "lib").glob(f"{name}*.zip")
    }
    if len(zips) != len(packages):
        return ""
    identity = zlib.crc32("\n".join(f"{n} {p}" for n, p in sorted(packages.items())).encode())
    home = cache_dir(env) / f"spark-home-{pyspark.__version__}-{identity:08x}"
    if home.is_dir():
        return str(home)
    fresh = home.with_name(f"{home.name}.{os.getpid()}")
    try:
        for entry in packages["pyspark"].iterdir():
            if entry.name != "python" and entry.is_dir():
                fresh.mkdir(parents=True, exist_ok=True)
                (fresh / entry.name).symlink_to(entry)
        for file, name in zips.items():
            place = fresh / "python" / "lib" / file
            place.mkdir(parents=True)
            (place / name).symlink_to(packages[name])
        fresh.rename(home)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        # Another process may have been first; otherwise workers start slowly, which is no reason to fail.
        return str(home) if home.is_dir() else ""
    return str(home)
