"""The HTML page without a browser: self-contained, escaped, small enough."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from records import HOSTILE, record, report
from traces import MIB

from pytest_vram.ledger import Failure, Ledger
from pytest_vram.marker import Budget
from pytest_vram.record import ScalerStep
from pytest_vram.reports.html import page
from pytest_vram.reports.model import Unmeasured
from pytest_vram.timeline import Timeline


class Page(HTMLParser):
    """Elements, and the text of each kind that matters."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "br", "wbr"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        self.handle_data(" " if tag in ("td", "th", "li", "p", "caption", "summary") else "")
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        for tag in set(self._open):
            self.texts[tag][-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def data_of(text: str, at: int = 0) -> dict:
    """The data block of one test, as a browser hands it to the script."""
    (block,) = re.findall(rf'<script type="application/json" id="t{at}-data">(.*?)</script>', text)
    return json.loads(block)


def sums(steps, unit=1):
    total, out = 0, []
    for step in steps:
        total += step
        out.append(total * unit)
    return out


def test_the_page_needs_nothing_but_itself():
    made = Page(page(report(record())))
    assert [one for one in made.all("script") if "src" in one] == []
    assert made.all("link") == [{"rel": "icon", "href": "data:,"}]
    assert not [1 for _, attributes in made.elements if (attributes.get("src") or "")[:4] == "http"]
    assert made.all("iframe") == made.all("img") == made.all("object") == []


def test_only_the_pages_own_script_may_run():
    text = page(report(record()))
    (policy,) = [
        one["content"]
        for one in Page(text).all("meta")
        if one.get("http-equiv") == "Content-Security-Policy"
    ]
    script = re.findall(r"<script>(.*?)</script>", text, re.S)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_a_chart_gets_the_timeline_to_the_byte():
    made = record(budget=Budget(peak=80 * MIB), baseline={})
    timeline = made.timeline
    data = data_of(page(report(made)))
    line = data["timeline"]
    assert sums(line["at"]) == list(timeline.at)
    assert sums(line["reserved"], line["unit"]) == list(timeline.reserved)
    assert list(line["bills"]) == list(timeline.bills)
    for bill, values in timeline.bills.items():
        assert sums(line["bills"][bill], line["unit"]) == list(values)
    assert data["lines"] == [["budget", 80 * MIB], ["baseline", 70 * MIB]]
    start, end, size, *names = max(line["spans"], key=lambda span: span[2])
    assert (end - start, size) == (3, 30 * MIB)
    assert [line["names"][at] for at in names] == [
        "activations",
        "float16[3, 10]",
        "aten::mm",
        "lm.h",
        "train.py:41 forward",
    ]


def test_sizes_that_are_no_multiples_of_512_stay_exact():
    made = record()
    odd = replace(made.timeline, reserved=tuple(size + 1 for size in made.timeline.reserved))
    line = data_of(page(report(replace(made, timeline=odd))))["timeline"]
    assert line["unit"] == 1
    assert sums(line["reserved"]) == list(odd.reserved)


def test_tables_say_what_changed():
    text = page(report(record(baseline={}, saved=50 * MIB, measured=True)))
    words = " ".join(Page(text).texts["main"][0].split())
    assert "Totals baseline estimate now change peak allocated 70.0 MiB 70.0 MiB 90.0 MiB" in words
    assert "Ledger at the peak (backward, step 2) baseline estimate now change" in words
    assert "activations 30.0 MiB 30.0 MiB 50.0 MiB +20.0 MiB +66.7 %" in words
    assert "50.0 MiB float16[3, 10] activations aten::mm lm.h train.py:41 forward" in words
    assert "fail: regression VRAM regression: peak allocated 90.0 MiB" in words


def test_what_else_the_page_says():
    steps = (ScalerStep(1, 65536.0, 32768.0, True), ScalerStep(2, 32768.0, float("inf"), False))
    made = replace(
        record(scaler=steps, losses=(2.5, float("nan"))),
        notes=("a note",),
        extra={"seconds per step": 0.25},
    )
    text = page(
        report(
            made,
            attempts=(replace(made, outcome="rerun"),),
            unmeasured=(Unmeasured("t::x", "skipped in setup"),),
            stopped="interrupted",
            extra={"host": "gpu-7"},
        )
    )
    words = " ".join(Page(text).texts["body"][0].split())
    for sentence in (
        "The run was not complete: interrupted.",
        "t::x: skipped in setup",
        "Loss scale after each step, 1 skipped",
        "1 65536 32768 yes, step skipped",
        "Losses: 2.5, nan",
        "simulation on a100-80gb (simulated): 0.2 s",
        "a note",
        "attempt 1: rerun, ok, peak 70.0 MiB",
        "seconds per step: 0.25",
        'host: "gpu-7"',
        "torch 2.13.0, transformers 5.1.0",
    ):
        assert sentence in words
    assert data_of(text)["scaler"] == [[1, 65536, 32768, 1], [2, 32768, None, 0]]


def test_out_of_memory_shows_what_was_alive_then():
    made = record()
    failure = Failure(9 * MIB, 0, 0, 80 * MIB, "oom", "aten::mm", "lm", "a.py:1", made.ledger.peak)
    text = page(report(replace(made, ledger=replace(made.ledger, failure=failure))))
    assert "Largest allocations alive when memory ran out" in text


def test_without_tests_and_without_a_ledger():
    assert "GPU memory of 0 tests" in Page(page(report())).texts["h1"]
    text = page(report(replace(record(), ledger=None, timeline=None)))
    assert "GPU memory of 1 test" in Page(text).texts["h1"]
    assert data_of(text)["timeline"] is None


# ---- hostile input


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_stays_text(name):
    clean = page(report(record("test_it", scaler=(ScalerStep(1, 2.0, 1.0, True),))))
    made = record(name, scaler=(ScalerStep(1, 2.0, 1.0, True),))
    live = replace(made.ledger.largest[0], dtype=name, operator=name, module=name, frame=name)
    ledger: Ledger = replace(made.ledger, peak=replace(made.ledger.peak, largest=(live,) * 3))
    spans = tuple(replace(span, live=live) for span in made.timeline.spans)
    timeline: Timeline = replace(made.timeline, spans=spans)
    environment = replace(made.environment, gpu=name, versions={name: name})
    text = page(
        report(
            replace(
                made,
                ledger=ledger,
                timeline=timeline,
                environment=environment,
                file=name,
                notes=(name,),
                worker=name,
                findings=(replace(made.findings[0], sentence=name, details=(name,), hint=name),),
                extra={name: name},
            ),
            unmeasured=(Unmeasured(name, name),),
            stale=(name,),
            extra={name: {name: name}},
        )
    )
    assert {tag for tag, _ in Page(text).elements} <= {tag for tag, _ in Page(clean).elements} | {
        "section", "ul", "li", "pre", "details", "strong", "div", "summary", "code",
    }  # fmt: skip
    scripts = Page(text).all("script")
    assert scripts == [{"type": "application/json", "id": "t0-data"}, {}]
    assert not any(
        key.startswith("on") for _, attributes in Page(text).elements for key in attributes
    )
    assert data_of(text)["timeline"]["names"][1].startswith(name)
    assert len(re.findall("<script", text)) == len(re.findall("</script>", text)) == 2


def test_hundreds_of_tests_are_a_page_of_megabytes():
    """The figure to reach is 5 MB for 200 tests; the samples of a timeline are at most 240."""
    one = len(page(report(record())).encode())
    many = len(page(report(*(record(f"test_{n}") for n in range(41)))).encode())
    assert (many - one) / 40 < 24_000
