"""Stage 7: the explanation of traces as one self-contained page, or as a notebook's fragment, without scripts.

Reads Explanation, Difference and Trial, writes HTML. Must import neither torch nor a stage before explaining. What
comes from a trace is escaped, and the page forbids itself scripts and anything from elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from attnscope.explaining.explanation import Difference, Explanation
from attnscope.explaining.trial import Trial
from attnscope.reporting.explanation_text import OVERLAP, saving_text, share, site_figures, window_facts
from attnscope.reporting.trial_text import render_trial
from attnscope.reporting.words import clean, shorten
from attnscope.units import format_us, significant

NAME_WIDTH = 300
KERNELS_WIDTH = 160


def explanations_page(
    explanations: Sequence[Explanation], difference: Difference | None = None, trial: Trial | None = None
) -> str:
    """The whole page."""
    template = _environment().get_template("explanation.html.j2")
    tried = render_trial(trial) if trial is not None else None
    return template.render(explanations=explanations, difference=difference, overlap=OVERLAP, tried=tried)


def explanation_fragment(explanation: Explanation) -> str:
    """One explanation as a fragment for a notebook, whose styles touch nothing outside it."""
    template = _environment().get_template("explanation_fragment.html.j2")
    return template.render(explanation=explanation, overlap=OVERLAP)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("attnscope.reporting"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "clean": lambda text: shorten(clean(str(text)), NAME_WIDTH),
        "kernel": lambda text: shorten(clean(str(text)), KERNELS_WIDTH),
        "us": format_us,
        "number": significant,
    }
    environment.globals |= {
        "window_facts": window_facts, "site_figures": site_figures, "saving_text": saving_text, "share": share,
    }  # fmt: skip
    return environment
