"""`./dev setup` in a small clone, without downloads: the lock file is empty, and the package has one module."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = Path(sys.base_prefix) / "bin"
NAME = f"python{sys.version_info.major}.{sys.version_info.minor}"
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tidemill"
version = "1"
"""
BACKEND = '''
"""Build wheels as hatchling does, which would have to be downloaded."""
import os, zipfile

def build(directory, files):
    files |= {
        "tidemill-1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: tidemill\\nVersion: 1\\n",
        "tidemill-1.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    record = "".join(f"{name},,\\n" for name in [*files, "tidemill-1.dist-info/RECORD"])
    with zipfile.ZipFile(f"{directory}/tidemill-1-py3-none-any.whl", "w") as wheel:
        for name, text in (files | {"tidemill-1.dist-info/RECORD": record}).items():
            wheel.writestr(name, text)
    return "tidemill-1-py3-none-any.whl"

def build_editable(directory, settings=None, metadata=None):
    return build(directory, {"_editable_impl_tidemill.pth": os.getcwd() + "/src"})

def build_wheel(directory, settings=None, metadata=None):
    return build(directory, {"tidemill/__init__.py": ""})
'''
FAKE = """#!/bin/sh
case $1 in
    --version) echo "Python {version}" ;;
    -c) exec {real} -c 'import sys; sys.version_info = ({minor}); exec(sys.argv[1])' "$2" ;;
    *) exit 9 ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return make_clone(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with a finished set-up. Each test leaves it like that."""
    clone = make_clone(tmp_path_factory.mktemp("finished"))
    set_up(clone)
    return clone


def make_clone(directory: Path) -> Path:
    clone = directory / "clone"
    (clone / "src" / "tidemill").mkdir(parents=True)
    (clone / "src" / "tidemill" / "__init__.py").touch()
    shutil.copy(ROOT / "dev", clone)
    (clone / "requirements.lock").touch()
    (clone / "pyproject.toml").write_text(PROJECT)
    (clone / "backend.py").write_text(BACKEND)
    return clone


def run_dev(
    clone: Path, path: str = f"{PYTHONS}:/usr/bin:/bin", verb: str = "setup"
) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": path, "HOME": str(clone), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHONUTF8": "0"}
    return subprocess.run([clone / "dev", verb], env=environ, capture_output=True, text=True, timeout=300)


def set_up(clone: Path) -> None:
    """Run `./dev setup`, and check that programs of the environment import tidemill from the clone."""
    done = run_dev(clone)
    assert done.returncode == 0, done.stderr
    assert imported_file(clone) == clone / "src" / "tidemill" / "__init__.py"


def imported_file(clone: Path) -> Path:
    command = [clone / ".venv" / "bin" / "python", "-Ic", "import tidemill; print(tidemill.__file__)"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def test_a_set_up_that_ended_before_the_environment_had_pip_is_repeated(clone: Path) -> None:
    subprocess.run([PYTHONS / NAME, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    set_up(clone)


def test_a_python_without_ensurepip_is_named_with_its_package(clone: Path) -> None:
    python = clone / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\ncase "$*" in *ensurepip* | *venv*) exit 1 ;; esac\nexec {PYTHONS / NAME} "$@"\n')
    python.chmod(0o755)
    done = run_dev(clone, f"{python.parent}:/usr/bin:/bin")
    assert done.returncode == 2
    assert done.stderr.endswith(f"dev: {python} has no ensurepip: install python3-venv (Debian, Ubuntu)\n")
    assert not (clone / ".venv").exists()


def test_a_finished_set_up_is_not_repeated_not_even_through_a_symbolic_link(finished: Path) -> None:
    link = finished.with_name("link")
    link.symlink_to(finished)
    for path in (finished, link):
        done = run_dev(path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_tools_read_utf_8_in_every_locale(finished: Path) -> None:
    (finished / "sim.py").write_text("import sys; print(sys.flags.utf8_mode)")
    done = run_dev(finished, verb="sim")
    assert done.stdout == "1\n", done.stderr


def test_another_installation_in_the_environment_is_replaced_by_the_clone(finished: Path) -> None:
    install = [finished / ".venv/bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", finished]
    subprocess.run(install, check=True)
    assert not imported_file(finished).is_relative_to(finished / "src")
    set_up(finished)


def test_a_copied_or_moved_clone_runs_its_own_code(finished: Path) -> None:
    copy = finished.with_name("copy")
    shutil.copytree(finished, copy, symlinks=True)
    assert imported_file(copy).is_relative_to(finished)
    set_up(copy)
    moved = copy.rename(finished.with_name("moved"))
    set_up(moved)


def test_an_environment_whose_python_was_removed_is_created_again(finished: Path) -> None:
    for python in (finished / ".venv" / "bin").glob("python*"):
        python.unlink()
        python.symlink_to(finished / "removed")
    set_up(finished)


@pytest.mark.parametrize(
    ("available", "chosen"),
    [
        ({"python3": "3.14.2", "python3.11": "3.11.7"}, "3.14.2"),
        ({"python3": "3.15.0", "python3.11": "3.11.7", "python3.13": "3.13.9"}, "3.13.9"),
        ({"python3": "3.9.2", "python3.12": "3.12.1"}, "3.12.1"),
        ({"python3": "3.15.0"}, "3.15.0"),
        ({"python3": "3.9.2"}, ""),
    ],
    ids=str,
)
def test_a_python_for_which_every_locked_package_has_a_wheel_is_preferred(
    clone: Path, available: dict[str, str], chosen: str
) -> None:
    programs = clone / "bin"
    programs.mkdir()
    for tool in ("dirname", "cmp"):
        (programs / tool).symlink_to(str(shutil.which(tool)))
    for name, version in available.items():
        fake = FAKE.format(version=version, minor=version.replace(".", ", "), real=PYTHONS / NAME)
        (programs / name).write_text(fake)
        (programs / name).chmod(0o755)
    done = run_dev(clone, str(programs))
    if chosen:
        assert f"dev: setting up: Python {chosen} in .venv" in done.stderr
        assert ("have no wheel" in done.stderr) is (chosen == "3.15.0"), done.stderr
    else:
        assert done.returncode == 2 and "needs Python 3.11 or newer" in done.stderr
