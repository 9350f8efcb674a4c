"""A page in Chromium: what it must never do, its contrast, and the processor time of its scripts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.waiting import DEADLINE_S, PIECE_S

WAIT_MS = DEADLINE_S * 1000
WIDE, NARROW = (1400, 900), (400, 800)

CONTRAST = """() => {
  const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const light = (rgb) => rgb.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; })
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.unshift(parse(getComputedStyle(at).backgroundColor));
    return layers.reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility({ visibilityProperty: true }) || element.closest(".hidden, .skip")) continue;
    if (element.matches(":disabled")) continue;
    const back = behind(element), ink = over(parse(getComputedStyle(element).color), back);
    const [low, high] = [light(back), light(ink)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)} on ${back}`);
  }
  return found;
}"""


class Watched:
    """A page, and what it did wrong."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("response", lambda got: self.faults.append(f"{got.status} {got.url}") if got.status >= 400 else None)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")

    def open(self, view: str) -> None:
        self.page.goto(f"{self.url}/#/{view}")

    def check(self) -> None:
        """Check that nothing failed, that nothing is wider than the window, and that every text is readable."""
        assert self.faults == []
        width, seen = self.page.evaluate("() => [innerWidth, document.documentElement.scrollWidth]")
        assert seen <= width, f"the page is {seen} px wide in a window of {width} px"
        assert self.page.evaluate(CONTRAST) == []

    def shoot(self, directory: Path, name: str) -> None:
        self.page.screenshot(path=str(directory / f"{name}.png"), full_page=True)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; its test is skipped without Chromium."""
    binary = next((p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), None)
    if binary is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched(
    browser: Any, url: str, size: tuple[int, int] = WIDE, scheme: str = "light", **options: Any
) -> Iterator[Watched]:
    width, height = size
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
    page.set_default_timeout(WAIT_MS)
    seen = Watched(page, url)
    try:
        yield seen
    except BaseException as error:
        error.add_note(f"{page.url} {seen.faults}\n{page.locator('body').inner_text()[:2000]}")
        raise
    finally:
        page.close()


def processor_slowness() -> float:
    """Return how many times more processor time a piece of Python takes now than on an idle machine; at least 1."""
    began_s = time.thread_time()
    for _ in range(20):
        sum(range(200_000))
    return max(1.0, (time.thread_time() - began_s) / 20 / PIECE_S)


class ScriptClock:
    """Processor time that a page's scripts have used, in seconds, without that of other processes."""

    def __init__(self, page: Any) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def read_s(self) -> float:
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "ScriptDuration"))
