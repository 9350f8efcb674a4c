"""Examples of a page: its code blocks, and shell and Python lines run as a reader of the page would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def section(page: Path, title: str) -> str:
    """Return the text below a heading of the second level, up to the next one."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    assert found, f"{page.name} has no section {title!r}"
    return found[1]


def blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, code) of each block; "" is the language of a shell."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_line(language: str, line: str, directory: Path, *, http: str, kafka: str) -> str:
    """Return the output of a line that runs next to the configuration, against a node with these addresses."""
    for shown, actual in (("127.0.0.1:8600", http), ("127.0.0.1:9092", kafka)):
        line = line.replace(shown, actual)
    if language == "python":
        command = [sys.executable, "-c", f"import tidemill\nprint({line})"]
    else:
        command = ["bash", "-euc", line]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path}
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{line}: {done.stdout} {done.stderr}"
    return done.stdout
