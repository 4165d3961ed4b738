"""Stage 4: how long measuring takes and in what order rivals come. Pure; no torch, no record, no later stage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from attnscope.device import Device


@dataclass(frozen=True)
class Plan:
    """The numbers that one direction of one workload is measured by.

    ``isolated_s`` is the budget of all rivals together. A rival leaves once it has had ``max_samples``, or
    ``min_samples`` and its share of the budget or calls that are long and quiet; its first ``dropped`` samples are
    thrown away. ``block_s`` of 0 means no sustained blocks; of each block the first ``block_drop_s`` are thrown away,
    and each rival gets ``blocks`` of them. ``limit_s`` is spent on each size of each limit.
    """

    isolated_s: float
    dropped: int
    min_samples: int
    max_samples: int
    block_s: float
    block_drop_s: float
    blocks: int
    host_calls: int
    graph_replays: int
    limit_s: float


PLANS = {
    ("cuda", False): Plan(4.0, 3, 10, 60, 1.0, 0.5, 2, 100, 20, 0.15),
    ("cuda", True): Plan(0.8, 2, 5, 20, 0.0, 0.0, 0, 30, 7, 0.05),
    ("cpu", False): Plan(1.8, 1, 3, 30, 0.1, 0.03, 2, 0, 0, 0.08),
    ("cpu", True): Plan(0.4, 1, 3, 7, 0.0, 0.0, 0, 0, 0, 0.02),
}


@dataclass(frozen=True)
class MeasureOptions:
    """What a caller may set. ``sustained_s`` is the length of one sustained block (0: none), of which half a second,
    or half the block where that is shorter, is thrown away; ``isolated_s`` the budget of one direction's rivals."""

    quick: bool = False
    seed: int = 0
    sustained_s: float | None = None
    isolated_s: float | None = None
    graphs: bool = True

    def plan(self, device: Device) -> Plan:
        """The plan for ``device``, with what was set here put in."""
        plan = PLANS[device.kind, self.quick]
        if self.isolated_s is not None:
            plan = replace(plan, isolated_s=self.isolated_s)
        if self.sustained_s is not None:
            drop_s = min(0.5, self.sustained_s / 2)
            plan = replace(plan, block_s=self.sustained_s, block_drop_s=drop_s, blocks=2 if self.sustained_s else 0)
        return plan if self.graphs else replace(plan, graph_replays=0)


def estimated_seconds(rivals: int, device: Device, options: MeasureOptions, *, call_ms: float = 1.0) -> float:
    """About how long one direction of one workload takes with ``rivals`` of ``call_ms`` each, limits left out."""
    plan = options.plan(device)
    least = (plan.min_samples + plan.dropped + 2) * call_ms / 1e3
    each = max(plan.isolated_s / max(rivals, 1), least)
    each += plan.blocks * max(plan.block_s, 2 * call_ms / 1e3)
    each += (plan.host_calls + plan.graph_replays) * call_ms / 1e3 + (0.3 if plan.graph_replays else 0.0)
    return rivals * each


def williams_square(n: int) -> list[list[int]]:
    """Orders of ``n`` rivals in which each stands in each place, and right behind each other one, equally often.

    n orders for an even n; for an odd n the square and its mirror image, 2n orders (E. J. Williams, "Experimental
    designs balanced for the estimation of residual effects of treatments", Aust. J. Sci. Res. A 2, 1949).
    """
    if n <= 1:
        return [list(range(n))]
    first = [(step + 1) // 2 if step % 2 else (n - step // 2) % n for step in range(n)]
    square = [[(rival + shift) % n for rival in first] for shift in range(n)]
    return square if n % 2 == 0 else square + [order[::-1] for order in square]


def rival_orders(n: int, chance: random.Random) -> Iterator[list[int]]:
    """Orders without end: Williams squares one after the other, labels and rows shuffled anew for each."""
    while True:
        labels = chance.sample(range(n), n)
        square = williams_square(n)
        chance.shuffle(square)
        for order in square:
            yield [labels[rival] for rival in order]


def mirrored_blocks(names: list[str], blocks: int) -> Iterator[tuple[int, str]]:
    """(pass, name) of sustained blocks: there and back again, ABBA for two rivals, so that a drift cancels."""
    for block in range(blocks):
        for name in names if block % 2 == 0 else names[::-1]:
            yield block, name
