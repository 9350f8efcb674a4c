"""`tidemill pipeline check`: the problems of a pipeline file, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.base.config.config import find_file, load
from tidemill.base.errors import InvalidError
from tidemill.cli.context import ConfigOption, open_stores
from tidemill.cli.output.output import TABLE, Output


def check(
    file: Annotated[Path, typer.Argument(help="The pipeline's Python file.")],
    name: Annotated[
        str, typer.Option("--name", help="Pipeline name. Default: that of tidemill.toml, or the file's name.")
    ] = "",
    reads: Annotated[
        list[str], typer.Option("--reads", help="A table of another pipeline that this one reads; repeatable.")
    ] = [],  # noqa: B006
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Also check topics, captured tables and inputs on the cluster.")
    ] = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Check a pipeline file: it imports, and its declarations, schemas, keys, names and inputs are valid.

    The file and its `build` run in this process. Spark and Java are not needed, and no cluster unless --cluster is
    given. Exits with 1 if there is a problem.
    """
    from tidemill.spark.check import check_cluster, check_file

    found = check_file(file, name or _configured_name(config, file) or file.stem, None if cluster else reads)
    if cluster:
        with open_stores(config) as opened:
            opened.portal.call(check_cluster(found, opened.catalogue, opened.consensus, reads))
    tables = sorted(found.all_tables)
    if out.is_text:
        for problem in found.problems:
            print(f"{file}: {problem}")
        if not found.problems:
            print(f"{file}: pipeline {found.name} is valid: {', '.join(tables)}")
    else:
        problems = [{"line": p.line, "problem": p.message, "fix": p.fix} for p in found.problems]
        answer = {"file": str(file), "pipeline": found.name, "tables": tables, "problems": problems}
        out.rows(problems, value=answer)
    if found.problems:
        raise typer.Exit(1)


def _configured_name(config: Path | None, file: Path) -> str:
    """Return the only pipeline of the configuration with this file; "" without one, and without a valid configuration:
    a check of a file alone needs none, for example where the variables with its secrets are not set."""
    try:
        sections = load(config).pipeline if find_file(config) is not None else {}
    except InvalidError:
        return ""
    names = [name for name, section in sections.items() if Path(section.file).resolve() == file.resolve()]
    return names[0] if len(names) == 1 else ""
