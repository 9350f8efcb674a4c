"""Configuration: bad input is one sentence that names the key and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.base.config import HttpSection, ShapesSection, load
from tidemill.base.errors import Invalid
from tidemill.node.http_limits import HttpLimits
from tidemill.node.overrides import overridden
from tidemill.node.processes import start_drivers
from tidemill.node.served import http_limits, shape_settings
from tidemill.node.supervise import ChildSpec
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
        ("[metastore]\ndomains = 65\n", "metastore.domains"),
        ("[metastore]\npersist_interval_s = 0\n", "metastore.persist_interval_s"),
        ("[capture.shop]\ntables = ['public.*']\n", "capture.shop.dsn"),
        ("[capture.Shop-1]\ndsn = 'x'\n", "Shop-1"),
        ("[node\n", "not TOML"),
        ("[pipeline.p]\nfile = 'f'\n[pipeline.p.spark]\ndriver_memory = 'much'\n", "pipeline.p.spark.driver_memory"),
        ("[pipeline.p]\nfile = 'f'\n[pipeline.p.spark]\ndriver_memory = '256m'\n", "pipeline.p.spark.driver_memory"),
        ("[pipeline.p]\nfile = 'f'\n[pipeline.p.spark]\ninstances = -1\n", "pipeline.p.spark.instances"),
        ("[pipeline.p]\nfile = 'f'\n[pipeline.p.spark.conf]\nexecutor = '1'\n", "they begin with spark."),
        ("[capture.shop]\ndsn = '${SHOP_DSN}'\n", "SHOP_DSN"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(Invalid) as caught:
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
    with pytest.raises(Invalid, match="unknown key") as caught:
        load(write(tmp_path, text), environ={})
    assert near in caught.value.fix


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
    found = overridden(
        config, ["p"], instances=3, driver_memory="4g", conf=["spark.executor.memory=8g", "spark.x=a=b"]
    ).pipeline
    assert (found["p"].spark.instances, found["p"].spark.driver_memory) == (3, "4g")
    assert found["p"].spark.conf == {
        "spark.executor.memory": "8g", "spark.executor.cores": "4", "spark.speculation": "false", "spark.x": "a=b",
    }  # fmt: skip
    assert found["q"] == config.pipeline["q"]
    assert overridden(config, ["p", "q"]) == config


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
    with pytest.raises(Invalid, match=named):
        overridden(load(write(tmp_path, PIPELINE), environ={}), ["p"], **options)


def test_drivers_differ_in_instance_scratch_log_and_mark_alone_and_settings_are_on_no_command_line(
    tmp_path: Path,
) -> None:
    config = load(write(tmp_path, PIPELINE), environ={})
    added: list[ChildSpec] = []
    start_drivers(config, "p", SimpleNamespace(add=added.append))  # type: ignore[arg-type]
    start_drivers(config, "p", SimpleNamespace(add=added.append), "b")  # type: ignore[arg-type]
    assert [spec.name for spec in added] == ["pipeline-p", "pipeline-p-2", "pipeline-p-b", "pipeline-p-b-2"]
    assert [spec.mark for spec in added] == ["pipeline:p", "pipeline:p:2", "pipeline:p:b", "pipeline:p:b-2"]
    assert len({option(spec, "--scratch") for spec in added}) == 4
    for spec in added:
        assert option(spec, "--master") == "spark://all:7077"
        assert not [part for part in spec.command if "spark.executor" in part]
        assert json.loads(spec.environ["TIDEMILL_DRIVER_CONF"])["spark.executor.cores"] == "4"


def option(spec: ChildSpec, name: str) -> str:
    return spec.command[list(spec.command).index(name) + 1]


def test_what_is_no_readable_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Invalid, match=r"binary\.toml reason=it is not UTF-8"):
        load(tmp_path / "binary.toml", environ={})
    with pytest.raises(Invalid, match="Is a directory"):
        load(tmp_path, environ={})


def test_a_variable_below_a_plain_value_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="TIDEMILL_NODE__NAME"):
        load(write(tmp_path, "node = 3\n"), environ={"TIDEMILL_NODE__NAME": "x"})


def test_a_named_file_that_is_absent_is_refused_and_an_unnamed_one_means_defaults(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"absent\.toml"):
        load(tmp_path / "absent.toml", environ={})
    assert load(None, environ={}).node.name == "node-1"


def test_variables_are_filled_in_and_the_environment_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "[node]\nname = '${NAME}'\nhttp = '127.0.0.1:1'\n")
    config = load(path, environ={"NAME": "n7", "TIDEMILL_NODE__HTTP": "127.0.0.1:2"})
    assert (config.node.name, config.node.http) == ("n7", "127.0.0.1:2")


def test_a_quote_in_a_variable_cannot_end_the_string_it_is_in(tmp_path: Path) -> None:
    path = write(tmp_path, '[node]\nname = "${NAME}"\n')
    assert load(path, environ={"NAME": 'a"b\\c'}).node.name == 'a"b\\c'


def test_a_pipeline_file_is_found_beside_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, "[pipeline.p]\nfile = 'p.py'\n")
    assert load(path, environ={}).pipeline["p"].file == str(tmp_path / "p.py")


def test_shapes_and_http_are_set_by_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "tidemill.toml"
    path.write_text(
        '[shapes]\nsecret = "${SHAPES}"\nallowed_origins = ["https://shop.example"]\nmemory_mb = 7\nchunk_kb = 3\n'
        "cache_live_s = 9\nbacklog_s = 2.5\n[http]\nper_address = 5\nheader_kb = 16\n"
    )
    config = load(path, environ={"SHAPES": "s3"})
    settings = shape_settings(config.shapes)
    assert (settings.secret, settings.allowed_origins) == ("s3", ("https://shop.example",))
    assert (settings.memory_bytes, settings.limits.chunk_bytes) == (7 << 20, 3 << 10)
    assert (settings.cache.live_s, settings.backlog.age_s) == (9, 2.5)
    limits = http_limits(config.http)
    assert (limits.per_address, limits.header_bytes) == (5, 16 << 10)
    assert shape_settings(ShapesSection()) == ShapeSettings(), "defaults of both are one"
    assert http_limits(HttpSection()) == HttpLimits()
    path.write_text('[shapes]\nallowed_origins = ["shop.example"]\n')
    with pytest.raises(Invalid, match="allowed_origins"):
        load(path, environ={})
