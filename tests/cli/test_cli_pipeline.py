"""`tidemill pipeline describe` of what the catalogue and the drivers' reports say, with nothing running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidemill.base.marks import Report
from tidemill.cli.context import stores
from tidemill.cli.main import app
from tidemill.consensus.board import Board
from tidemill.metastore.catalogue import PipelineRow

MADE = {"sums": {"clicks": ("product",), "lines": ("item",), "names": ()}, "top": {"sums": ()}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tidemill.toml"
    path.write_text(f'[node]\ndata = "{tmp_path}/data"\n')
    (tmp_path / "data").mkdir()
    return path


def describe(config: Path, *more: str) -> str:
    done = CliRunner().invoke(app, ["pipeline", "describe", "p", "--config", str(config), *more])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def put(config: Path, row: PipelineRow, **facts: Any) -> None:
    with stores(config) as opened:
        opened.portal.call(opened.catalogue.put(row))
        for process, tables in facts.items():
            report = Report(f"pipeline:p:{process}", opened.clock.now_ms(), (), facts={"tables": tables})
            opened.portal.call(Board(opened.consensus, opened.rand).publish(report))


def test_a_derived_table_is_described_with_its_inputs_how_it_is_kept_and_why(config: Path) -> None:
    row = PipelineRow("p", {"clicks": "topic:clicks", "sums": "derived", "top": "derived"}, "", MADE)
    put(config, row)
    told = describe(config)
    assert "sums ← clicks, lines, names  upper=0" in told and "top ← sums  " in told and "clicks ← topic:clicks" in told
    assert "by group: by=… groups it by clicks (product), lines (item); a change in names, given whole, c" in told
    assert "whole: no by=… says which columns group it\n" in told
    first = {"sums": {"recomputed": 1, "groups": -1, "whole_because": "names, which is given whole, changed"}}
    put(config, row, a=first, b={"sums": {"recomputed": 0, "groups": -1, "whole_because": ""}})
    assert "computes everything; last round whole, for names, which is given whole, changed\n" in describe(config)
    put(config, row, b={"sums": {"recomputed": 7, "groups": 1234, "whole_because": ""}})
    assert "computes everything; last round 1,234 groups\n" in describe(config)
    tables = {t["table"]: t for t in json.loads(describe(config, "--json").splitlines()[-1])["tables"]}
    assert tables["sums"]["inputs"] == {"clicks": ["product"], "lines": ["item"], "names": []}
    assert [tables["sums"][k] for k in ("input", "maintained", "last_groups")] == ["derived", "by group", 1234]
    assert "inputs" not in tables["clicks"]


def test_a_derived_table_of_an_older_driver_is_described_without_its_inputs(config: Path) -> None:
    put(config, PipelineRow("p", {"sums": "derived"}), a={"sums": {"recomputed": 3, "groups": -1}})
    assert "sums ← derived  " in describe(config)
    put(config, PipelineRow("p", {"sums": "derived"}, "", {"sums": {"t": ("k",)}}))
    assert "by=… groups it by t (k); last round whole\n" in describe(config)
