"""`tidemill capture list`: the side topic of a table that is being copied, and since when WAL is retained for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli.context import open_stores
from tidemill.cli.main import app
from tidemill.metastore.catalogue import CaptureTableRow, SideTopicState


@pytest.mark.parametrize(("until_lsn", "since"), [(0, None), (0x1_0000_00FF, "1/FF")])
def test_what_is_set_aside_is_listed(tmp_path: Path, until_lsn: int, since: str | None) -> None:
    config = tmp_path / "tidemill.toml"
    config.write_text(f'[node]\ndata = "{tmp_path / "data"}"\n')
    side_topic = SideTopicState("t", until_lsn=until_lsn, records=12_345, bytes=3 << 20, appended=45)
    with open_stores(config, create=True) as opened:
        row = CaptureTableRow("shop", "public.orders", "shop.public.orders", side_topic=side_topic)
        opened.portal.call(opened.catalogue.change_table("shop", "public.orders", lambda _: row))
    said = CliRunner().invoke(app, ["capture", "list", "--config", str(config)]).stdout
    assert "12,345 changes (3.0 MiB) in the side topic, 45 of them appended to the topic" in said
    assert ("WAL is retained from 1/FF" in said) is (since is not None)
    (reported,) = json.loads(CliRunner().invoke(app, ["capture", "list", "--json", "--config", str(config)]).stdout)
    assert (reported["set_aside_records"], reported["set_aside_bytes"], reported["set_aside_appended"]) == (
        12_345,
        3 << 20,
        45,
    )
    assert reported["wal_kept_since"] == since
