"""The browser's copy of Electric's client is the version that the Node tests run, byte for byte."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "src/tidemill/console/static/vendor"
INSTALLED = ROOT / "tests/clients/node_modules/@electric-sql/client"


def test_the_vendored_client_has_the_stated_version_and_hash() -> None:
    text = (VENDOR / "VENDORED.md").read_text()
    pinned = json.loads((ROOT / "tests/clients/package.json").read_text())["dependencies"]["@electric-sql/client"]
    assert f"| {pinned} |" in text
    stated = re.search(r"`([0-9a-f]{64})`", text)
    assert stated is not None
    assert hashlib.sha256((VENDOR / "electric-client.mjs").read_bytes()).hexdigest() == stated[1]


def test_the_vendored_client_imports_nothing() -> None:
    assert re.search(r"""(^|[;}])import[ {"'(]""", (VENDOR / "electric-client.mjs").read_text()) is None


def test_the_lock_names_no_package_index() -> None:
    assert "resolved" not in (ROOT / "tests/clients/package-lock.json").read_text()


@pytest.mark.node
def test_the_vendored_client_is_the_installed_one() -> None:
    if not INSTALLED.is_dir():
        pytest.skip("the Node packages of tests/clients are not installed: tests/clients/install")
    assert (VENDOR / "electric-client.mjs").read_bytes() == (INSTALLED / "dist/index.browser.mjs").read_bytes()
