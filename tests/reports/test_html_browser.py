"""The HTML page in headless Chromium: it draws, answers to mouse and keyboard, and runs nothing of
what tests are called."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from records import HOSTILE, record, report
from traces import MIB

from pytest_vram.marker import Budget
from pytest_vram.record import ScalerStep
from pytest_vram.reports.html import page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH"
)
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)
SCALER = (ScalerStep(1, 65536.0, 32768.0, True), ScalerStep(2, 32768.0, 32768.0, False))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(10)
    yield driver
    driver.quit()


class Shown:
    """One page in the browser."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.browser = browser
        browser.get_log("browser")
        browser.get(path.as_uri())

    def run(self, script: str, *args: Any) -> Any:
        return self.browser.execute_script(f"return {script}", *args)

    def wait(self, condition: str) -> Any:
        """Until ``condition`` is true: charts are drawn when the browser says they are seen."""
        return self.browser.execute_async_script(
            "const done = arguments[0];"
            f"(function look() {{ const is = {condition};"
            " if (is) done(is); else requestAnimationFrame(look); })()"
        )

    def text(self, selector: str) -> str:
        return self.run("document.querySelector(arguments[0]).innerText", selector)

    def rows(self, selector: str) -> list[str]:
        return self.run(
            "[...document.querySelectorAll(arguments[0])].filter(one => one.offsetParent)"
            ".map(one => one.innerText.replace(/\\s+/g, ' ').trim())",
            selector,
        )

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    @property
    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def show(browser, tmp_path):
    def show(*records, **more):
        path = tmp_path / "report.html"
        path.write_text(page(report(*records, **more)))
        return Shown(browser, path)

    return show


@pytest.fixture
def one(show):
    """A failed test, unfolded, with its chart drawn."""
    budget = Budget(peak=75 * MIB)
    shown = show(record("test_more", budget=budget, baseline={}, saved=50 * MIB, scaler=SCALER))
    shown.wait("document.querySelector('.timeline canvas')")
    return shown


def test_the_page_draws_without_complaint(one):
    assert one.run("document.querySelectorAll('.timeline canvas').length") == 1
    one.run("document.querySelector('.scaler').scrollIntoView()")
    one.wait("document.querySelectorAll('.scaler canvas').length === 1")
    assert one.complaints == []


def colours(shown: Shown) -> set[tuple[int, int, int]]:
    """The colours of the timeline's canvas that cover more than a line does."""
    counts = shown.run(
        """(() => {
          const canvas = document.querySelector('.timeline canvas');
          const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
          const counts = {};
          for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 100) {
            const key = [data[i], data[i + 1], data[i + 2]].map(value => value >> 4).join();
            counts[key] = (counts[key] || 0) + 1;
          }
          return counts;
        })()"""
    )
    return {tuple(map(int, key.split(","))) for key, count in counts.items() if count > 300}


def test_the_chart_has_an_area_for_every_bill(one):
    """Activations are green, parameters blue, optimizer state red in assets/report.css."""
    assert {(0x3C >> 4, 0xA9 >> 4, 0x51 >> 4), (0x42 >> 4, 0x69 >> 4, 0xD0 >> 4)} <= colours(one)


def test_it_begins_at_the_peak_and_says_what_was_alive(one):
    assert one.text(".when") == (
        "backward, step 2: 90.0 MiB allocated, 80.0 MiB reserved (the peak), event 19 of 27"
    )
    assert one.rows(".alive tr") == [
        "parameters 10.0 MiB",
        "gradients 10.0 MiB",
        "optimizer state 20.0 MiB",
        "activations 50.0 MiB",
    ]
    assert one.rows(".biggest tr")[0] == (
        "50.0 MiB float16[3, 10] aten::mm lm.h train.py:41 forward"
    )


def test_the_keyboard_walks_through_the_run(one):
    from selenium.webdriver.common.keys import Keys

    slider = one.find(".walk input")
    slider.send_keys(Keys.HOME)
    assert one.text(".when").startswith("setup: ")
    assert slider.get_attribute("aria-valuetext") in one.text(".when")
    for _ in range(3):
        slider.send_keys(Keys.RIGHT)
    assert "10.0 MiB allocated" in one.text(".when")
    assert one.rows(".alive tr") == ["parameters 10.0 MiB"]
    button = one.find(".to-peak")
    button.send_keys(Keys.ENTER)
    assert "(the peak)" in one.text(".when")


def test_the_mouse_shows_what_is_under_it(one):
    from selenium.webdriver import ActionChains

    chart = one.find(".timeline .u-over")
    width = chart.size["width"]
    ActionChains(one.browser).move_to_element_with_offset(chart, int(-width * 0.49), 0).perform()
    one.wait("document.querySelector('.when').textContent.startsWith('setup')")
    ActionChains(one.browser).move_to_element_with_offset(chart, int(width * 0.49), 0).perform()
    one.wait("document.querySelector('.when').textContent.startsWith('between, step 2')")


def test_dark_and_light_draw_anew(one):
    light = one.run("getComputedStyle(document.body).backgroundColor")
    ink = colours(one)
    one.run(
        "(theme => { theme.value = 'dark'; theme.dispatchEvent(new Event('change')); })"
        "(document.getElementById('theme'))"
    )
    assert light == "rgb(255, 255, 255)"
    assert one.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    one.wait("document.querySelectorAll('.timeline canvas').length === 1")
    assert colours(one) != ink
    assert one.complaints == []


def test_a_link_unfolds_its_test(show):
    shown = show(record("test_a"), record("test_b"))
    assert shown.run("document.querySelectorAll('details.test[open]').length") == 0
    assert shown.run("document.querySelectorAll('canvas').length") == 0
    shown.find('#tests a[href="#t1"]').click()
    shown.wait("document.querySelector('#t1 canvas')")
    assert shown.run("document.querySelector('#t0').open") is False
    assert shown.run("document.activeElement.parentElement.id") == "t1"


def test_charts_that_are_out_of_sight_are_not_kept(show):
    shown = show(*(record(f"test_{n}", baseline={}, saved=50 * MIB) for n in range(12)))
    shown.run("document.querySelectorAll('details.test').forEach(one => one.open = true)")
    shown.wait("document.querySelectorAll('canvas').length > 0")
    shown.run("document.querySelector('#t11').scrollIntoView()")
    shown.wait("document.querySelector('#t11 canvas') && !document.querySelector('#t0 canvas')")
    assert shown.run("document.querySelectorAll('canvas').length") < 6


def test_the_overview_sorts_and_filters(show):
    shown = show(
        record("test_small", saved=5 * MIB),
        record("test_large", baseline={}, saved=50 * MIB),
        record("test_middle"),
    )
    names = "#tests tbody .name"
    shown.find("#tests thead th:nth-child(3) button").click()
    assert [name.partition("::")[2] for name in shown.rows(names)] == [
        "test_large",
        "test_middle",
        "test_small",
    ]
    assert shown.run("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == (
        "descending"
    )
    shown.find("#tests thead th:nth-child(3) button").click()
    assert shown.rows(names)[0].endswith("test_small")
    shown.find("#tests thead th:nth-child(2) button").click()
    assert [name[-6:] for name in shown.rows(names)] == ["_large", "middle", "_small"]
    shown.find("#find").send_keys("MIDDLE")
    assert shown.rows(names) == ["tests/test_a.py::test_middle"]
    kept = "[...document.querySelectorAll('details.test')].filter(one => !one.hidden)"
    assert shown.run(f"{kept}.map(one => one.querySelector('.nodeid').textContent)") == [
        "tests/test_a.py::test_middle"
    ]
    assert shown.text("#found") == "1 of 3 tests"
    shown.find("#find").clear()
    shown.run(
        "(show => { show.value = 'fail'; show.dispatchEvent(new Event('change')); })"
        "(document.getElementById('show'))"
    )
    shown.find("#find").send_keys("test")
    assert shown.rows(names) == ["tests/test_a.py::test_large"]


def test_a_narrow_window_does_not_scroll_sideways(one):
    one.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True},
    )
    try:
        one.run("document.querySelector('.timeline').scrollIntoView()")
        one.wait("document.querySelector('.timeline .uplot')?.offsetWidth < 360")
        assert one.run("document.documentElement.scrollWidth") <= 360
    finally:
        one.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_nothing_runs_of_what_tests_are_called(show):
    shown = show(*(record(name, baseline={}, saved=50 * MIB) for name in HOSTILE))
    shown.wait("document.querySelectorAll('canvas').length > 0")
    assert shown.run("document.querySelectorAll('#tests tbody tr').length") == len(HOSTILE)
    assert shown.run("document.querySelectorAll('img').length") == 0
    assert shown.run("document.querySelectorAll('script:not([type])').length") == 1
    assert shown.complaints == []
    # and if some element did slip in, the policy would stop it
    shown.run(
        "(() => { const made = document.createElement('script');"
        " made.textContent = 'window.evil = 1'; document.body.append(made); })()"
    )
    assert shown.run("window.evil") is None
    assert "Content Security Policy" in "".join(shown.complaints)


def test_every_control_has_a_name_and_headings_are_in_order(one):
    nameless = one.run(
        "[...document.querySelectorAll('input, select, button')].filter(one => "
        "!(one.labels && one.labels.length) && !one.textContent.trim()).length"
    )
    assert nameless == 0
    levels = one.run("[...document.querySelectorAll('h1, h2, h3')].map(one => +one.tagName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    label = one.run("document.querySelector('.timeline .chart').getAttribute('aria-label')")
    assert label == (
        "Allocated memory over the run, stacked by bill: peak 90.0 MiB in backward, step 2; the "
        "slider below walks through it"
    )
