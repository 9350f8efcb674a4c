"""Dockerfiles as stages of instructions, and their replay on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

OWN_VARIABLES = ("PYTHON", "TIDEMILL", "VIRTUAL_ENV")


class StepError(Exception):
    """A RUN ended with another exit code than 0."""


@dataclass
class Stage:
    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    """(instruction, its text with continuation lines joined)."""


def parse(text: str) -> tuple[dict[str, str], list[Stage]]:
    """Return ({argument: default} before the first stage, the stages in order)."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if not line.strip():
            continue
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name))
        elif not stages:
            assert word == "ARG", line
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            stages[-1].steps.append((word, rest))
    return arguments, stages


def lineage(stages: list[Stage], name: str) -> list[Stage]:
    """Return the stages that `name` is built on, the first one first, and itself."""
    by_name = {stage.name: stage for stage in stages}
    found = [by_name[name]]
    while found[0].base in by_name:
        found.insert(0, by_name[found[0].base])
    return found


def replay(stages: list[Stage], context: Path, root: Path, path: str) -> None:
    """Run COPY and RUN of `stages` with `root` as the root directory of the image, and `path` as its PATH.

    Raises StepError if a RUN fails.
    """
    directory = root
    # Settings of this machine's network stay, those of this Python and of tidemill do not.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
    environment |= {"PATH": path, "HOME": str(root)}
    for word, rest in [step for stage in stages for step in stage.steps]:
        if word == "WORKDIR":
            directory = root / rest.lstrip("/")
            directory.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if (context / source).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(context / source, directory / target, ignore=ignored)
                else:
                    shutil.copy(context / source, directory / target)
        elif word == "RUN":
            command = re.sub(r"(?<![\w.])/(?=(?:opt|wheels)\b)", f"{root}/", rest)
            done = subprocess.run(
                ["sh", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, timeout=900
            )
            if done.returncode:
                raise StepError(f"exit code {done.returncode}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        else:
            raise AssertionError(f"not replayed: {word} {rest}")
