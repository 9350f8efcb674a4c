"""Configuration: bad input is one sentence that names the key and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.base.config import HttpSection, ShapesSection, load
from tidemill.base.errors import Invalid
from tidemill.node.http_limits import HttpLimits
from tidemill.node.served import http_limits, shape_settings
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
        ("[capture.shop]\ndsn = '${SHOP_DSN}'\n", "SHOP_DSN"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(Invalid) as caught:
        load(write(tmp_path, text), environ={})
    assert named in str(caught.value)
    assert caught.value.fix


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
