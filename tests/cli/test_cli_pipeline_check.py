"""`tidemill pipeline check`: all problems of a file in one run, without Spark; with --cluster also those of the
cluster.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidemill.cli.context import open_stores
from tidemill.cli.main import app
from tidemill.metastore.catalogue import CapturedColumn, CaptureRow, CaptureTableRow, PipelineRow
from tidemill.spark.types import stream_schema

GOOD = """
def build(p):
    clicks = p.table("clicks", p.topic("clicks", key="id", schema="id: string, product bigint NOT NULL"))

    @p.derived(key="product", by={"clicks": "product"})
    def by_product(spark, clicks):
        raise RuntimeError("not called by a check")
"""
BAD = """
def build(p):
    p.table("clicks", p.topic("clicks", key="idd", schema="id string, product long"))
    p.table("or ders", p.capture("shop").table("orders"))
    p.table("names", p.topic("names", key="id", schema="id string, tags interval day"))
    p.table("clicks", "clicks")
    p.table("views", p.topic("views", key="id", schema="id string, page string"))

    @p.derived(key="page", by={"views": "pgae"})
    def by_page(spark, views, click, names):
        return views

    @p.derived("twice", key="page", inputs=("views", "names"))
    def twice(spark, views):
        return views

    p.derived("none", key="", inputs="views")(twice)
"""


def check(file: Path, *more: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["pipeline", "check", str(file), *more])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def test_the_name_of_a_pipeline_is_that_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, GOOD)
    config = tmp_path / "tidemill.toml"
    for text, name in (
        ('[pipeline.harbour]\nfile = "shop.py"\n', "harbour"),
        ('[pipeline.harbour]\nfile = "other.py"\n', "shop"),
        ('[pipeline.harbour]\nfile = "shop.py"\n[pipeline.other]\nfile = "shop.py"\n', "shop"),
        ('[capture.shop]\ndsn = "${NOT_SET_HERE}"\n[pipeline.harbour]\nfile = "shop.py"\n', "shop"),
    ):
        config.write_text(text)
        assert check(Path("shop.py")) == (0, f"shop.py: pipeline {name} is valid: by_product, clicks\n"), text
    assert "pipeline mine is valid" in check(Path("shop.py"), "--name", "mine")[1]


def written(directory: Path, text: str, name: str = "shop.py") -> Path:
    file = directory / name
    file.write_text(text)
    return file


def test_a_valid_file_passes_without_spark(tmp_path: Path) -> None:
    assert check(written(tmp_path, GOOD)) == (0, f"{tmp_path}/shop.py: pipeline shop is valid: by_product, clicks\n")
    program = "import sys\nfrom tidemill.cli.main import app\n"
    program += f"try:\n    app(['pipeline', 'check', '{tmp_path}/shop.py'])\n"
    program += "except SystemExit as end:\n    sys.exit(end.code or 'pyspark' in sys.modules)\n"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_problem_of_a_file_is_reported_once_with_its_line_and_its_remedy(tmp_path: Path) -> None:
    code, output = check(written(tmp_path, BAD), "--json")
    problems = json.loads(output.splitlines()[-1])["problems"]
    assert code == 1 and all(p["fix"] for p in problems)
    assert sorted((p["line"], p["problem"].partition(":")[0]) for p in problems) == [
        (3, "key column is not a column"),
        (4, "bad table name"),
        (5, "type is not supported in a table"),
        (6, "table is declared twice"),
        (9, "the input has no such column"),
        (9, "the pipeline has no such table"),
        (13, "the function cannot be called with its inputs"),
        (17, "derived table needs a key"),
    ]
    plain = check(tmp_path / "shop.py", "--reads", "click")[1]
    assert f"{tmp_path}/shop.py: line 9: the input has no such column: table=by_page input=views column=pgae." in plain
    assert "input=click." not in plain and "Did you mean page?" in plain


def test_names_and_values_that_no_table_can_have_are_refused_before_a_driver_meets_them(tmp_path: Path) -> None:
    text = """
def build(p):
    one = p.topic("t", key="id", schema="id long")
    versions = p.history("versions", of=p.table("one", one))
    p.history("again", of=versions)
    p.table("shop.dead_letters", one)
    p.table("two", one, expect=["id > 0"])
    p.history("none", of="othr")
    p.table("three", p.topic("t", key=5, schema="id long"))
"""
    code, output = check(written(tmp_path, text), "--json")
    problems = json.loads(output.splitlines()[-1])["problems"]
    assert code == 1
    assert sorted((p["line"], p["problem"]) for p in problems) == [
        (5, "a history can have no history: table=again input=versions."),
        (6, "this table has the pipeline's dead letters: table=shop.dead_letters."),
        (7, "expect names no conditions: table=two expect=['id > 0']."),
        (8, "the pipeline has no such table: table=none input=othr."),
        (9, "these are no names: given=5."),
    ]
    assert "Known are again, one, shop.dead_letters, three, two, versions." in output


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def build(p): pass", "pipeline has no tables: pipeline=shop."),
        ("x = 1", "pipeline file has no build"),
        ("def build(p:", "pipeline file does not parse"),
        ("import no_such_module", "pipeline file raises: file=.* line=1 error=ModuleNotFoundError"),
        (
            "def build(p):\n for a, b in ('xy', 'yx'):\n  p.derived(a, key='k', inputs=b)(lambda spark, one: one)",
            "derived tables depend on each other: pipeline=shop",
        ),
    ],
)
def test_a_file_that_is_wrong_as_a_whole_is_one_problem(tmp_path: Path, text: str, named: str) -> None:
    import re

    code, output = check(written(tmp_path, text))
    assert code == 1 and len(output.splitlines()) == 1 and re.search(named, output), output


def test_a_file_that_is_missing_is_a_problem(tmp_path: Path) -> None:
    code, output = check(tmp_path / "none.py")
    assert code == 1 and "no such pipeline file" in output


ON_CLUSTER = """
def build(p):
    p.table("clicks", p.topic("clicks", key="id", schema="id string, product string"))
    p.table("views", p.topic("views", key="id", schema="id string"))
    p.table("orders", p.capture("shop").table("orders"))
    p.table("names", p.capture("nobody").table("names"))
    p.table("taken", p.topic("views", key="id", schema="id string"))
    p.table("log", p.capture("shop").table("public.log"))

    @p.derived(key="product")
    def by_product(spark, clicks):
        return clicks

    @p.derived(key="id")
    def summed(spark, clicks, theirs, stored, nowhere):
        return clicks
"""


def test_a_cluster_shows_what_the_file_alone_cannot(tmp_path: Path) -> None:
    config = tmp_path / "tidemill.toml"
    config.write_text(f'[node]\ndata = "{tmp_path}/data"\n')
    (tmp_path / "data").mkdir()
    with open_stores(config, create=True) as opened:
        create: Any = opened.catalogue.create_topic("views", 1)
        opened.portal.call(create)
        row = CaptureRow("shop", "1", "slot", "publication", 1, snapshot_done=True)
        opened.portal.call(opened.catalogue.put(row))
        opened.portal.call(opened.catalogue.put(PipelineRow("other", {"theirs": "derived", "taken": "topic:clicks"})))
        skipped = CaptureTableRow(
            "shop", "public.log", "", state="left", reason="it needs a primary key.", fix="Add one."
        )
        opened.portal.call(opened.catalogue.change_table("shop", "public.log", lambda _: skipped))
        from tidemill.shards.registry import open_shard

        fields = "id string, product long"
        for name, schema in (("clicks", fields), ("stored", "id string"), ("by_product", fields)):
            shard = open_shard(
                opened.consensus, opened.objects, opened.clock, opened.rand, name, stream_schema(schema, "id")
            )
            opened.portal.call(opened.portal.call(shard).aclose())
    code, output = check(written(tmp_path, ON_CLUSTER), "--cluster", "--config", str(config))
    assert code == 1
    found = sorted(line.split(": ", 1)[1].split(" fix")[0] for line in output.splitlines())
    assert [line.partition(": ")[0] + ": " + line.split(": ", 2)[1] for line in found] == [
        "line 10: table exists with another schema",
        "line 14: the pipeline has no such table",
        "line 3: there is no such topic",
        "line 5: captured database has no such table",
        "line 6: there is no such capture",
        "line 7: another pipeline maintains this table from another source",
        "line 8: the table is not captured",
    ], output
    assert "table=log capture=shop, because it needs a primary key. Add one." in output
    assert "table=by_product difference=[key (id)→(product)]. Use another table, or re-create it" in output
    assert "input=nowhere" in output and "tidemill topic create clicks" in output
    with open_stores(config) as opened:
        opened.portal.call(opened.catalogue.create_topic("clicks", 1))
    output = check(tmp_path / "shop.py", "--cluster", "--config", str(config))[1]
    assert "line 3: table exists with another schema: table=clicks difference=[product int64→string]" in output


ARRAYS = """
def build(p):
    grid = p.capture("shop").table("grid")
    p.table("old", grid, expect={"some": "cells <> '{}'"})
    p.table("new", grid, expect={"some": "cells <> '{}'"})
    p.table("text", p.capture("shop").table("grid", as_text="cells"), expect={"some": "cells <> '{}'"})
    p.table("wrong", p.capture("shop").table("grid", as_text=["cells", "id"]))
    p.table("array", p.capture("shop").table("grid", as_text="cells"))
"""


def test_a_cluster_knows_which_arrays_are_text(tmp_path: Path) -> None:
    config = tmp_path / "tidemill.toml"
    config.write_text(f'[node]\ndata = "{tmp_path}/data"\n')
    (tmp_path / "data").mkdir()
    with open_stores(config, create=True) as opened:
        row = CaptureRow("shop", "1", "slot", "publication", 1, snapshot_done=True)
        opened.portal.call(opened.catalogue.put(row))
        create: Any = opened.catalogue.create_topic("shop.grid", 1)
        opened.portal.call(create)
        columns = (CapturedColumn("id", "integer", 0), CapturedColumn("cells", "integer[]", -1))
        table = CaptureTableRow("shop", "public.grid", "shop.grid", generation=1, columns=columns)
        opened.portal.call(opened.catalogue.change_table("shop", "public.grid", lambda _: table))
        from tidemill.shards.registry import open_shard

        for name, kind in (("old", "string"), ("array", "array<int>")):
            schema = stream_schema(f"id int, cells {kind}", "id")
            shard = open_shard(opened.consensus, opened.objects, opened.clock, opened.rand, name, schema)
            opened.portal.call(opened.portal.call(shard).aclose())
    code, output = check(written(tmp_path, ARRAYS), "--cluster", "--config", str(config))
    assert code == 1
    assert "line 5: " in output and "cells (array<int32>) has a nested type" in output
    assert "line 7: " in output and "as_text=id" in output and "array type: cells." in output
    assert "line 8: table exists with another schema: table=array difference=[cells array<int32>→string]" in output
    assert "line 4" not in output and "line 6" not in output
