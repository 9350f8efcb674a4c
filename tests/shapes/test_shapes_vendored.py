"""Vendored scripts: each has its stated hash and licence, and Electric's client is the version of the Node tests."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "src/tidemill/console/static/vendor"
INSTALLED = ROOT / "tests/clients/node_modules/@electric-sql/client"


def test_every_vendored_script_has_its_stated_hash_and_its_licence() -> None:
    text = (VENDOR / "VENDORED.md").read_text()
    stated = dict(re.findall(r"\| `(\S+\.mjs)` \| `([0-9a-f]{64})` \|", text))
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.glob("*.mjs")}
    assert stated == found
    for name in found:
        assert f"`{Path(name).stem}.LICENSE`" in text
        assert (VENDOR / f"{Path(name).stem}.LICENSE").stat().st_size > 1000
    assert {path.suffix for path in VENDOR.iterdir()} == {".mjs", ".LICENSE", ".md"}


def test_the_vendored_client_has_the_pinned_version() -> None:
    text = (VENDOR / "VENDORED.md").read_text()
    pinned = json.loads((ROOT / "tests/clients/package.json").read_text())["dependencies"]["@electric-sql/client"]
    assert f"| `electric-client.mjs` | `@electric-sql/client` (npm) | {pinned} |" in text


@pytest.mark.parametrize("path", sorted(VENDOR.glob("*.mjs")), ids=lambda path: path.name)
def test_a_vendored_script_imports_nothing(path: Path) -> None:
    assert re.search(r"""(^|[;}])import[ {"'(]""", path.read_text()) is None


def test_the_lock_names_no_package_index() -> None:
    assert "resolved" not in (ROOT / "tests/clients/package-lock.json").read_text()


@pytest.mark.node
def test_the_vendored_client_is_the_installed_one() -> None:
    if not INSTALLED.is_dir():
        pytest.skip("the Node packages of tests/clients are not installed: tests/clients/install")
    assert (VENDOR / "electric-client.mjs").read_bytes() == (INSTALLED / "dist/index.browser.mjs").read_bytes()
