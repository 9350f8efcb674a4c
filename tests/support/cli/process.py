"""Run a command line of tidemill in this process, in a given directory, with the exit code of a real process."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tidemill.cli.main import app, run_application


@dataclass(frozen=True)
class Done:
    exit_code: int
    output: str
    errors: str


def run_tidemill(line: str, *, cwd: Path, environ: Mapping[str, str] = {}) -> Done:
    """Run one command line. The environment has no TIDEMILL_ variable but those of `environ`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n", write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, {**clean, **environ}, clear=True),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            run_application(lambda: app(shlex.split(line), prog_name="tidemill"))
            code = 0
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
    return Done(code, *(stream.buffer.getvalue().decode() for stream in (output, errors)))  # type: ignore[attr-defined]
