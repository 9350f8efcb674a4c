"""`./dev quickstart`: the pages for new users, from the wheel on, in an empty environment and a bare directory.

    wheel ─► docs/start, block by block: empty environment, pip install, PostgreSQL, node, Chromium, the user's Spark

Prints every command with its output and its time, and at the end the number of commands and the minutes. Fails at the
first output that is not the one shown. `--python PROGRAM` is the interpreter of the environment. If uv is in the
development environment, it installs instead of pip, several times faster; `--pip` uses pip all the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.docs.blocks import PAGES, START, blocks_of
from support.docs.walk import Walk, clean_environ
from support.postgres import EmbeddedPostgres

ROOT = Path(__file__).parents[2]


def build_wheel(directory: Path) -> Path:
    """Build the wheel of this checkout, and return it."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = directory.glob("tidemill-*.whl")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--pip", action="store_true", help="install with pip, even if uv is available")
    asked = parser.parse_args()
    uv = None if asked.pip else shutil.which("uv", path=str(Path(sys.executable).parent))
    programs = (
        {"python3 -m venv": f"{uv} venv --quiet --python python3", "pip install": f"{uv} pip install"} if uv else {}
    )
    with tempfile.TemporaryDirectory(prefix="tidemill-quickstart-") as name:
        directory = Path(name)
        directory.chmod(0o755)  # PostgreSQL runs as another user
        wheel = build_wheel(directory / "dist")
        print(f"built {wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)
        (directory / "bin").mkdir()
        (directory / "bin" / "python3").symlink_to(Path(asked.python).resolve())
        links = " ".join([str(wheel.parent), *os.environ.get("PIP_FIND_LINKS", "").split()])
        environ = clean_environ(PIP_FIND_LINKS=links, UV_FIND_LINKS=links.replace(" ", ","))
        environ["PATH"] = f"{directory / 'bin'}:{environ['PATH']}"
        with (
            EmbeddedPostgres(directory / "postgres") as server,
            Walk(directory, server, environ, lambda text: print(text, flush=True), programs if uv else {}) as walk,
        ):
            began_s = time.monotonic()
            for page in PAGES:
                for block in blocks_of(START / f"{page}.md"):
                    if not block.not_run:
                        walk.run(block)
            print(f"{walk.commands} commands, {(time.monotonic() - began_s) / 60:.1f} minutes, outputs as shown")


if __name__ == "__main__":
    main()
