"""Stage 2: what a rule about a kernel behind ``scaled_dot_product_attention`` is. Pure, without torch.

Reads an SdpaCall, writes Reasons. The rules themselves stand in :mod:`attnscope.sdpa_rules` and
:mod:`attnscope.sdpa_faults`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from attnscope.device import Device
from attnscope.sdpa_call import GPU_ONLY, SdpaCall
from attnscope.why_record import Reason

# The releases against whose wheels the rules were held: the checks that are compiled into libtorch_cuda.so and
# libtorch_cpu.so, the limits in them, the headers. On another release, or on ROCm, a rule is marked unverified.
VERIFIED = ("2.10", "2.11", "2.12", "2.13")

Said = tuple[str, str | None]  # what a rule says, and what to change
Find = Callable[[SdpaCall, str], Said | None]


@dataclass(frozen=True)
class Rule:
    """One rule: on which implementations it looks on a GPU and on a CPU, since which torch, and what it finds."""

    id: str
    find: Find
    cuda: tuple[str, ...]
    cpu: tuple[str, ...]
    since: tuple[int, int]
    verified: tuple[str, ...]
    source: str | None

    def looks_at(self, call: SdpaCall, implementation: str) -> bool:
        """Whether the rule has a say on this implementation, device and torch."""
        return implementation in (self.cuda if call.on_gpu else self.cpu) and call.release >= self.since

    def reason(self, call: SdpaCall, implementation: str) -> Reason | None:
        """The reason it finds, if any."""
        said = self.find(call, implementation) if self.looks_at(call, implementation) else None
        if said is None:
            return None
        verified = not call.rocm and "{}.{}".format(*call.release) in self.verified
        return Reason(self.id, said[0], said[1], self.verified, verified, self.source)


@dataclass(frozen=True)
class Rulebook:
    """Rules in the order in which they are told."""

    rules: list[Rule] = field(default_factory=list)

    def rule(
        self,
        *cuda: str,
        cpu: tuple[str, ...] = (),
        since: tuple[int, int] = (2, 10),
        verified: tuple[str, ...] = VERIFIED,
        source: str | None = None,
    ) -> Callable[[Find], Find]:
        """Registers a function as a rule on these implementations; its name is the rule's id."""

        def register(find: Find) -> Find:
            self.rules.append(Rule(find.__name__.replace("_", "-"), find, cuda, cpu, since, verified, source))
            return find

        return register

    def reasons(self, call: SdpaCall, implementation: str) -> list[Reason]:
        """Everything the rules say of ``implementation`` (one of :data:`attnscope.sdpa_call.FAMILY`).

        One that is for GPUs alone is told on a CPU too what would speak against it on any GPU.
        """
        found = [one.reason(call, implementation) for one in self.rules]
        if not call.on_gpu and implementation in GPU_ONLY:
            there = replace(call, device=Device("cuda", "a GPU"))
            found += [one.reason(there, implementation) for one in self.rules]
        return [reason for reason in found if reason is not None]
