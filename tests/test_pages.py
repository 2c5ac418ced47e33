"""The pages and pictures of profile, diff and plan, as a browser shows them: at 1400x900 and 390 wide, light and dark. Where there is no Chromium (Debian: chromium), the pictures' geometry is
compared by the width that their letters have at most; what needs a browser is skipped by name."""
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import browser
import pytest
import torch
from command_line import Residual, runs
from torch import nn

SIZES = [(1400, False), (1400, True), (390, False), (390, True)]
in_a_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="no browser: Debian's package chromium")
# Boxes of what a canvas writes, and whether any two of them touch.
RECORD = """
window.written = [];
const fill = CanvasRenderingContext2D.prototype.fillText, clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...box) { written = written.filter((w) => w.canvas !== this.canvas); clear.apply(this, box); };
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const m = this.measureText(text);
  written.push({ canvas: this.canvas, text, box: [x - m.actualBoundingBoxLeft, y - m.actualBoundingBoxAscent, x + m.actualBoundingBoxRight, y + m.actualBoundingBoxDescent] });
  fill.call(this, text, x, y);
};
window.labels = () => [...document.querySelectorAll("canvas")].map((c) => written.filter((w) => w.canvas === c).map(({ text, box }) => ({ text, box })));
"""
BOXES = "[...document.querySelectorAll('text')].map((t) => { const b = t.getBoundingClientRect(); return { text: t.textContent, box: [b.left, b.top, b.right, b.bottom] }; })"


class AVeryLongNameForABlockOfThisModel(Residual):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a_part_of_the_network_whose_name_is_longer_than_any_legend = nn.Sequential(*(AVeryLongNameForABlockOfThisModel(8) for _ in range(6)))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.a_part_of_the_network_whose_name_is_longer_than_any_legend(self.stem(x))
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Everything that is drawn, of one small model."""
    folder = tmp_path_factory.mktemp("pages")
    plain, rewritten = folder / "net.pt", folder / "net.mem.pt"
    torch.jit.script(Net()).save(str(plain))
    runs("rewrite", plain, "-o", rewritten)
    for kind in ("html", "svg"):
        runs("profile", plain, "--vs", rewritten, "--input", "4x3x32x32", "--plot", folder / f"memory.{kind}")
    runs("plan", plain, "--input", "4x3x32x32", "--points", "5", "--plot", folder / "front.svg")
    (folder / "diff.html").write_text(runs("diff", plain, rewritten, "--format", "html", code=1).stdout)
    return folder


@pytest.fixture(scope="module")
def chromium():
    session = browser.Browser()
    yield session
    session.close()


def touching(labels):
    return [
        (a["text"], b["text"]) for i, a in enumerate(labels) for b in labels[:i]
        if a["box"][0] < b["box"][2] and b["box"][0] < a["box"][2] and a["box"][1] < b["box"][3] and b["box"][1] < a["box"][3]
    ]


def luminance(pixel):
    return sum(pixel) / 3


def no_sideways_scrolling(chromium):
    return chromium.ask("document.documentElement.scrollWidth <= window.innerWidth")


@in_a_browser
@pytest.mark.parametrize("width, dark", SIZES)
def test_charts_take_the_windows_width(made, chromium, width, dark, tmp_path):
    chromium.open(made / "memory.html", width, dark=dark, before=RECORD)
    assert no_sideways_scrolling(chromium)
    widths = chromium.ask("[...document.querySelectorAll('canvas')].map((c) => c.getBoundingClientRect().width)")
    assert len(widths) == 2 and min(widths) > width - 60
    for labels in chromium.ask("labels()"):
        assert len(labels) > 4 and touching(labels) == []
        assert all(left >= 0 and right <= width for left, _, right, _ in (w["box"] for w in labels))
    picture = chromium.picture(tmp_path / "page.png")
    corner = luminance(picture.getpixel((2, 2)))
    assert corner < 60 if dark else corner > 230
    # Colours of the first group reach from the chart's one end to where its step ends.
    left, top, height = chromium.ask("(() => { const b = document.querySelector('canvas').getBoundingClientRect(); return [b.left, b.top, b.height]; })()")
    row = [picture.getpixel((x, round(top + height - 44))) for x in range(round(left) + 76, width - 30)]
    assert sum(max(p) - min(p) > 30 for p in row) > 0.5 * len(row)


@in_a_browser
def test_one_cursor_over_both_charts(made, chromium):
    chromium.open(made / "memory.html", 1400)
    boxes = chromium.ask("[...document.querySelectorAll('canvas')].map((c) => { const b = c.getBoundingClientRect(); return [b.left, b.top, b.bottom]; })")
    assert boxes[-1][2] <= 900  # both are seen at once
    x = round(boxes[0][0]) + 500
    before = chromium.picture()
    chromium.mouse("mouseMoved", x, boxes[0][1] + 3)
    after = chromium.picture()
    for _, top, bottom in boxes:
        column = [(before.getpixel((x, y)), after.getpixel((x, y))) for y in range(round(top) + 10, round(bottom) - 45)]
        assert sum(a != b for a, b in column) > 0.3 * len(column)
    tip = chromium.ask("[...document.querySelectorAll('#tip tr')].map((r) => [...r.children].map((c) => c.textContent))")
    assert all(len(row) == 3 for row in tip) and [Path(title).name for title in tip[0][1:]] == ["net.pt", "net.mem.pt"]
    assert [row for row in tip if row[0] == "live" and all("B" in cell for cell in row[1:])]


@in_a_browser
def test_the_mouse_zooms(made, chromium):
    chromium.open(made / "memory.html", 1400, before=RECORD)
    times = lambda: [w["text"] for w in chromium.ask("labels()[1]") if w["text"].endswith(" ms")]  # noqa: E731
    all_of_it = times()
    top = chromium.ask("document.querySelector('canvas').getBoundingClientRect().top")
    chromium.mouse("mousePressed", 600, top + 50, button="left", clickCount=1)
    chromium.mouse("mouseMoved", 800, top + 50, button="left", buttons=1)
    chromium.mouse("mouseReleased", 800, top + 50, button="left", clickCount=1)
    assert times() != all_of_it
    chromium.ask("document.querySelector('button[title=\"the whole step\"]').click()")
    assert times() == all_of_it
    chromium.mouse("mouseWheel", 600, top + 50, deltaX=0, deltaY=-100)  # without Ctrl the page scrolls
    assert times() == all_of_it
    chromium.mouse("mouseWheel", 600, top + 50, deltaX=0, deltaY=-100, modifiers=2)
    assert times() != all_of_it


@in_a_browser
@pytest.mark.parametrize("dark", (False, True))
def test_touch_reads_and_zooms(made, chromium, dark):
    chromium.open(made / "memory.html", 390, dark=dark, touch=True, before=RECORD)
    top = chromium.ask("document.querySelector('canvas').getBoundingClientRect().top")
    chromium.touch("touchStart", (200, top + 60))
    chromium.touch("touchEnd")
    box = chromium.ask("(() => { const b = document.getElementById('tip').getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })()")
    assert 0 <= box[0] < box[2] <= 390 and 0 <= box[1] < box[3] <= 900, "what was read is in the window"
    assert not box[1] <= top + 60 <= box[3], "and not below the finger"
    before = chromium.ask("labels()[0].map((w) => w.text)")
    chromium.touch("touchStart", (180, top + 60), (240, top + 60))
    chromium.touch("touchMove", (120, top + 60), (300, top + 60))
    chromium.touch("touchEnd")
    assert chromium.ask("labels()[0].map((w) => w.text)") != before
    assert touching(chromium.ask("labels()[0]")) == []


@in_a_browser
@pytest.mark.parametrize("width, dark", SIZES)
def test_the_table_says_what_its_columns_are(made, chromium, width, dark):
    chromium.open(made / "memory.html", width, dark=dark)
    head = chromium.ask("[...document.querySelectorAll('#modules thead tr')].map((r) => [...r.children].map((c) => c.textContent))")
    files = head[1][:2]
    assert head[0] == ["module", "type", "saved", "forward", "backward", "time"] and head[1] == [*files, "ratio"] * 4
    assert [Path(f).name for f in files] == ["net.pt", "net.mem.pt"]
    model = chromium.ask("[...document.querySelector('#modules tbody tr').children].map((c) => c.textContent)")
    assert len(model) == 14 and re.fullmatch(r"\.\d\d", model[4])
    assert "grey: backward" in chromium.ask("document.getElementById('keys').textContent")
    assert no_sideways_scrolling(chromium)


@in_a_browser
@pytest.mark.parametrize("width, dark", SIZES)
def test_diff_side_by_side_or_stacked(made, chromium, width, dark, tmp_path):
    chromium.open(made / "diff.html", width, dark=dark)
    assert no_sideways_scrolling(chromium)
    assert (luminance(chromium.picture(tmp_path / "page.png").getpixel((2, 2))) < 60) == dark
    tables = chromium.ask("""[...document.querySelectorAll('details[open] > table.code')].map((t) => [...t.rows].filter((r) => !r.className).map((r) =>
      [...r.cells].filter((c) => c.offsetWidth).map((c) => { const b = c.getBoundingClientRect(); return [b.left, b.top, b.width, c.textContent]; })))""")
    assert tables
    for rows in tables:
        for row in rows:
            texts = row[1::2]
            assert min(w for _, _, w, _ in texts) > (270 if width == 390 else 500)
            if width == 390 and len(texts) == 2:
                assert texts[0][0] == texts[1][0] and texts[0][1] < texts[1][1], "one below the other"
            elif width == 1400:
                assert len(row) == 4
    # Columns keep their widths where a table begins with folded lines.
    first = chromium.ask("[...document.querySelectorAll('table.code')].map((t) => [t.rows[0].className, t.querySelectorAll('col').length])")
    assert any(name == "gap" for name, _ in first) and all(n == 4 for _, n in first)
    # What torch.nn brings is folded, the model's own is open.
    folded = chromium.ask("[...document.querySelectorAll('#of_pytorch > details > summary')].map((s) => s.textContent)")
    assert not chromium.ask("document.getElementById('of_pytorch').open") and any("Conv2d" in f for f in folded)
    assert not any("AVeryLongName" in f for f in folded)


@in_a_browser
@pytest.mark.parametrize("name", ("memory.svg", "front.svg"))
@pytest.mark.parametrize("width, dark", SIZES)
def test_pictures_in_a_browser(made, chromium, name, width, dark):
    chromium.open(made / name, width, dark=dark)
    assert touching(chromium.ask(BOXES)) == []
    frame = chromium.ask("(() => { const b = document.documentElement.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })()")
    for label in chromium.ask(BOXES):
        assert frame[0] <= label["box"][0] and label["box"][2] <= frame[2] and frame[1] <= label["box"][1] and label["box"][3] <= frame[3], label["text"]
    assert (luminance(chromium.picture().getpixel((3, 3))) < 60) == dark


def boxes(svg):
    """Of a picture's horizontal texts, where they are at most."""
    labels = []
    for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if t.get("transform"):
            continue
        kind = t.get("class", "").split()
        size = 15 if "title" in kind else 11.5
        width = len(t.text) * size * (0.7 if {"title", "halo"} & set(kind) else 0.62)
        x, y = float(t.get("x")), float(t.get("y"))
        left = x - width if "end" in kind else x - width / 2 if "middle" in kind else x
        labels.append({"text": t.text, "box": [left, y - 0.75 * size, left + width, y + 0.2 * size]})
    return labels


@pytest.mark.parametrize("name", ("memory.svg", "front.svg"))
def test_pictures_without_a_browser(made, name):
    svg = (made / name).read_text()
    root = ElementTree.fromstring(svg)
    assert touching(boxes(svg)) == [] and "prefers-color-scheme:dark" in svg
    assert all(0 <= box[0] and box[2] <= float(root.get("width")) for box in (w["box"] for w in boxes(svg)))


def test_the_front_tells_the_smallest_budget(made):
    svg = (made / "front.svg").read_text()
    label, = [w for w in boxes(svg) if w["text"].startswith("smallest budget: ")]
    front = json.loads(runs("plan", made / "net.pt", "--input", "4x3x32x32", "--points", "5", "--json", "-").stdout)
    assert re.fullmatch(r"smallest budget: [\d.]+ [KM]iB, [\d.]+ %", label["text"]) and front["smallest_budget"] > 0
    grid = [tuple(float(e.get(k)) for k in ("x1", "y1", "x2", "y2")) for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}line")]
    left, top, right, bottom = min(g[0] for g in grid), min(g[1] for g in grid), max(g[2] for g in grid), max(g[3] for g in grid)
    assert left <= label["box"][0] and label["box"][2] <= right + 30 and top <= label["box"][1] and label["box"][3] <= bottom


def test_the_pictures_grey_is_explained(made):
    assert "grey: backward runs" in (made / "memory.svg").read_text()
