"""The live page in a browser, against a running service with real events: it moves, it says what it shows, and it needs nothing from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pipelines.serving.browser import CHROMIUM, Browser
from tests.pipelines.serving.conftest import World
from tests.pipelines.serving.served import Served

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
TOKEN = "w" * 24

# Contrast of each visible text with what lies behind it (WCAG 2.2, 1.4.3).
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (colour, under) => { canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255, v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { const chain = []; for (; e; e = e.parentElement) chain.unshift(getComputedStyle(e).backgroundColor);
    return "rgb(" + chain.reduce((under, c) => `${rgb(c, `rgb(${under})`)}`, "255,255,255") + ")"; };
  const poor = [];
  for (const e of document.querySelectorAll("body *")) {
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()), box = e.getBoundingClientRect();
    if (!text || e.closest("svg, .hidden, .skip, [hidden], option") || box.width < 2) continue;
    const under = behind(e), [a, b] = [light(rgb(getComputedStyle(e).color, under)), light(rgb(under, under))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${e.tagName} ${e.textContent.trim().slice(0, 20)} ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  return poor;
})()
"""


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("page") / "state", world.store, TETHYS_WRITE_TOKENS=TOKEN) as running:
        running.client(TOKEN).push(*world.events(0, 400))
        yield running


def named(browser: Browser) -> list[dict[str, Any]]:
    """What a screen reader finds: role and name."""
    nodes = browser.do("Accessibility.getFullAXTree")["nodes"]
    return [
        {"role": n.get("role", {}).get("value"), "name": n.get("name", {}).get("value", "")} for n in nodes if not n.get("ignored")
    ]  # fmt: skip


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_moves_with_the_events(served: Served, world: World, dark: bool) -> None:
    client = served.client(TOKEN)
    first = 400 + 100 * dark
    with Browser(dark=dark) as browser:
        browser.open(served.address)
        browser.wait("!document.getElementById('token-form').hidden")
        assert browser.value("document.querySelectorAll('#streams button').length") == 0, "nothing is shown without a token"
        browser.value(f"document.getElementById('token').value = '{TOKEN}'; document.querySelector('#token-form button').click()")
        browser.wait("document.querySelectorAll('#streams button').length === 2 && document.querySelector('.l-forecast') !== null")
        before = browser.value("document.getElementById('readout').textContent")
        line = browser.value("document.querySelector('.l-actual').getAttribute('d')")
        browser.wait("document.getElementById('health-text').textContent === 'well'")

        events = world.events(first, first + 20)
        client.push(*events)
        last = next(e for e in reversed(events) if e["unique_id"] == "site-0")
        browser.wait(f"document.getElementById('readout').textContent.startsWith('{last['ds'][:16].replace('T', ' ')}')")
        assert browser.value("document.getElementById('readout').textContent") != before
        assert browser.value("document.querySelector('.l-actual').getAttribute('d')") != line
        for what in (".l-expected", ".a-past", ".a-band", "#surprise .l-small", "#norm .l-small", "#champions li"):
            assert browser.value(f"document.querySelector('{what}') !== null"), what

        wild = {**world.events(first + 20, first + 22)[0], "unique_id": "site-0", "y": 900.0}
        client.push(wild)
        browser.wait("document.getElementById('announce').textContent.includes('outlier')")
        browser.wait("document.querySelectorAll('.m-alarm').length >= 1")  # drawn with the next picture
        assert browser.value("document.querySelectorAll('#last-alarms li').length") >= 1

        # By keyboard alone: to the chart, back along the rows; to the next stream.
        browser.value("document.getElementById('chart').focus()")
        now = browser.value("document.getElementById('readout').textContent")
        browser.press("ArrowLeft", 37)
        assert browser.value("document.getElementById('readout').textContent") != now
        browser.press("End", 35)
        assert "forecast" in browser.value("document.getElementById('readout').textContent")
        browser.value("document.querySelector('#streams button').focus()")
        browser.press("ArrowDown", 40)
        assert browser.value("document.activeElement.dataset.name") == "site-1"
        browser.value("document.activeElement.click()")
        browser.wait("document.getElementById('stream-title').textContent === 'site-1'")
        browser.wait("document.querySelector('#streams [aria-current=true]').dataset.name === 'site-1'")

        # By ear: everything that can be used has a name, and the chart says what it shows.
        found = named(browser)
        usable = ("button", "combobox", "searchbox", "textbox", "img", "image", "heading", "link", "navigation", "complementary")
        assert [n for n in found if n["role"] in usable and not n["name"]] == []
        assert any("expected next" in n["name"] for n in found if n["role"] in ("img", "image"))
        browser.value("document.querySelector('details').open = true")
        browser.wait("document.querySelectorAll('#rows tr').length === 24")
        assert browser.value(CONTRAST) == []
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), "nothing hangs over the edge"
        ground = browser.value("getComputedStyle(document.body).backgroundColor")
        browser.value("document.getElementById('theme').click()")
        assert browser.value("getComputedStyle(document.body).backgroundColor") != ground
        assert browser.value(CONTRAST) == []

        assert {address.split("/")[2] for address in browser.asked if not address.startswith("data:")} == {served.address.split("/")[2]}
        assert [line for line in browser.said if "401" not in line] == []
    client.close()
