"""`tidemill init`: the files of a new cluster, for a real database; what is missing there; what is never changed."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import psycopg
import pytest

from support.cli.process import run_tidemill
from tidemill.base.config.config import load
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.capture.setup.inspection import FoundTable, Inspection
from tidemill.capture.setup.server_checks import SET_PARAMETER
from tidemill.cli.context import open_stores
from tidemill.cli.init.command import _check_parses, _write_files, administrator_text
from tidemill.cli.init.files import file_texts
from tidemill.cli.init.plan import capture_name, make_plan
from tidemill.spark.check import check_file

FILES = [".env", ".env.example", ".gitignore", "app/index.html", "pipeline.py", "tidemill.toml"]
TABLES = (
    "CREATE TABLE orders (id bigint PRIMARY KEY, customer text, status text)",
    'CREATE TABLE "Class" (id int PRIMARY KEY)',
    "CREATE TABLE log (line text)",
)


def contents(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file() and ".tidemill" not in path.parts)
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def run_sql(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.postgres
def test_the_files_work_and_hold_the_password_in_one_place(postgres_dsn: str, tmp_path: Path) -> None:
    run_sql(postgres_dsn, *TABLES)
    dsn = postgres_dsn.replace("postgres@", "postgres:s3'cr$et@")
    done = run_tidemill("init shop", cwd=tmp_path, environ={"DATABASE_URL": dsn})
    shop = tmp_path / "shop"
    assert (done.exit_code, done.errors, sorted(contents(shop))) == (0, "", FILES)
    assert "2 tables: public.Class, public.orders" in done.output and "primary key: table=public.log" in done.output
    assert "An administrator" not in done.output and done.output.count("  tidemill ") == 4

    assert [path for path, text in contents(shop).items() if b"cr$et" in text] == [".env"]
    assert stat.S_IMODE((shop / ".env").stat().st_mode) == 0o600
    config = load(shop / "tidemill.toml", environ={})
    (capture,) = config.capture
    assert capture == postgres_dsn.rpartition("/")[2] and config.capture[capture].dsn == dsn
    assert config.http.pages == {"app": str(shop / "app")}
    checked = run_tidemill("pipeline check pipeline.py", cwd=shop)
    tables = "class_table, orders, orders_by_status"
    assert (checked.exit_code, checked.output) == (0, f"pipeline.py: pipeline {capture} is valid: {tables}\n")
    assert 'const TABLE = "public.orders";' in (shop / "app/index.html").read_text()
    # The database was only read.
    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute("SELECT FROM pg_publication").fetchall() == []


@pytest.mark.postgres
def test_schemas_that_are_not_captured_are_named_with_the_line_that_captures_them(
    postgres_dsn: str, tmp_path: Path
) -> None:
    managed = ("CREATE SCHEMA managed", "CREATE TABLE managed.log (line text)")  # no table that can be captured
    archive = ('CREATE SCHEMA "Archive"', 'CREATE TABLE "Archive".orders (id bigint PRIMARY KEY)')
    run_sql(postgres_dsn, *TABLES, *managed, *archive)
    done = run_tidemill(f"init --dsn {postgres_dsn} --name shop", cwd=tmp_path)
    assert done.exit_code == 0 and "  not captured: schemas Archive; tidemill.toml has" in done.output, done
    assert load(tmp_path / "tidemill.toml", environ={}).capture["shop"].tables == ["public.*"]
    text = (tmp_path / "tidemill.toml").read_text()
    captured = '\ntables = ["public.*"]'
    assert captured in text and "\n# tables = " in text
    (tmp_path / "tidemill.toml").write_text(text.replace(captured, "\n#").replace("\n# tables = ", "\ntables = "))
    found = load(tmp_path / "tidemill.toml", environ={}).capture["shop"].tables
    assert found == ["public.*", "Archive.*"]
    options = " ".join(f"--tables {pattern}" for pattern in found)
    chosen = run_tidemill(f"init all --dsn {postgres_dsn} --name shop {options}", cwd=tmp_path)
    assert chosen.exit_code == 0 and "  3 tables: Archive.orders, " in chosen.output, chosen
    assert "Other schemas" not in (tmp_path / "all/tidemill.toml").read_text()


@pytest.mark.postgres
def test_the_environment_decides_where_the_page_is(postgres_dsn: str, tmp_path: Path) -> None:
    run_sql(postgres_dsn, TABLES[0])
    for directory, address, shown in (
        ("a", "0.0.0.0:8701", "http://127.0.0.1:8701/app/"),
        ("b", "[::1]:8702", "http://[::1]:8702/app/"),
    ):
        line = f"init {directory} --dsn {postgres_dsn} --name shop"
        done = run_tidemill(line, cwd=tmp_path, environ={"TIDEMILL_NODE__HTTP": address})
        assert done.exit_code == 0 and f"then open {shown}\n" in done.output and ":8600" not in done.output, done
    refused = run_tidemill(f"init c --dsn {postgres_dsn}", cwd=tmp_path, environ={"TIDEMILL_NODE__HTTP": "8600"})
    assert refused.exit_code == 2 and "node.http" in refused.errors and not (tmp_path / "c").exists(), refused


@pytest.mark.postgres
def test_a_file_that_exists_is_never_changed(postgres_dsn: str, tmp_path: Path) -> None:
    run_sql(postgres_dsn, *TABLES)
    for name in (".env", ".gitignore"):
        (tmp_path / name).write_text("mine\n")
    done = run_tidemill(f"init --dsn {postgres_dsn} --name shop --json", cwd=tmp_path)
    answer = json.loads(done.output)
    assert done.exit_code == 0 and answer["existing"] == [".env", ".gitignore"]
    assert sorted(answer["created"] + answer["existing"]) == FILES
    before = contents(tmp_path)
    assert before[".env"] == before[".gitignore"] == b"mine\n"
    again = run_tidemill(f"init . --dsn {postgres_dsn} --name other", cwd=tmp_path)
    assert again.exit_code == 2 and again.errors.startswith("tidemill: there is a cluster already"), again
    assert contents(tmp_path) == before


@pytest.mark.postgres
def test_a_directory_that_cannot_hold_the_files_is_a_sentence_and_gets_none(postgres_dsn: str, tmp_path: Path) -> None:
    run_sql(postgres_dsn, *TABLES)
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "app").write_text("mine\n")
    reasons = {"file": "File exists", "file/x": "Not a directory", "dangling": "File exists", "half": "File exists"}
    for name, reason in {**reasons, "/proc/x": "No such file or directory"}.items():
        done = run_tidemill(f"init {name} --dsn {postgres_dsn} --name shop", cwd=tmp_path)
        assert done.exit_code == 2 and done.errors.startswith("tidemill: a file cannot be created"), done
        assert f"path={name}" in done.errors and f"reason={reason}." in done.errors, done
    assert contents(tmp_path) == {"file": b"", "half/app": b"mine\n"}
    (tmp_path / "half" / "app").unlink()
    assert run_tidemill(f"init half --dsn {postgres_dsn} --name shop", cwd=tmp_path).exit_code == 0
    assert sorted(contents(tmp_path / "half")) == FILES


@pytest.mark.postgres
def test_a_dangling_link_is_kept_as_any_file_and_one_to_the_configuration_counts_as_a_cluster(
    postgres_dsn: str, tmp_path: Path
) -> None:
    run_sql(postgres_dsn, *TABLES)
    (tmp_path / "pipeline.py").symlink_to("nowhere.py")
    done = run_tidemill(f"init --dsn {postgres_dsn} --name shop --json", cwd=tmp_path)
    assert done.exit_code == 0 and json.loads(done.output)["existing"] == ["pipeline.py"], done
    assert not (tmp_path / "nowhere.py").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tidemill.toml").symlink_to("nowhere.toml")
    refused = run_tidemill(f"init other --dsn {postgres_dsn} --name shop", cwd=tmp_path)
    assert refused.exit_code == 2 and "there is a cluster already" in refused.errors, refused
    assert len(list((tmp_path / "other").iterdir())) == 1


def test_an_error_before_the_configuration_is_written_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> None:
        assert (tmp_path / "a").read_text() == "text", "the configuration is the last file"
        raise UnavailableError("the disk is full.")

    with pytest.raises(UnavailableError):
        _write_files(tmp_path, {"tidemill.toml": "", "a": "text"}, fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.postgres
@pytest.mark.parametrize("may_create", [False, True], ids=["reads", "creates"])
def test_what_is_missing_is_printed_as_sql_that_suffices(postgres_dsn: str, tmp_path: Path, may_create: bool) -> None:
    granted = [f'GRANT CREATE ON DATABASE "{postgres_dsn.rpartition("/")[2]}"'] if may_create else []
    role = postgres_dsn.rpartition("/")[2] + "_reader"
    run_sql(postgres_dsn, *TABLES, f"CREATE ROLE {role} LOGIN", *(f"{each} TO {role}" for each in granted))
    dsn = postgres_dsn.replace("postgres@", f"{role}@")
    try:
        done = run_tidemill(f"init --dsn {dsn} --name shop --json", cwd=tmp_path)
        found = json.loads(done.output)
        assert done.exit_code == 1 and sorted(contents(tmp_path)) == FILES
        assert [problem["problem"].partition(":")[0] for problem in found["problems"]] == [
            "the role lacks the REPLICATION attribute"
        ]
        assert any("GRANT SELECT" in s for s in found["statements"]) and "log" not in str(found["statements"])
        run_sql(postgres_dsn, *found["statements"])
        second = tmp_path / "second"
        assert run_tidemill(f"init {second} --dsn {dsn} --name shop", cwd=tmp_path).exit_code == 0
        # `capture drop` will restore what the statements replaced.
        with open_stores(tmp_path / "tidemill.toml") as opened:
            rows = opened.portal.call(opened.catalogue.all_tables())
        assert sorted(row.table for row in rows) == ["public.Class", "public.orders"]
        assert all(str(row.identities_asked).count("DEFAULT") == 1 for row in rows), rows
    finally:
        run_sql(postgres_dsn, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_setting_of_the_server_is_followed_by_a_restart() -> None:
    assert administrator_text(["GRANT a TO b"]) == "An administrator has to run:\n  GRANT a TO b;"
    asked = administrator_text([f"{SET_PARAMETER}wal_level = 'logical'", "GRANT a TO b"]).splitlines()
    assert asked[0] == "An administrator has to run, and then to restart PostgreSQL:" and len(asked) == 3


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("made", "options", "code", "words"),
    [
        (
            "",
            "",
            2,
            "the capture's patterns match no table: table=public.*. Create a table, or choose others with --tab",
        ),
        ("CREATE TABLE log (line text)", "", 2, "no table can be captured, and nothing was written: a captured table"),
        (
            "CREATE TABLE log (line text); CREATE SCHEMA s; CREATE TABLE s.t (id int PRIMARY KEY)",
            "",
            2,
            "no table can be captured, and nothing was written: a captured table needs a primary key: table=public.log."
            " Correct one of them, or add --tables 's.*'",
        ),
        ("CREATE TABLE t (id int PRIMARY KEY)", "--name Shop-1", 2, "bad capture name"),
        ("CREATE TABLE t (id int PRIMARY KEY)", "--tables nope", 2, "the capture's patterns match no table"),
    ],
)
def test_a_database_that_cannot_be_captured_leaves_nothing(
    postgres_dsn: str, tmp_path: Path, made: str, options: str, code: int, words: str
) -> None:
    if made:
        run_sql(postgres_dsn, made)
    done = run_tidemill(f"init shop --dsn {postgres_dsn} {options}", cwd=tmp_path)
    assert done.exit_code == code and done.errors.startswith(f"tidemill: {words}"), done
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("options", "code"), [("", 2), ("--dsn postgresql://127.0.0.1:1/x", 4), ("--dsn a=b=c", 2)])
def test_a_database_that_does_not_answer_leaves_nothing(tmp_path: Path, options: str, code: int) -> None:
    assert run_tidemill(f"init shop {options}", cwd=tmp_path).exit_code == code
    assert list(tmp_path.iterdir()) == []


def table(name: str, *columns: str, schema: str = "public") -> FoundTable:
    full = (("id", "bigint"), *((column, "text") for column in columns))
    return FoundTable(schema, name, f"{schema}.{name}", ("id",), full)


@pytest.mark.parametrize(
    ("tables", "names", "derived"),
    [
        ([table("orders", "note", "status"), table("a", "name")], "orders a", "orders_by_status"),
        ([table("lines", "text", "order_id")], "lines", "lines_by_order_id"),
        ([table("flags")], "flags", "flags_count"),
        ([table("counts", "count", "Odd")], "counts", "counts_count"),
        ([table("class", "a"), table("p"), table("spark")], "class_table p_table spark_table", "class_table_by_a"),
        ([table("Odd Näme"), table("1st"), table("ü")], "odd_n_me table_1st table", "odd_n_me_count"),
        ([table("2FA Tokens", "status")], "table_2fa_tokens", "table_2fa_tokens_by_status"),
        ([table("2fa", "kind"), table("table_2fa")], "public_2fa public_table_2fa", "public_2fa_by_kind"),
        ([table("None", "a"), table("_1_"), table("match"), table("def")], "none table_1 match def_table", "none_by_a"),
        ([table("class", "a"), table("class_table")], "public_class public_class_table", "public_class_by_a"),
        ([table("t"), table("t", schema="s"), table("s_t")], "public_t s_t_2 s_t", "public_t_count"),
        ([table("a b"), table("a_b"), table("a-b")], "public_a_b public_a_b_2 public_a_b_3", "public_a_b_count"),
        ([table("a", "kind"), table("a_by_kind")], "a a_by_kind", "a_by_kind_2"),
    ],
)
def test_every_name_becomes_one_that_python_and_the_pipeline_accept(
    tmp_path: Path, tables: list[FoundTable], names: str, derived: str
) -> None:
    plan = make_plan("shop", Inspection(180_000, ("public.*",), tuple(tables), {}, (), (), {}))
    assert [t.name for t in plan.tables] == names.split() and plan.count.name == derived
    (tmp_path / "pipeline.py").write_text(file_texts(plan, "dbname=x")["pipeline.py"])
    checked = check_file(tmp_path / "pipeline.py", "shop")
    assert checked.problems == []
    assert sorted([*checked.tables, *checked.derived_tables]) == sorted([*names.split(), derived])


def test_a_pipeline_that_is_not_python_would_be_refused() -> None:
    _check_parses("def build(p):\n    pass\n")
    with pytest.raises(
        InvalidError, match=r"nothing was written: reason='invalid decimal literal' line='def 2fa\(p\):'"
    ):
        _check_parses("def 2fa(p):\n    pass\n")


@pytest.mark.parametrize(
    ("database", "name"),
    [("shop", "shop"), ("My-Shop", "my_shop"), ("2nd", "db_2nd"), ("ü", "db"), ("x" * 60, "x" * 41)],
)
def test_a_capture_is_named_after_its_database(database: str, name: str) -> None:
    assert capture_name(database) == name
