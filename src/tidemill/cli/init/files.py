"""Texts of the files of a new cluster. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

from tidemill.base.config.environment import ENV_FILE, env_line
from tidemill.cli.init.plan import Plan

CONFIG_FILE = "tidemill.toml"
PIPELINE_FILE = "pipeline.py"
PAGE_DIRECTORY = "app"
PRIVATE = {ENV_FILE}
"""Files that only their owner may read."""

_CONFIG = """\
# The cluster in this directory. Variables come from the environment, or from .env next to this file.

[node]
data = ".tidemill"            # logs, scratch, and the stores as long as [objects] and [consensus] are not set
http = "127.0.0.1:8600"       # the page of the cluster, and live tables
kafka = "127.0.0.1:9092"      # Kafka clients

# [objects]
# url = "s3://bucket/prefix?region=eu-central-1"
# [consensus]
# url = "postgresql://…"      # for nodes on several machines

# One PostgreSQL database. Its slot and publication are named tidemill_{capture}.
[capture.{capture}]
dsn = "${{{variable}}}"
tables = {patterns}  # with * and ?; "!public.audit_*" excludes
{others}
# Tables that the file declares.
[pipeline.{capture}]
file = "{pipeline}"

# Pages of the node, here at /app/.
[http.pages]
app = "{page}"
"""

_PIPELINE = '''\
"""Tables of the pipeline {capture}.

After a change: `tidemill pipeline check {file}`, then `tidemill pipeline restart {capture}`.
"""

from tidemill.spark import Pipeline


def build(p: Pipeline) -> None:
    database = p.capture("{capture}")
{tables}

    # Computed from other tables whenever they change: each parameter after spark is a table.
    @p.derived({grouping})
    def {name}(spark, {table}):
        return {expression}
'''

_IGNORED = """\
.env
.tidemill/
.venv/
__pycache__/
"""


def file_texts(plan: Plan, dsn: str) -> dict[str, str]:
    """Return the text of each file by its path in the directory."""
    page = files("tidemill.cli.init").joinpath("page.html").read_text(encoding="utf-8")
    return {
        CONFIG_FILE: _CONFIG.format(
            capture=plan.capture,
            variable=plan.variable,
            patterns=_patterns_text(plan.patterns),
            others=_other_schemas_text(plan),
            pipeline=PIPELINE_FILE,
            page=PAGE_DIRECTORY,
        ),
        PIPELINE_FILE: _pipeline_text(plan),
        ENV_FILE: env_line(plan.variable, dsn) + "\n",
        f"{ENV_FILE}.example": f"{plan.variable}=postgresql://USER:PASSWORD@HOST:5432/DATABASE\n",
        ".gitignore": _IGNORED,
        f"{PAGE_DIRECTORY}/index.html": page.replace("{{TABLE}}", _script_text(plan.shown.source)),
    }


def _pipeline_text(plan: Plan) -> str:
    lines = [f"    p.table({_text(table.name)}, database.table({_text(table.source)}))" for table in plan.tables]
    column, table = plan.count.column, plan.count.table.name
    rows = f'{table}.dropna(subset=["{column}"])' if column else f"{table}.selectExpr(\"'{table}' AS name\")"
    return _PIPELINE.format(
        file=PIPELINE_FILE,
        capture=plan.capture,
        tables="\n".join(lines),
        table=table,
        grouping=f'key="{column}", by="{column}"' if column else 'key="name"',
        name=plan.count.name,
        expression=f'{rows}.groupBy("{column or "name"}").count()',
    )


def _patterns_text(patterns: Sequence[str]) -> str:
    return json.dumps(list(patterns), ensure_ascii=False)


def _other_schemas_text(plan: Plan) -> str:
    """Return a comment with the line that also captures the other schemas, "" if every schema is captured."""
    if not plan.other_schemas:
        return ""
    everything = _patterns_text([*plan.patterns, *(f"{schema}.*" for schema in plan.other_schemas)])
    return f"""\
# Other schemas have tables, too. To capture them, replace the line, and add their tables to {PIPELINE_FILE}:
# tables = {everything}
"""


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _script_text(value: str) -> str:
    """Return a text literal for a script inside HTML."""
    return _text(value).replace("<", "\\u003c")
