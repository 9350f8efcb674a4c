"""`tidemill pipeline check`: the problems of a pipeline file, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.context import ConfigOption, open_stores
from tidemill.cli.output.output import TABLE, Output


def check(
    file: Annotated[Path, typer.Argument(help="The pipeline's Python file.")],
    name: Annotated[str, typer.Option("--name", help="Pipeline name. Default: the file's name.")] = "",
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

    found = check_file(file, name or file.stem, None if cluster else reads)
    if cluster:
        with open_stores(config) as opened:
            opened.portal.call(check_cluster(found, opened.catalogue, opened.consensus, reads))
    tables = sorted({*found.tables, *found.derived_tables})
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
