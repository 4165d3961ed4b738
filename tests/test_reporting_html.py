"""The report's page: self-contained, escaped, complete without scripts, and really drawn in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import factories
from attnscope.errors import AttnscopeError
from attnscope.reporting import charts, html
from attnscope.suites import SUITES

HOSTILE = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>&amp; {{ 7 * 7 }}"
VOID = {"br", "meta", "link", "img", "input", "hr"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (360, 800, 1600)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


class Page(HTMLParser):
    """The page taken apart: every tag's attributes, text outside scripts, scripts by id; fails on broken nesting."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self.styles = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            name = self.tags[-1][1].get("id")
            self.scripts[name] = self.scripts.get(name, "") + data
        elif self.open and self.open[-1] == "style":
            self.styles += data
        else:
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def hostile_run():
    """The article's run with a hostile string wherever a record takes one."""
    kernels = tuple(
        replace(k, name=HOSTILE, op=HOSTILE, role=HOSTILE, unit_rule=HOSTILE) for k in factories.kernel_events("naive")
    )
    table = tuple(replace(row, name=HOSTILE) for row in factories.profile("naive").table)
    profile = factories.profile("naive", label=HOSTILE, table=table, expected=(HOSTILE,), surprises=(HOSTILE,))
    tensor = factories.tensor_check(tensor=HOSTILE, kind=HOSTILE, worst=HOSTILE, message=HOSTILE)
    result = factories.result("naive").with_changes(
        implementation=HOSTILE,
        note=HOSTILE,
        kernels=kernels,
        profiles=(replace(profile, trace=HOSTILE),),
        findings=(factories.finding(sentence=HOSTILE, remedy=HOSTILE, evidence=(HOSTILE,), arithmetic=HOSTILE),),
        check=factories.check(tensors=(tensor,), message=HOSTILE),
    )
    rows = (result, factories.failed(HOSTILE, error=HOSTILE), factories.skipped(HOSTILE, HOSTILE))
    return factories.blog_run(results=rows, command=HOSTILE, device=factories.h200(name=HOSTILE))


def test_page_is_self_contained_small_and_well_formed(tmp_path: Path):
    path = tmp_path / "report.html"
    html.write_report([factories.blog_run(), factories.cpu_run()], path)
    assert path.stat().st_size <= html.MAX_PAGE_BYTES
    page = Page(path.read_text())
    assert page.open == []
    for tag, attrs in page.tags:
        loads = [attrs.get(name) or "" for name in ("src", "srcset", "data", "poster", "background")]
        loads += [attrs.get("href") or ""] if tag == "link" else []
        assert not [url for url in loads if url and not url.startswith("data:")], tag
        assert tag not in ("iframe", "object", "embed", "base")
    assert "@import" not in page.styles and "url(" not in page.styles
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'"), "the browser itself refuses the network"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"], "no temporary file is left"


def test_everything_stands_in_tables_and_text():
    page = Page(html.render_report([factories.blog_run()]))
    for said in (
        "sdpa_cudnn 58.9 µs", "the same as sdpa_auto (59.1 µs)", "limit 42.1 µs, bound by exponentials", "62.4 µs",
        "35.9 mJ", "1,040 MiB", "loose ×2.3", "9.2e-03", "hopper (ours)", "needles", "broken", "out on needles",
        "ran past its limit of 120 s", "runs on cpu, not on cuda", "masked_fill without the underscore",
        "saves 126 µs a call", "672 TFLOP/s", "4,020 GB/s", "580.95.05", "ffca45e0c0ffee", "self GPU total",
        "surprise", "Memcpy DtoD (Device -> Device)", "attnscope compare blog",
    ):  # fmt: skip
        assert said in page.words, said


def test_hostile_strings_stay_text():
    text = html.render_report([hostile_run()])
    page = Page(text)
    assert page.open == []
    assert not [a for t, a in page.tags if t == "img" or "onerror" in a]
    assert len(page.scripts) == 3 and "window.pwned = 1" in page.words and "{{ 7 * 7 }}" in page.words
    figures = json.loads(page.scripts["figures"])
    texts = json.dumps(figures)
    assert "<script>" not in texts and "<img" not in texts, "Plotly reads HTML in its texts"
    assert "&lt;script&gt;" in texts


def test_script_json_cannot_leave_its_element():
    text = html.script_json({"a": "</script><!--\u2028", "b": [float("nan"), float("inf"), 1.0]})
    assert "<" not in text and ">" not in text and "\u2028" not in text
    assert json.loads(text) == {"a": "</script><!--\u2028", "b": [None, None, 1.0]}


def test_figures_are_what_plotly_takes():
    graph_objects = pytest.importorskip("plotly.graph_objects")
    run = factories.blog_run()
    made = charts.workload_charts(run.results, run.modes)
    assert [c.title for c in made] == [
        "Forward speed", "Backward speed", "Timeline of one call", "Error against its budget", "Peak memory", "Energy",
    ]  # fmt: skip
    for view in (view for chart in made for view in chart.views):
        text = re.sub(r"var\(--[a-z0-9-]+\)", "#123456", json.dumps(view.figure))
        graph_objects.Figure(json.loads(text))  # raises on an unknown property or value


def test_colours_of_the_figures_are_defined_in_the_page():
    run = factories.blog_run()
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", json.dumps([
        view.figure for chart in charts.workload_charts(run.results, run.modes) for view in chart.views
    ])))  # fmt: skip
    styles = Page(html.render_report([run])).styles
    light, dark = styles.split('[data-theme="dark"]', 1)
    names = {color for _, color in charts.ROLE_COLORS} | set(charts.TENSOR_COLORS.values()) | {"--role-other"}
    for name in used | names:
        assert f"{name}:" in light and f"{name}:" in dark.split("}", 1)[0], name


def test_speed_chart_shows_noise_limit_and_both_figures():
    run = factories.blog_run()
    chart = charts.speed_chart(run.results, "forward")
    assert chart is not None and "bound by exponentials" in chart.caption
    bars, sustained = chart.views[0].figure["data"]
    at = [r.implementation for r in run.results if r.forward].index("sdpa_cudnn")
    m = run.results[at].forward
    assert m is not None and bars["x"][at] == pytest.approx(m.tflop_per_s)
    high, low = bars["error_x"]["array"][at], bars["error_x"]["arrayminus"][at]
    assert bars["x"][at] + high == pytest.approx(m.tflop_per_s * m.time_ms_median / m.time_ms_p20)
    assert bars["x"][at] - low == pytest.approx(m.tflop_per_s * m.time_ms_median / m.time_ms_p80)
    assert sustained["x"][at] == pytest.approx(m.tflop_per_s * m.time_ms_median / m.sustained_ms_median)
    limit = chart.views[0].figure["layout"]["shapes"][0]["x0"]
    assert limit == pytest.approx(m.tflop_per_s / m.vs_limit)
    assert chart.views[1].figure["layout"]["shapes"][0]["x0"] == pytest.approx(42.1)


def test_timeline_is_to_one_scale():
    chart = charts.timeline_chart(factories.blog_run().results, ("forward", "backward"))
    assert chart is not None and [view.label for view in chart.views] == ["forward", "backward"]
    (bars,) = chart.views[0].figure["data"]
    low, high = chart.views[0].figure["layout"]["xaxis"]["range"]
    assert low < 0 and high == pytest.approx(1.01 * (2557 + 19 * 1.4), rel=0.01)
    assert 58.9 in bars["x"] and max(base + x for base, x in zip(bars["base"], bars["x"], strict=True)) < high


def test_error_that_is_zero_or_not_finite_is_told():
    tensors = (
        factories.tensor_check("out", "plain", 0.0),
        factories.tensor_check("dq", "hard", row_rel_error_max=float("inf"), passed=False),
    )
    result = factories.wrong(check=factories.check(1.0, grade="failed", tensors=tensors, message=""))
    page = Page(html.render_report([factories.blog_run(results=(result,))]))
    assert "not finite" in page.words
    points = [x for f in json.loads(page.scripts["figures"]).values() for trace in f[0]["data"] for x in trace["x"]]
    assert points == [charts.RATIO_FLOOR]


def test_runs_without_anything_make_a_page():
    nothing = factories.blog_run(results=(factories.skipped(),), limits=None)
    page = Page(html.render_report([nothing]))
    assert "Nothing ran on this workload" in page.words and "plotly" not in page.scripts
    assert "Not measured in this run" in page.words
    empty = Page(html.render_report([factories.blog_run(results=())]))
    assert "nothing right was timed" in empty.words


def test_a_suite_is_told_in_a_table():
    workloads = tuple(f"B1,H16,L{n},D64,bf16" for n in (128, 256, 512, 1024, 2048))
    results = tuple(factories.result("sdpa_cudnn", workload=w) for w in workloads)
    page = Page(html.render_report([factories.blog_run(workloads=workloads, results=results)]))
    assert "card" not in [a.get("class") for _, a in page.tags]
    assert page.words.count("B1,H16,L2048,D64,bf16") == 2


def sizes_by_level(run) -> list[int]:
    return [len(html._render([run], html.plotly_script(), level, lambda trace: None).encode()) for level in html.LEVELS]


@pytest.mark.parametrize(
    ("level", "said", "kept"),
    [
        (html.PACKED, "", "One call, in order"),
        (html.NO_KERNEL_TABLES, "leaves out the kernels' tables", "self GPU total"),
        (html.NO_PROFILES, "leaves out the profiles", "Timeline of one call"),
        (html.BARE, "leaves out the profiles and charts", "35.9 mJ"),
    ],
)
def test_a_page_that_grows_too_large_says_less_and_says_so(monkeypatch, level: int, said: str, kept: str):
    run = factories.blog_run()
    sizes = sizes_by_level(run)
    assert sizes == sorted(sizes, reverse=True)
    monkeypatch.setattr(html, "MAX_PAGE_BYTES", sizes[level])
    page = Page(text := html.render_report([run]))
    assert len(text.encode()) == sizes[level] and said in page.words and kept in page.words
    assert ("this page leaves out" in page.words) == bool(said)


@pytest.mark.slow
def test_the_largest_suite_with_all_rivals_keeps_its_charts_below_five_megabytes():
    workloads = tuple(map(str, SUITES["grid"]))
    rows = factories.blog_run().results
    results = tuple(r.with_changes(workload=w) for w in workloads for r in rows)
    text = html.render_report([factories.blog_run(workloads=workloads, results=results)])
    assert len(text.encode()) <= 5_000_000 and text.count('class="plot"') == 6 * len(workloads)


def test_traces_are_linked_relatively_where_they_exist(tmp_path: Path):
    run = factories.blog_run(results=(factories.result("naive"),))
    trace = run.results[0].profiles[0].trace
    assert trace is not None
    (tmp_path / trace).parent.mkdir(parents=True)
    (tmp_path / trace).write_bytes(b"")
    html.write_report([run], tmp_path / "report.html")
    assert f'href="{trace.replace(",", "%2C")}"' in (tmp_path / "report.html").read_text()
    (tmp_path / "pages").mkdir()
    html.write_report([run], tmp_path / "pages" / "report.html", traces_dir=tmp_path)
    text = (tmp_path / "pages" / "report.html").read_text()
    assert f'href="../{trace}"' in text and "naive-backward.json.gz, not beside this page" in text


def test_without_plotly_a_sentence_says_what_to_do(monkeypatch, tmp_path: Path):
    html.plotly_script.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(
        AttnscopeError, match=r"plotly, which is not installed\nhint: pip install 'attnscope\[report\]'"
    ):
        html.write_report([factories.blog_run()], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_plotly_says_what_is_broken(monkeypatch, tmp_path: Path):
    html.plotly_script.cache_clear()
    broken = type(sys)("plotly.offline")
    monkeypatch.setitem(sys.modules, "plotly.offline", broken)
    with pytest.raises(AttnscopeError, match="plotly, which does not import here: ImportError: cannot import name"):
        html.write_report([factories.blog_run()], tmp_path / "report.html")


# --- in a browser -----------------------------------------------------------------------------------------------------

# Reports from inside the page: has the charts drawn (as for printing, on screen or not), acts, tells its frame.
PROBE = """<script>
const root = document.documentElement, errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective));
const plots = [...document.querySelectorAll(".plot")];
const notice = document.getElementById("no-charts");
const drawn = () => plots.filter((plot) => plot.querySelector(".main-svg .point")).length;
function act() {
  for (const item of document.querySelectorAll("details")) item.open = true;
  if (location.hash === "#toggle") document.getElementById("theme").click();
  if (location.hash === "#second") for (const item of document.querySelectorAll('[data-view="1"]')) item.click();
  setTimeout(report, 1000);
}
function report() {
  const text = document.querySelector(".main-svg .xtitle");
  parent.postMessage([window.name, {
    plots: plots.length, drawn: drawn(), widths: [innerWidth, root.scrollWidth], errors, notice: !notice.hidden,
    look: [getComputedStyle(document.body).backgroundColor, text && getComputedStyle(text).fill],
    pwned: window.pwned !== undefined,
    network: performance.getEntriesByType("resource").map((entry) => entry.name),
  }], "*");
}
const waiting = setInterval(() => {
  if (root.classList.contains("drawn")) dispatchEvent(new Event("beforeprint"));
  if (drawn() < plots.length && notice.hidden) return;
  clearInterval(waiting);
  act();
}, 200);
</script></body>"""
# The window of a headless browser is at least 500 pixels wide: a phone is a frame.
FRAMES = """<!doctype html><body style="margin:0">{frames}<script>
addEventListener("message", ({{ data }}) =>
  fetch("http://127.0.0.1:{port}", {{ method: "POST", mode: "no-cors", body: JSON.stringify(data) }}));
for (const frame of document.querySelectorAll("iframe")) frame.src = frame.dataset.page;
</script></body>"""
FRAME = '<iframe name="{name}" data-page="{page}" style="width:{width}px;height:1000px;border:0;float:left"></iframe>'


class Receiver(BaseHTTPRequestHandler):
    """Takes what the frames report."""

    def do_POST(self):
        name, seen = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen[name] = seen
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


def browse(folder: Path, frames: dict[str, tuple[str, str, int]], *, dark: bool = False) -> dict[str, dict]:
    """What the probe saw in headless Chromium; ``frames`` maps a name to (page's text, URL's hash, width)."""
    shown = []
    for name, (text, action, width) in frames.items():
        (folder / f"{name}.html").write_text(text.replace("</body>", PROBE))
        shown.append(FRAME.format(name=name, page=f"{name}.html{action}", width=width))
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--window-size=4000,2500", "--enable-logging=stderr",
        *(["--force-dark-mode"] if dark else []),
    ]  # fmt: skip
    with HTTPServer(("127.0.0.1", 0), Receiver) as server, open(folder / "log", "w+") as log:
        server.seen, server.timeout = {}, 1.0
        (folder / "frames.html").write_text(FRAMES.format(frames="".join(shown), port=server.server_address[1]))
        with subprocess.Popen([str(CHROMIUM), *flags, (folder / "frames.html").as_uri()], stderr=log) as browser:
            deadline = time.monotonic() + 240
            while server.seen.keys() != frames.keys() and time.monotonic() < deadline:
                server.handle_request()
            browser.terminate()
        log.seek(0)
        said = [line for line in log if "CONSOLE" in line]
    assert not said, said
    assert server.seen.keys() == frames.keys(), "a page never drew its charts"
    return server.seen


def assert_drawn(seen: dict, *, least: int = 3) -> None:
    assert seen["errors"] == [] and seen["network"] == [] and not seen["pwned"] and not seen["notice"]
    assert seen["drawn"] == seen["plots"] >= least
    assert seen["widths"][0] == seen["widths"][1], "the page scrolls sideways"


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """One browser for all pages that differ in content and width only: starting it is what takes long."""
    gpu, cpu, hostile = (
        html.render_report([run]) for run in (factories.blog_run(), factories.cpu_run(), hostile_run())
    )
    packed = html._render([factories.blog_run()], html.plotly_script(), html.PACKED, lambda trace: None)
    old = gpu.replace("<head>", "<head><script>delete window.DecompressionStream</script>")
    frames = {f"{name}-{width}": (text, "", width) for name, text in (("gpu", gpu), ("cpu", cpu)) for width in WIDTHS}
    frames |= {"hostile": (hostile, "", 360), "second": (gpu, "#second", 360), "packed": (packed, "", 1000)}
    return browse(tmp_path_factory.mktemp("light"), frames | {"old": (old, "", 360)})


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(
    "name", [*(f"{kind}-{width}" for kind in ("gpu", "cpu") for width in WIDTHS), "second", "packed"]
)
def test_every_chart_is_drawn_and_the_page_never_scrolls_sideways(light, name: str):
    assert_drawn(light[name])


@pytest.mark.slow
@needs_chromium
def test_hostile_strings_run_nothing(light):
    assert_drawn(light["hostile"])


@pytest.mark.slow
@needs_chromium
def test_a_browser_without_decompression_is_told_so(light):
    assert light["old"]["notice"] and light["old"]["drawn"] == 0 and light["old"]["errors"] == []


@pytest.mark.slow
@needs_chromium
def test_theme_follows_the_system_and_the_toggle_recolours_the_charts(light, tmp_path: Path):
    page = html.render_report([factories.cpu_run()])
    dark = browse(tmp_path, {"dark": (page, "", 800), "toggle": (page, "#toggle", 800)}, dark=True)
    for seen in dark.values():
        assert_drawn(seen)
    looks = light["cpu-800"]["look"], dark["dark"]["look"], dark["toggle"]["look"]
    assert looks[0] == looks[2] and all(here != there for here, there in zip(looks[0], looks[1], strict=True))
