"""Stage 7: the facts of a profile, a run and its device that every view shows.

Reads Run, Limits, Profile, KernelEvent; writes nothing. Must import neither torch nor a stage, nor rich or jinja2.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from attnscope.records import KernelEvent, Limits, Profile, Run
from attnscope.reporting.words import clean, format_count
from attnscope.units import GIB, MISSING, format_bytes, format_us, significant

# --- a profile --------------------------------------------------------------------------------------------------------


def beside(expected: Sequence[str], kernels: Sequence[KernelEvent]) -> list[tuple[str, KernelEvent | None, bool]]:
    """Rows of what one would expect beside what was seen; True marks what only one side has.

    Expectations that name roles are aligned with the kernels' roles (longest common subsequence); where none does,
    they are sentences and simply stand beside the kernels.
    """
    roles = [kernel.role for kernel in kernels]
    if not set(roles) & set(expected):
        return [(said or "", kernel, False) for said, kernel in zip_longest(expected, kernels)]
    # longest[i][j]: how many of expected[i:] can be matched in order within roles[j:]
    longest = [[0] * (len(roles) + 1) for _ in range(len(expected) + 1)]
    for i in reversed(range(len(expected))):
        for j in reversed(range(len(roles))):
            equal = expected[i] == roles[j]
            longest[i][j] = longest[i + 1][j + 1] + 1 if equal else max(longest[i + 1][j], longest[i][j + 1])
    rows: list[tuple[str, KernelEvent | None, bool]] = []
    i = j = 0
    while i < len(expected) or j < len(roles):
        if i < len(expected) and j < len(roles) and expected[i] == roles[j]:
            rows.append((expected[i], kernels[j], False))
            i, j = i + 1, j + 1
        elif j == len(roles) or (i < len(expected) and longest[i + 1][j] >= longest[i][j + 1]):
            rows.append((expected[i], None, True))
            i += 1
        else:
            rows.append(("", kernels[j], True))
            j += 1
    return rows


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
