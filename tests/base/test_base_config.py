"""Configuration: bad input is one sentence that names the key and the fix."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.unprivileged import call_unprivileged, closed, enterable_directory
from tidemill.base.config.config import load, parse
from tidemill.base.config.environment import env_line
from tidemill.base.config.listeners import HttpSection
from tidemill.base.config.shapes import ShapesSection
from tidemill.base.errors import InvalidError
from tidemill.consensus.factory import sqlite_path_of_url
from tidemill.node.http.limits import HttpLimits
from tidemill.node.settings_from_config import http_limits, shape_settings
from tidemill.node.supervise.processes import group_by_driver, start_drivers, with_overrides
from tidemill.node.supervise.supervisor import ChildSpec
from tidemill.objects.factory import local_directory
from tidemill.shapes import ShapeSettings


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tidemill.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[node]\nhttps = 1\n", "node.https"),
        ("[node]\nhttp = 'nowhere'\n", "node.http"),
        ("[kafka]\ndefault_partitions = 0\n", "kafka.default_partitions"),
        ("[kafka]\ngroup_consumer_session_timeout_ms = 5000\n", "kafka.group_consumer_heartbeat_interval_ms"),
        ("[metastore]\ndomains = 65\n", "metastore.domains"),
        ("[metastore]\npersist_interval_s = 0\n", "metastore.persist_interval_s"),
        ("[capture.shop]\ntables = ['public.*']\n", "capture.shop.dsn"),
        ("[capture.Shop-1]\ndsn = 'x'\n", "Shop-1"),
        (
            "[registry]\nenabled = false\n[capture.shop]\ndsn = 'x'\nenvelope = 'debezium-avro'\n",
            "capture.shop.envelope=debezium-avro",
        ),
        ("[node\n", "not TOML"),
        ("[pipeline.p]\nfile = 'f'\n[pipeline.p.spark]\ndriver_memory = 'much'\n", "pipeline.p.spark.driver_memory"),
        ("[pipeline.p]\nfile = 'f'\n[pipeline.p.spark]\ndriver_memory = '256m'\n", "pipeline.p.spark.driver_memory"),
        ("[pipeline.p]\nfile = 'f'\n[pipeline.p.spark]\ninstances = -1\n", "pipeline.p.spark.instances"),
        ("[pipeline.p]\nfile = 'f'\ndriver = '../x'\n", "pipeline.p.driver"),
        ("[pipeline.p]\nfile = 'f'\ndriver = 3\n", "pipeline.p.driver"),
        ("[pipeline.p]\nfile = 'f'\ndrivers = 'x'\n", "Write pipeline.p.driver"),
        ("[pipeline.p]\nfile = 'f'\n[pipeline.p.spark.conf]\nexecutor = '1'\n", "those begin with spark."),
        ("[capture.shop]\ndsn = '${SHOP_DSN}'\n", "SHOP_DSN"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(InvalidError) as caught:
        load(write(tmp_path, text), environ={})
    assert named in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("[node]\nhttps = 1\n", "node.http"),
        ("[nodes]\nhttp = 1\n", "Write node,"),
        ("[pipeline.p]\nfile = 'f'\n[pipeline.p.spark]\ninstance = 2\n", "pipeline.p.spark.instances"),
        ("[capture.shop]\ndsn = 'x'\ntable = ['t']\n", "capture.shop.tables"),
        ("[node]\nzzz = 1\n", "correct its spelling"),
    ],
)
def test_an_unknown_key_is_refused_with_the_known_one_that_is_most_like_it(
    tmp_path: Path, text: str, near: str
) -> None:
    with pytest.raises(InvalidError, match="unknown key") as caught:
        load(write(tmp_path, text), environ={})
    assert near in caught.value.fix


def test_a_file_in_a_directory_that_cannot_be_entered_is_one_sentence() -> None:
    with enterable_directory() as parent:
        directory = parent / "private"
        directory.mkdir()
        path = write(directory, "")
        expected = f"the configuration cannot be read: path={path} reason=Permission denied."
        with closed(directory):
            for named, environ in ((path, {}), (None, {"TIDEMILL_CONFIG": str(path)})):
                said = call_unprivileged(lambda named=named, environ=environ: load(named, environ=environ))
                assert said == f"InvalidError: {expected} Use a readable TOML file."


PIPELINE = """
[spark]
master = "spark://all:7077"
[pipeline.p]
file = "p.py"
[pipeline.p.spark]
instances = 2
conf = { "spark.executor.memory" = "2g", spark.executor.cores = 4, spark.speculation = false }
[pipeline.q]
file = "q.py"
"""


def test_spark_settings_are_read_as_spark_writes_them_with_and_without_quotes(tmp_path: Path) -> None:
    section = load(write(tmp_path, PIPELINE), environ={}).pipeline["p"].spark
    expected = {"spark.executor.memory": "2g", "spark.executor.cores": "4", "spark.speculation": "false"}
    assert (section.conf, section.instances, section.driver_memory) == (expected, 2, "1g")


def test_the_command_line_wins_over_the_file_setting_by_setting_and_the_file_over_the_default(tmp_path: Path) -> None:
    config = load(write(tmp_path, PIPELINE), environ={})
    found = with_overrides(
        config, ["p"], instances=3, driver_memory="4g", conf=["spark.executor.memory=8g", "spark.x=a=b"]
    ).pipeline
    assert (found["p"].spark.instances, found["p"].spark.driver_memory) == (3, "4g")
    assert found["p"].spark.conf == {
        "spark.executor.memory": "8g", "spark.executor.cores": "4", "spark.speculation": "false", "spark.x": "a=b",
    }  # fmt: skip
    assert found["q"] == config.pipeline["q"]
    assert with_overrides(config, ["p", "q"]) == config


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"conf": ["spark.x"]}, "--conf 'spark.x'"),
        ({"conf": ["x=1"]}, "--conf: .*begin with spark"),
        ({"driver_memory": "2 GB"}, "--driver-memory: .*512m"),
        ({"driver_memory": "469m"}, "--driver-memory: .*470m"),
        ({"instances": 65}, "--instances"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidError, match=named):
        with_overrides(load(write(tmp_path, PIPELINE), environ={}), ["p"], **options)


def test_drivers_differ_in_instance_scratch_log_and_mark_alone_and_settings_are_on_no_command_line(
    tmp_path: Path,
) -> None:
    config = load(write(tmp_path, PIPELINE), environ={})
    added: list[ChildSpec] = []
    start_drivers(config, ["p"], SimpleNamespace(add=added.append))  # type: ignore[arg-type]
    start_drivers(config, ["p"], SimpleNamespace(add=added.append), "b")  # type: ignore[arg-type]
    assert [spec.name for spec in added] == ["pipeline-p", "pipeline-p-2", "pipeline-p-b", "pipeline-p-b-2"]
    assert [spec.marks for spec in added] == [(f"pipeline:p{own}",) for own in ("", ":2", ":b", ":b-2")]
    assert len({option(spec, "--scratch") for spec in added}) == 4
    for spec in added:
        assert option(spec, "--master") == "spark://all:7077"
        assert not [part for part in spec.command if "spark.executor" in part]
        assert json.loads(spec.environ["TIDEMILL_DRIVER_CONF"])["spark.executor.cores"] == "4"


TOGETHER = """
[spark]
master = "local[2]"
[pipeline.p]
file = "p.py"
driver = "small"
[pipeline.q]
file = "q.py"
[pipeline.r]
file = "r.py"
driver = "small"
[pipeline.r.spark]
master = "local[2]"
conf = { spark.x = "secret" }
[pipeline.p.spark.conf]
spark.x = "secret"
"""


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"master": "local[1]"}, "pipelines=p,r spark.master.*Give pipeline.r"),
        ({"driver_memory": "2g"}, "driver=small.*spark.driver_memory"),
        ({"instances": 0}, "spark.instances"),
        ({"conf": {"spark.x": "secret", "spark.y": 1}}, r"spark.conf.spark.y\."),
        ({"conf": {"spark.x": "another secret"}}, r"spark.conf.spark.x\."),
        ({"conf": {}}, r"spark.conf.spark.x\."),
    ],
)
def test_pipelines_of_one_driver_that_ask_for_another_session_are_refused_by_the_setting_without_its_value(
    more: dict[str, Any], named: str
) -> None:
    pipelines = tomllib.loads(TOGETHER)["pipeline"]
    pipelines["r"]["spark"] |= more
    with pytest.raises(InvalidError, match=named) as refused:
        parse({"spark": {"master": "local[2]"}, "pipeline": pipelines}, origin="tidemill.toml")
    assert "secret" not in str(refused.value)


def test_pipelines_that_name_a_driver_are_one_process_with_a_directory_each_and_run_alone_by_name(
    tmp_path: Path,
) -> None:
    config = load(write(tmp_path, TOGETHER), environ={})
    assert group_by_driver(config) == [["q"], ["p", "r"]]
    added: list[ChildSpec] = []
    supervisor: Any = SimpleNamespace(add=added.append)
    twice = with_overrides(config, config.pipeline, instances=2)
    for names in group_by_driver(twice):
        start_drivers(twice, names, supervisor)
    assert [(spec.name, spec.marks) for spec in added] == [
        ("pipeline-q", ("pipeline:q",)),
        ("pipeline-q-2", ("pipeline:q:2",)),
        ("driver-small", ("pipeline:p", "pipeline:r")),
        ("driver-small-2", ("pipeline:p:2", "pipeline:r:2")),
    ]
    directories = [part for spec in added for key in ("--scratch", "--session") for part in options(spec, key)]
    assert len(set(directories)) == len(directories) == 8
    assert options(added[2], "--name") == ["p", "r"]
    assert options(added[2], "--pipeline") == list(added[2].watch) == [str(tmp_path / "p.py"), str(tmp_path / "r.py")]
    assert [option(spec, "--instance") for spec in added] == ["", "2", "", "2"]
    start_drivers(with_overrides(config, ["p"], driver_memory="2g"), ["p"], supervisor, "b")
    assert (added[4].name, options(added[4], "--name"), "--session" in added[4].command) == (
        "pipeline-p-b",
        ["p"],
        False,
    )


def options(spec: ChildSpec, name: str) -> list[str]:
    return [value for key, value in zip(spec.command, spec.command[1:], strict=False) if key == name]


def option(spec: ChildSpec, name: str) -> str:
    return spec.command[list(spec.command).index(name) + 1]


def test_what_is_no_readable_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidError, match=r"binary\.toml reason=it is not UTF-8"):
        load(tmp_path / "binary.toml", environ={})
    with pytest.raises(InvalidError, match="Is a directory"):
        load(tmp_path, environ={})


def test_a_variable_below_a_plain_value_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="TIDEMILL_NODE__NAME"):
        load(write(tmp_path, "node = 3\n"), environ={"TIDEMILL_NODE__NAME": "x"})


def test_a_named_file_that_is_absent_is_refused_and_an_unnamed_one_means_defaults(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"absent\.toml"):
        load(tmp_path / "absent.toml", environ={})
    assert load(None, environ={}).node.name == "node-1"


OVERRIDES: dict[str, tuple[str, str, Any]] = {
    "a list": ("TIDEMILL_SECURITY__SUPER_USERS", '["User:a", "User:b"]', ["User:a", "User:b"]),
    "a list below a name": ("TIDEMILL_CAPTURE__SHOP__TABLES", '["public.a"]', ["public.a"]),
    "a list of one line each": ("TIDEMILL_SHAPES__ALLOWED_ORIGINS", '[\n"*",\n]\n', ["*"]),
    "a list of choices": ("TIDEMILL_SECURITY__SASL__MECHANISMS", "['PLAIN']", ["PLAIN"]),
    "a list of unions": ("TIDEMILL_SHAPE__S__PARAMS", '["x"]', ["x"]),
    "a map": ("TIDEMILL_SECURITY__SIGNING__KEYS", f'{{ k1 = "{"x" * 32}" }}', {"k1": "x" * 32}),
    "a map of dotted keys": ("TIDEMILL_PIPELINE__P__SPARK__CONF", "{ spark.ui.port = 4 }", {"spark.ui.port": "4"}),
    "a key of a map": ("TIDEMILL_SECURITY__SIGNING__KEYS__K2", "y" * 32, {"k2": "y" * 32}),
    "a choice of numbers": ("TIDEMILL_LAKE__FORMAT", "2", 2),
    "a choice of texts like numbers": ("TIDEMILL_SECURITY__TLS__MIN_VERSION", "1.3", "1.3"),
    "a section": ("TIDEMILL_PIPELINE__P__SPARK", "{ instances = 3 }", None),
    "a text": ("TIDEMILL_NODE__NAME", '["x"]', '["x"]'),
    "a number": ("TIDEMILL_HTTP__CONNECTIONS", "64", 64),
    "a fraction": ("TIDEMILL_RETENTION__HISTORY_S", "1.5", 1.5),
    "a boolean": ("TIDEMILL_HTTP__TLS", "false", False),
    "a boolean or nothing": ("TIDEMILL_SECURITY__AUTHORIZE", "true", True),
    "a number or nothing": ("TIDEMILL_TOPICS__T__RETENTION_MS", "-1", -1),
}  # fmt: skip
SECTIONS = """
[capture.shop]
dsn = "x"
tables = ["public.*"]
[pipeline.p]
file = "p.py"
[shape.s]
table = "public.a"
"""


@pytest.mark.parametrize("kind", OVERRIDES)
def test_a_value_of_any_kind_comes_from_the_environment(tmp_path: Path, kind: str) -> None:
    variable, text, value = OVERRIDES[kind]
    config: Any = load(write(tmp_path, SECTIONS), environ={variable: text})
    if kind == "a section":
        assert config.pipeline["p"].spark.instances == 3
        return
    path = variable.removeprefix("TIDEMILL_").lower().split("__")
    for part in path[:-1] if kind == "a key of a map" else path:
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    assert config == value


def test_a_variable_of_a_map_does_not_undo_one_of_its_keys(tmp_path: Path) -> None:
    both = {"TIDEMILL_HTTP__PAGES__B": "other", "TIDEMILL_HTTP__PAGES": '{ a = "app" }'}
    assert load(write(tmp_path, ""), environ=both).http.pages == {"a": f"{tmp_path}/app", "b": f"{tmp_path}/other"}


@pytest.mark.parametrize(
    ("variable", "changed"),
    [
        ("TIDEMILL_TOPICS__ORDERS__PARTITIONS", "Orders"),
        ("TIDEMILL_TOPICS__Orders__PARTITIONS", "Orders"),
        ("TIDEMILL_TOPICS__CLICKS__PARTITIONS", "clicks"),
        ("TIDEMILL_TOPICS__A.B__PARTITIONS", "a.B"),
        ("TIDEMILL_TOPICS__New__PARTITIONS", "new"),
    ],
)
def test_a_variable_changes_the_key_of_the_file_regardless_of_case(tmp_path: Path, variable: str, changed: str) -> None:
    path = write(tmp_path, "[topics.Orders]\n[topics.clicks]\n[topics.'a.B']\n")
    found = load(path, environ={variable: "7"}).topics
    assert {name for name, section in found.items() if section.partitions == 7} == {changed}
    assert len(found) == (4 if changed == "new" else 3)


def test_a_variable_that_fits_two_keys_is_refused_unless_it_is_written_as_one_of_them(tmp_path: Path) -> None:
    path = write(tmp_path, "[topics.Orders]\n[topics.orders]\n")
    assert load(path, environ={"TIDEMILL_TOPICS__orders__PARTITIONS": "7"}).topics["orders"].partitions == 7
    with pytest.raises(InvalidError, match=r"variable=TIDEMILL_TOPICS__ORDERS__PARTITIONS keys=Orders, orders\."):
        load(path, environ={"TIDEMILL_TOPICS__ORDERS__PARTITIONS": "7"})


@pytest.mark.parametrize("text", ["s3cret", "[s3cret", '["s3cret"]\nmore = 1', "", "{ k1 = 's3cret' }"])
def test_an_error_about_a_variable_names_it_and_not_its_value(tmp_path: Path, text: str) -> None:
    for variable in ("TIDEMILL_SECURITY__SIGNING__KEYS", "TIDEMILL_SHAPES__ALLOWED_ORIGINS", "TIDEMILL_LAKE__FORMAT"):
        with pytest.raises(InvalidError) as caught:
            load(write(tmp_path, ""), environ={variable: text})
        assert "s3cret" not in str(caught.value), variable
        key = variable.removeprefix("TIDEMILL_").lower().replace("__", ".")
        assert variable in str(caught.value) or key in str(caught.value)


def test_variables_are_filled_in_and_the_environment_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "[node]\nname = '${NAME}'\nhttp = '127.0.0.1:1'\n")
    config = load(path, environ={"NAME": "n7", "TIDEMILL_NODE__HTTP": "127.0.0.1:2"})
    assert (config.node.name, config.node.http) == ("n7", "127.0.0.1:2")


def test_a_quote_in_a_variable_cannot_end_the_string_it_is_in(tmp_path: Path) -> None:
    path = write(tmp_path, '[node]\nname = "${NAME}"\n')
    assert load(path, environ={"NAME": 'a"b\\c'}).node.name == 'a"b\\c'


ODD = "a\\b\"c'd${NAME}\n#e\x7fé'''\\"


@pytest.mark.parametrize(
    ("written", "before", "after"),
    [
        ('"${X}"', "", ""),
        ("'${X}'", "", ""),
        ("'a\\n\"${X}\"'", 'a\\n"', '"'),
        ('"""\n# ${X}"""', "# ", ""),
        ('"""${X}""""', "", '"'),
        ("'''\n\\t\"x\n${X}''''", '\\t"x\n', "'"),
        ("'#${X}' # '${NOT_SET}", "#", ""),
        ('"\\"${X}\\\\${X}" # "', '"', "\\" + ODD),
    ],
)
def test_a_variable_is_taken_literally_in_every_kind_of_string(
    tmp_path: Path, written: str, before: str, after: str
) -> None:
    path = write(tmp_path, f"[capture.shop]\ndsn = {written}\n[node]\nname = 'n7'\n")
    found = load(path, environ={"X": ODD})
    assert (found.capture["shop"].dsn, found.node.name) == (before + ODD + after, "n7")


def test_a_variable_in_a_comment_is_not_needed(tmp_path: Path) -> None:
    text = '# it\'s "${NOT_SET}\n[node]\nname = "n7" # ${NOT_SET}\n#[capture.shop]\n#dsn = "${NOT_SET}"\n'
    (tmp_path / ".env").write_bytes(b"\xff")
    assert load(write(tmp_path, text), environ={}).node.name == "n7"


def test_a_variable_outside_of_strings_is_a_number_or_a_boolean(tmp_path: Path) -> None:
    path = write(tmp_path, "[shapes]\nmemory_mb = ${MB}\n[http]\ntls = ${TLS} # '\n[topics.${TOPIC}]\npartitions = 2\n")
    found = load(path, environ={"MB": "7\n", "TLS": "false", "TOPIC": "clicks"})
    assert (found.shapes.memory_mb, found.http.tls, [*found.topics]) == (7, False, ["clicks"])
    with pytest.raises(InvalidError, match="is not TOML"):
        load(path, environ={"MB": "7\n[http]\nper_address = 1", "TLS": "false", "TOPIC": "clicks"})
    quoted = write(tmp_path, "[shapes]\nmemory_mb = '${MB}'\n[topics.\"${TOPIC}\"]\npartitions = 2\n")
    found = load(quoted, environ={"MB": "7", "TOPIC": "a.b"})
    assert (found.shapes.memory_mb, [*found.topics]) == (7, ["a.b"])


def test_a_dollar_sign_can_be_written_without_a_variable(tmp_path: Path) -> None:
    path = write(tmp_path, '[capture.shop]\ndsn = "\\u0024{X} $X ${a.b}"\n')
    assert load(path, environ={}).capture["shop"].dsn == "${X} $X ${a.b}"


def test_a_pipeline_file_is_found_beside_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, "[pipeline.p]\nfile = 'p.py'\n")
    assert load(path, environ={}).pipeline["p"].file == str(tmp_path / "p.py")


def test_shapes_and_http_are_set_by_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "tidemill.toml"
    path.write_text(
        '[shapes]\nsecret = "${SHAPES}"\nallowed_origins = ["https://shop.example"]\nmemory_mb = 7\nchunk_kb = 3\n'
        "cache_live_s = 9\ncache_stale_s = 8\nbacklog_s = 2.5\n[http]\nper_address = 5\nheader_kb = 16\n"
    )
    config = load(path, environ={"SHAPES": "s3"})
    settings = shape_settings(config.shapes)
    assert (settings.secret, settings.allowed_origins) == ("s3", ("https://shop.example",))
    assert (settings.memory_bytes, settings.limits.chunk_bytes) == (7 << 20, 3 << 10)
    assert (settings.cache.live_s, settings.cache.stale_s, settings.backlog.age_s) == (9, 8, 2.5)
    limits = http_limits(config.http)
    assert (limits.per_address, limits.header_bytes) == (5, 16 << 10)
    assert shape_settings(ShapesSection()) == ShapeSettings(), "defaults of both are one"
    assert http_limits(HttpSection()) == HttpLimits()
    path.write_text('[shapes]\nallowed_origins = ["shop.example"]\n')
    with pytest.raises(InvalidError, match="allowed_origins"):
        load(path, environ={})


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "shop" / "tidemill.toml"
    path.parent.mkdir()
    path.write_text(
        '[objects]\nurl = "./bucket"\n[consensus]\nurl = "sqlite:state/c.db"\n[pipeline.p]\nfile = "p.py"\n'
    )
    found = load(path, environ={})
    assert found.node.data == str(path.parent / ".tidemill")
    assert Path(found.objects_url) == path.parent / "bucket"
    assert found.consensus_url == f"sqlite:{path.parent}/state/c.db"
    assert found.pipeline["p"].file == str(path.parent / "p.py")
    path.write_text('[node]\ndata = "/var/t"\n[objects]\nurl = "s3://b/p"\n[consensus]\nurl = "postgresql://h/d"\n')
    absolute = load(path, environ={})
    assert (absolute.node.data, absolute.objects_url, absolute.consensus_url) == (
        "/var/t", "s3://b/p", "postgresql://h/d",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["C#", "50%20off", "what?", "a b", "é", "x\ny", "caf\udce9"])
def test_the_stores_of_a_directory_of_any_name_are_in_it(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    found = load(write(directory, ""), environ={})
    assert local_directory(found.objects_url) == f"{directory}/.tidemill/objects"
    assert sqlite_path_of_url(found.consensus_url) == directory / ".tidemill" / "consensus.db"
    again = parse({"objects": {"url": found.objects_url}}, origin=str(directory / "other.toml"))
    assert local_directory(again.objects_url) == f"{directory}/.tidemill/objects"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("SHOP_DSN=postgresql://me:a b@host/shop", "postgresql://me:a b@host/shop"),
        ("export SHOP_DSN='host=h password=p\"q' # why", 'host=h password=p"q'),
        ('SHOP_DSN="say \\"x\\""', 'say "x"'),
        ("SHOP_DSN='open", "'open"),
        ("SHOP_DSN=", ""),
    ],
)
def test_a_variable_that_the_environment_lacks_is_read_from_the_file_next_to_the_configuration(
    tmp_path: Path, line: str, value: str
) -> None:
    path = write(tmp_path, '[capture.shop]\ndsn = "${SHOP_DSN}"\n')
    (tmp_path / ".env").write_text(f"# comment\nnot a line\n\n{line}\nOTHER=1\n")
    assert load(path, environ={}).capture["shop"].dsn == value
    assert load(path, environ={"SHOP_DSN": "mine"}).capture["shop"].dsn == "mine"


def test_a_file_of_variables_that_cannot_be_read_matters_only_if_it_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path, '[capture.shop]\ndsn = "${SHOP_DSN}"\n')
    (tmp_path / ".env").write_bytes(b"SHOP_DSN=\xff\n")
    assert load(path, environ={"SHOP_DSN": "mine"}).capture["shop"].dsn == "mine"
    with pytest.raises(InvalidError, match=r"variables cannot be read: path=.*\.env reason=it is not UTF-8"):
        load(path, environ={})


@pytest.mark.parametrize("value", ["plain", "two words", "it's", 'a "b" \\ $HOME', "#x"])
def test_a_line_for_the_file_of_variables_reads_back(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, '[capture.shop]\ndsn = "${SHOP_DSN}"\n')
    (tmp_path / ".env").write_text(env_line("SHOP_DSN", value))
    assert load(path, environ={}).capture["shop"].dsn == value


KEYS = {"credentials": "static-read", "access_key_id": "reader", "secret_access_key": "shown"}


def test_keys_of_the_bucket_are_not_handed_out_to_everybody() -> None:
    public = {"node": {"http": "0.0.0.0:8600"}, "lake": {"enabled": True, **KEYS}}
    with pytest.raises(InvalidError, match="keys of the bucket would be handed out without authentication"):
        parse(public, origin="t")
    assert parse(public | {"http": {"authenticate": True}}, origin="t").lake.access_key_id == "reader"
    assert parse(public | {"node": {"http": "[::1]:8600"}}, origin="t").lake.access_key_id == "reader"
    assert parse(public | {"lake": {"enabled": True}}, origin="t").lake.credentials == "none"
    with pytest.raises(InvalidError, match="needs access_key_id and secret_access_key"):
        parse({"lake": {"credentials": "static-read"}}, origin="t")
