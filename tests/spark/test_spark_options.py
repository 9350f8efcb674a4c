"""Options of `format("tidemill")` and the cluster that they select, without a session."""

from __future__ import annotations

import io
import pickle
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql.worker import lookup_data_sources

from tidemill.base.errors import InvalidError
from tidemill.shards.read.holds import as_of_ms
from tidemill.spark.settings import find_cluster
from tidemill.spark.source import TidemillSource
from tidemill.spark.source.options import BATCH, CHANGES, STREAM, WRITE, SourceOptions

ROOT = Path(__file__).parents[2]
MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z


def test_spark_finds_the_source_by_itself_and_workers_by_its_name() -> None:
    out = io.BytesIO()
    lookup_data_sources._main(io.BytesIO(), out)
    found = out.getvalue()
    name = TidemillSource.name().encode()
    assert len(name).to_bytes(4, "big") + name in found
    assert b"tidemill.spark.source" in found


def test_the_wheel_carries_every_package() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert sorted(wheel["packages"]) == sorted(f"src/{p.parent.name}" for p in (ROOT / "src").glob("*/__init__.py"))


def test_an_unknown_option_is_refused_with_the_nearest_name_and_all_of_them() -> None:
    with pytest.raises(InvalidError, match=r"option=tabel.*mean table\? Known are config, objects,.*as_of"):
        SourceOptions({"tabel": "t"})
    with pytest.raises(InvalidError, match=r"option=zzz. Known are"):
        SourceOptions({"zzz": "t"})
    with pytest.raises(InvalidError, match="has no effect on a batch read: option=max_rows"):
        SourceOptions({"TABLE": "t", "max_rows": "3"}).check_applicable(BATCH, "a batch read")


@pytest.mark.parametrize("name", ["table", "Table", "path", "shard", "Shard"])
def test_a_table_is_named_by_option_or_path_or_by_the_earlier_option(name: str) -> None:
    options = SourceOptions({name: "t"})
    assert options.shard == "t"
    for names in (BATCH, CHANGES, WRITE):
        options.check_applicable(names, "this")


@pytest.mark.parametrize("two", [("table", "path"), ("path", "shard"), ("table", "shard")])
def test_a_table_is_not_named_by_two_names(two: tuple[str, str]) -> None:
    assert SourceOptions(dict.fromkeys(two, "t")).shard == "t"
    with pytest.raises(InvalidError, match=f"two tables are named: {two[0]}=t {two[1]}=u. Name only one"):
        _ = SourceOptions(dict(zip(two, ("t", "u"), strict=True))).shard


def test_with_a_source_the_option_table_names_a_captured_table() -> None:
    options = SourceOptions({"source": "capture/shop", "table": "public.orders"})
    assert options.shard == ""
    options.check_applicable(STREAM, "a stream")
    with pytest.raises(InvalidError, match="has no effect on a stream: option=shard"):
        SourceOptions({"source": "capture/shop", "shard": "t"}).check_applicable(STREAM, "a stream")


def test_the_earlier_option_is_accepted_and_not_suggested() -> None:
    with pytest.raises(InvalidError, match="option=shards") as found:
        SourceOptions({"shards": "t"})
    assert "shard," not in str(found.value) and "mean shard" not in str(found.value)


def test_of_the_properties_of_a_table_only_its_options_are_options() -> None:
    properties = {"provider": "tidemill", "owner": "me", "a": "b", "location": "t", "path": "t"}
    options = SourceOptions({**properties, "as_of": "11", "option.as_of": "11"})
    assert options.as_text() == {"as_of": "11", "path": "t"}
    with pytest.raises(InvalidError, match="Did you mean table"):
        SourceOptions({**properties, "option.tabel": "t"})


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        ("latest", None),
        (" Latest ", None),
        (None, None),
        (str(MS), MS),
        (MS, MS),
        ("2026-01-01T00:00:00Z", MS),
        ("2026-01-01", MS),
        ("2026-01-01 00:00:00.250", MS + 250),
        ("2026-01-01T02:00:00.2509+02:00", MS + 250),
        (datetime(2026, 1, 1), MS),
        (datetime(2026, 1, 1, tzinfo=UTC), MS),
        ("1969-12-31T23:59:59.999Z", -1),
        (np.int64(MS), MS),
    ],
)
def test_a_time_is_ms_or_iso_text_or_latest(given: str | int | datetime | None, ms: int | None) -> None:
    assert as_of_ms(given) == ms


@pytest.mark.parametrize("text", ["yesterday", "12.5", "", "2026-13-01", "١٢", pytest.param("9" * 5000, id="long")])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="as_of is not a time"):
        as_of_ms(text)


def cluster(root: Path, name: str) -> tuple[Path, str, str]:
    """Return (configuration file, objects, consensus) of an existing cluster."""
    data = root / name
    data.mkdir()
    (data / "consensus.db").touch()
    file = data / "tidemill.toml"
    file.write_text(f"[node]\ndata = '{data}'\n")
    return file, f"file://{data}/objects", f"sqlite://{data}/consensus.db"


def test_the_nearest_word_about_the_cluster_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, *named = cluster(tmp_path, "named")
    other, *configured = cluster(tmp_path, "configured")
    _, *given = cluster(tmp_path, "given")
    _, *reported = cluster(tmp_path, "told")
    registered = dict(zip(("objects", "consensus"), reported, strict=True))
    env = {"TIDEMILL_CONFIG": str(other)}

    def found(*options: str, registered: dict[str, str] | None = None, env: dict[str, str]) -> list[str]:
        urls = find_cluster(*options, registered=registered, environ=env)
        return [urls.objects, urls.consensus]

    assert found(*given, str(file), registered=registered, env=env) == given
    assert found("", given[1], str(file), env=env) == [named[0], given[1]]
    assert found("", "", str(file), registered=registered, env=env) == named
    assert found(registered=registered, env=env) == reported
    assert found(env=env) == configured
    both = {"TIDEMILL_OBJECTS__URL": reported[0], "TIDEMILL_CONSENSUS__URL": reported[1]}
    assert found(env={**env, **both}) == reported
    assert found("", "", str(file), env={**env, **both}) == named
    overlaid = {**env, "TIDEMILL_CONSENSUS__URL": given[1]}
    assert found(env=overlaid) == [configured[0], given[1]]
    monkeypatch.chdir(file.parent)
    assert found(env={}) == named


def test_where_no_cluster_is_reading_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidError, match=r"there is no cluster here.*tidemill\.toml"):
        find_cluster(environ={})
    with pytest.raises(InvalidError, match="no such configuration file"):
        find_cluster(config="elsewhere.toml", environ={})
    assert not list(tmp_path.iterdir())


def test_what_was_found_does_not_travel(tmp_path: Path) -> None:
    file, objects, _ = cluster(tmp_path, "c")
    options = SourceOptions({"shard": "t", "config": str(file)})
    assert options.urls.objects == objects
    assert objects.encode() not in pickle.dumps(options)
