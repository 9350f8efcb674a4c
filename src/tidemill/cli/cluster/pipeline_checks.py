"""Checks of pipelines for `tidemill doctor`: the file, its import, its declarations, and its inputs on the cluster."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.base.config.config import Config
from tidemill.base.errors import MissingError, TidemillError
from tidemill.base.runtime.private_directories import is_present
from tidemill.cli.cluster.check_results import Result, failed, passed
from tidemill.cli.context import open_stores

if TYPE_CHECKING:
    from tidemill.spark.check import CheckedPipeline


def check_pipelines(config: Config, path: Path | None) -> list[Result]:
    """Return one result for each pipeline, or one for each of its problems."""
    checked = {name: _check_file(name, section.file) for name, section in config.pipeline.items()}
    remark = _check_inputs(checked, config, path) if checked else ""
    return [result for name, found in checked.items() for result in _results(name, found, remark)]


def any_uses_spark(config: Config) -> bool:
    """Return whether a pipeline uses Spark, or may: its file has problems."""
    for name, section in config.pipeline.items():
        found = _check_file(name, section.file)
        if found.problems or found.uses_spark(section.spark.master or config.spark.master):
            return True
    return False


def _check_file(name: str, file: str) -> CheckedPipeline:
    from tidemill.spark.check import check_file

    with contextlib.redirect_stdout(sys.stderr):  # what the file prints is not part of the answer
        return check_file(Path(file), name, None)


def _check_inputs(checked: dict[str, CheckedPipeline], config: Config, path: Path | None) -> str:
    """Add the problems of the inputs, on the cluster if there is one. Return why they were not looked up there."""
    from tidemill.objects.factory import local_directory
    from tidemill.spark.check import check_cluster

    declared = {table for found in checked.values() for table in found.all_tables}
    directory = local_directory(config.objects_url)
    try:
        if directory is not None and not is_present(Path(directory)):
            raise MissingError("there is no cluster yet.")
        with open_stores(path) as opened:
            for found in checked.values():
                checking = check_cluster(found, opened.catalogue, opened.consensus, declared, config.capture)
                opened.portal.call(checking)
    except TidemillError as error:
        for found in checked.values():
            found.check_inputs(declared)
        missing = isinstance(error, MissingError)
        return "there is no cluster yet" if missing else "the stores do not answer"
    return ""


def _results(name: str, found: CheckedPipeline, remark: str) -> list[Result]:
    key = f"pipeline.{name}"
    problems = [
        TidemillError(f"line {p.line}: {p.message}" if p.line else p.message, fix=p.fix) for p in found.problems
    ]
    if problems:
        return [failed(key, problem) for problem in problems]
    tables = ", ".join(sorted(found.all_tables)) or "no table"
    unseen = f"; topics and captured tables were not looked up: {remark}" if remark else ""
    return [passed(key, f"valid: {tables}{unseen}")]
