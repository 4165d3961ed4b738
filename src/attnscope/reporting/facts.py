"""Stage 7: the facts of a profile, a run and its device that every view shows.

Reads Run, Limits, Profile, KernelEvent; writes nothing. Must import neither torch nor a stage, nor rich or jinja2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from attnscope.records import KernelEvent, Limits, Profile, Run
from attnscope.reporting.words import clean, format_count
from attnscope.units import GIB, MISSING, format_bytes, format_us, significant

# --- a profile --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """What one would expect, beside what was seen of it: how often, and its time. ``differs`` marks a surprise."""

    expected: str
    seen: str
    us: float | None
    differs: bool


def beside(profile: Profile, kernels: Sequence[KernelEvent]) -> list[Beside]:
    """The expected steps, each beside the kernels of its role, then the roles that nobody expected.

    An expectation reads ``role: sentence``. One that may stay out is no surprise where it was not seen: the profile's
    own surprises decide. Without expectations nothing can surprise, and there are no rows.
    """
    by_role: dict[str, list[KernelEvent]] = {}
    for kernel in kernels if profile.expected else ():
        by_role.setdefault(kernel.role, []).append(kernel)
    rows = []
    for sentence in profile.expected:
        role = sentence.partition(":")[0]
        rows.append(_beside(clean(sentence), role, by_role.pop(role, []), _surprises(profile, role)))
    return rows + [_beside("", role, seen, True) for role, seen in by_role.items()]


def _beside(expected: str, role: str, seen: Sequence[KernelEvent], differs: bool) -> Beside:
    if not seen:
        return Beside(expected, "", None, differs)
    counted = f"{len(seen)} × {clean(role)}" if len(seen) > 1 else clean(role)
    return Beside(expected, counted, sum(kernel.duration_us for kernel in seen), differs)


def _surprises(profile: Profile, role: str) -> bool:
    """Whether a surprise counts this role, as in ``3 × role (…)``, ``2 more role than …`` or ``no role was seen``."""
    named = re.compile(rf"(^|× |more |no ){re.escape(role)}( |$)")
    return any(named.search(sentence.split(" (")[0]) for sentence in profile.surprises)


def profile_facts(profile: Profile) -> list[tuple[str, str]]:
    """(what, figure) of a profile, the article's figures among them."""
    facts = [
        ("kernels per call", format_count(profile.kernels_per_call)),
        ("CPU ops per call", format_count(profile.cpu_ops_per_call)),
        ("GPU time average", format_us(profile.gpu_us_per_call)),
        ("CPU time average", format_us(profile.cpu_us_per_call)),
        ("self GPU total", format_us(profile.self_gpu_us_total)),
        ("self CPU total", format_us(profile.self_cpu_us_total)),
        ("active steps", str(profile.steps)),
    ]
    if profile.spilled_kernels:
        facts.append(("warm-up kernels left out", str(profile.spilled_kernels)))
    return [fact for fact in facts if fact[1] != MISSING]


# --- a run ------------------------------------------------------------------------------------------------------------


def device_line(run: Run) -> str:
    """The device and the versions that a number depends on most."""
    env = run.environment
    parts = [str(run.device)]
    parts += [f"{name} {env.packages[name]}" for name in ("torch", "triton") if name in env.packages]
    parts += [
        f"{name} {value}"
        for name, value in (("CUDA", env.cuda), ("driver", env.driver), ("cuDNN", env.cudnn_loaded))
        if value
    ]
    if "attnscope" in env.packages:
        parts.append(f"attnscope {env.packages['attnscope']}")
    return clean(" · ".join(parts))


def run_line(run: Run) -> str:
    """When and how the run was made, and what limits what it says."""
    parts = [run.created, f"seed {run.seed}"]
    parts += ["quick: few samples, wide noise"] if run.quick else []
    parts += ["interrupted: what had finished is shown"] if run.interrupted else []
    return clean(" · ".join(parts))


def environment_facts(run: Run) -> list[tuple[str, str]]:
    """Everything the record says about where it was made."""
    d, env = run.device, run.environment
    facts: list[tuple[str, object | None]] = [
        ("device", d.name),
        ("compute capability", ".".join(map(str, d.capability)) if d.capability else None),
        ("multiprocessors", d.multiprocessors),
        ("device memory", f"{significant(d.memory_bytes / GIB)} GiB" if d.memory_bytes else None),
        ("L2 cache", format_bytes(d.l2_bytes) if d.l2_bytes else None),
        ("driver", env.driver),
        ("CUDA", env.cuda),
        ("cuDNN loaded", env.cudnn_loaded),
        ("cuDNN file", env.cudnn_path),
        ("CPU", env.cpu),
        ("threads", env.threads),
        ("Python", env.python),
        ("platform", env.platform),
        *env.packages.items(),
        ("git commit", env.git_commit and env.git_commit + (" with local changes" if env.git_dirty else "")),
        ("command", run.command),
        ("created", run.created),
        ("seed", run.seed),
    ]
    return [(name, clean(str(value))) for name, value in facts if value is not None]


def limits_facts(limits: Limits) -> list[tuple[str, str]]:
    """What the device can do, as measured in the run."""
    facts = [(f"{d} matrix products", f"{significant(v)} TFLOP/s") for d, v in limits.matrix_tflop_per_s.items()]
    for name, value, unit in (
        ("read bandwidth", limits.read_gb_per_s, "GB/s"),
        ("copy bandwidth", limits.copy_gb_per_s, "GB/s"),
        ("exponentials", limits.exponentials_t_per_s, "× 10¹² a second"),
        ("launch floor", limits.launch_floor_us, "µs"),
    ):
        if value is not None:
            facts.append((name, f"{significant(value)} {unit}"))
    return facts
