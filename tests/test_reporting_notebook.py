"""The notebook's view: a fragment that is valid, escaped, without scripts, and styles only itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import factories
from attnscope.reporting.notebook import run_html

VOID = {"br", "meta", "link", "img", "input", "hr"}


class Balance(HTMLParser):
    """Fails on a tag that is closed out of order."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(fragment: str) -> Balance:
    parser = Balance()
    parser.feed(fragment)
    parser.close()
    assert parser.open == []
    return parser


def test_fragment_is_balanced_scriptless_and_scoped():
    fragment = run_html(factories.blog_run())
    seen = parsed(fragment).seen
    assert "table" in seen and not seen & {"script", "link", "img", "iframe", "body"}
    style = fragment.split("<style>")[1].split("</style>")[0]
    assert all(line.startswith(".attnscope-run") for line in style.strip().splitlines())
    assert len(fragment) < 20_000


def test_it_says_what_the_terminal_says():
    fragment = re.sub(r"<[^>]+>", " ", run_html(factories.blog_run()))
    for said in (
        "NVIDIA H200", "58.9 µs", "0.71", "loose ×2.3", "hopper (ours)", "the same as sdpa_auto",
        "bound by exponentials", "runs on cpu, not on cuda", "masked_fill without the underscore",
    ):  # fmt: skip
        assert said in fragment, said


def test_hostile_names_are_escaped():
    name = "</script><script>alert(1)</script><b>&\"'"
    run = factories.blog_run(results=(factories.result("sdpa_cudnn").with_changes(implementation=name, note=name),))
    fragment = run_html(run)
    assert "<script" not in fragment and "&lt;script&gt;alert(1)" in fragment
    parsed(fragment)


def test_run_shows_itself():
    run = factories.cpu_run()
    assert run._repr_html_() == run_html(run)
    assert "sdpa_flash" in str(run) and "\x1b" not in str(run)


def test_nothing_ran():
    assert "Nothing ran" in run_html(factories.blog_run(results=(factories.skipped(),)))
