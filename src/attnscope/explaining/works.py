"""Stage 6: everything that worked in a trace, in order, each with its role: on a GPU device events, on a CPU ops.

Reads a Trace, writes Work lists. Imports neither torch nor an implementation. A sequence holds what one host thread
launched, in the order of the launches; a replayed graph is a sequence of its own, and so is each stream's work whose
launch the trace lacks.
"""

from __future__ import annotations

import re
from operator import itemgetter

import msgspec

from attnscope.explaining.call import Seen, cpu_seen
from attnscope.explaining.captured import captured_launches
from attnscope.explaining.roles import FUSED, FUSED_BACKWARD
from attnscope.trace.events import DeviceEvent, Op, Step, Trace
from attnscope.trace.names import UNKNOWN, Meaning, explain_name

MOST_NAMES = 20_000  # of kernels that are looked at; a trace has some hundred
NOT_LOOKED_AT = Meaning(None, None, None, None, None, UNKNOWN, "the trace holds too many names to look at each")
MODULES_SHOWN = 3  # of the path to a call, the innermost
MATMUL_OPS = frozenset(
    "aten::" + name
    for name in ("bmm", "baddbmm", "mm", "addmm", "matmul", "einsum", "linear", "_scaled_mm", "bmm_out", "baddbmm_")
)
BATCHED_OPS = frozenset(("aten::bmm", "aten::baddbmm", "aten::baddbmm_"))
# What the innermost op does, where the kernel's name says nothing better.
OP_ROLES = {
    "aten::_softmax": "softmax",
    "aten::_softmax_backward_data": "softmax backward",
    "aten::_log_softmax": "log softmax",
    "aten::_log_softmax_backward_data": "log softmax",
    "aten::copy_": "copy",
    "aten::clone": "copy",
    "aten::cat": "copy",
    "aten::masked_fill_": "mask",
    "aten::masked_fill": "mask",
    "aten::native_dropout": "dropout",
    "aten::bernoulli_": "dropout",
    "aten::tril": "mask building",
    "aten::triu": "mask building",
} | dict.fromkeys(sorted(MATMUL_OPS), "matmul")
# What work is known by. Inductor's generated kernels are launched by scopes that carry the names of the operations that
# were fused into them, and no op.
BY_OP = "the op that launched it"
BY_CAPTURE = "the op at graph capture"
BY_COMPILER = "the name that torch.compile gave the kernel"
BY_NAME = "kernel names only"
KNOWN_BY = (BY_OP, BY_CAPTURE, BY_COMPILER, BY_NAME)
GENERATED = ("triton_", "cpp_fused")
KEPT_IN_MATMUL = frozenset(("fill", "copy", "reduction", "layout copy"))
UNNAMED_TEMPLATE = re.compile(r"^triton_tem_(fused_)?\d+$")
# Ops whose names are known to be no attention where they are not taken for it: PyTorch's own, and by what they say.
KNOWN_LIBRARIES = ("aten::", "torchvision::", "fbgemm::", "nccl:", "c10d::", "record_param_comms", "Optimizer.")
OTHERWISE_NAMED = re.compile(
    r"norm|silu|gelu|relu|act_and_mul|rotary|rope|embed|moe|topk|router|quant|gemm|_mm\b|linear|conv|loss|entropy|adam|"
    r"optimizer|reduce|gather|scatter|cache|sampl|dropout|mlp|copy|mamba|ssm|scan",
    re.IGNORECASE,
)
LOG_SOFTMAX = re.compile(r"LogSoft[mM]ax|log_softmax")


class Work(msgspec.Struct, eq=False):
    """One thing that worked. ``ops`` are the ops around it, innermost first, without annotations.

    ``replayed`` work of a graph has no op; where its capture is in the trace too it is ``captured`` instead, and its
    ops are those of the capture.
    """

    name: str
    role: str
    start_ns: int
    duration_ns: int
    ops: tuple[Op, ...]
    meaning: Meaning
    event: DeviceEvent | None
    module: str | None
    replayed: bool = False
    in_attention: bool = False
    captured: bool = False

    @property
    def us(self) -> float:
        """How long it worked."""
        return self.duration_ns / 1e3

    @property
    def op(self) -> Op | None:
        """The innermost op around it."""
        return self.ops[0] if self.ops else None

    @property
    def attributed(self) -> bool:
        """Whether the trace says what it was for: which op launched it, not by way of a graph."""
        return bool(self.ops) and not self.replayed

    @property
    def untold(self) -> bool:
        """Whether neither the op that launched it nor its name says what it did: a library's op that is not known with
        a kernel that is not known, or a template that torch.compile left unnamed."""
        if not self.ops or self.meaning.role is not None or self.role != UNKNOWN:
            return False
        name = self.ops[0].name
        if UNNAMED_TEMPLATE.match(name) or UNNAMED_TEMPLATE.match(self.name):
            return True
        if self.meaning.family is not None or name.startswith(KNOWN_LIBRARIES) or name.startswith(GENERATED):
            return False
        return OTHERWISE_NAMED.search(name) is None

    @property
    def known_by(self) -> str:
        """What its place in the program is known by, the surest first; one of ``KNOWN_BY``."""
        if not self.attributed:
            return BY_NAME
        if self.captured:
            return BY_CAPTURE
        return BY_COMPILER if self.ops[0].name.startswith(GENERATED) else BY_OP

    def inside(self, *names: str) -> bool:
        """Whether an op of one of these names is around it."""
        return any(op.name in names for op in self.ops)

    def inside_any(self, names: frozenset[str]) -> bool:
        """The same for a set of many names."""
        for op in self.ops:  # noqa: SIM110  # asked of nearly all work: half the time of any()
            if op.name in names:
                return True
        return False


Sequence = list[Work]


def all_work(trace: Trace) -> list[Sequence]:
    """The trace's work, one list for each thread, graph launch, or stream without launches."""
    return _device_work(trace) if trace.device_events else _cpu_work(trace)


def _device_work(trace: Trace) -> list[Sequence]:
    meanings: dict[str, Meaning] = {}
    roles: dict[tuple[str, str, str], str] = {}
    captured = captured_launches(trace)
    around: dict[int, tuple[tuple[Op, ...], str | None]] = {0: ((), None)}
    sequences: dict[tuple[object, ...], list[tuple[int, Work]]] = {}
    for event in trace.device_events:
        name, launch, replayed = event.name, event.launch, event.replayed
        meaning = meanings.get(name)
        if meaning is None:
            meaning = explain_name(name) if len(meanings) < MOST_NAMES else NOT_LOOKED_AT
            if len(meanings) < MOST_NAMES:
                meanings[name] = meaning
        capture = captured.get(id(event)) if captured else None
        made = launch if capture is None else capture
        op = made.op if made is not None else None
        place = id(op) if op is not None else 0
        known = around.get(place)
        if known is None and op is not None:
            known = around[place] = _around(op)
        ops, module = known or around[0]
        unknown = replayed and capture is None
        doing = (name, event.kind, "" if unknown or not ops else ops[0].name)
        role = roles.get(doing)
        if role is None:
            role = role_of(event, meaning, () if unknown else ops)
            if len(roles) < MOST_NAMES:
                roles[doing] = role
        work = Work(name, role, event.start_ns, event.duration_ns, ops, meaning, event, module, unknown)
        work.captured = capture is not None
        if replayed:
            key: tuple[object, ...] = ("graph", event.correlation, event.graph_id)
            order = event.start_ns
        elif launch is None:
            key, order = ("stream", event.device, event.stream), event.start_ns
        else:
            key, order = ("thread", launch.thread), launch.start_ns
        found = sequences.get(key)
        if found is None:
            found = sequences[key] = []
        found.append((order, work))
    for sequence in sequences.values():
        sequence.sort(key=itemgetter(0))
    return [[work for _, work in sequence] for sequence in sequences.values()]


def role_of(event: DeviceEvent, meaning: Meaning, ops: tuple[Op, ...]) -> str:
    """What a device event did, by its name and the op that launched it."""
    role = meaning.role or UNKNOWN
    if event.kind == "memset":
        return "fill"
    if event.kind == "memcpy":
        return "copy"
    if role in (FUSED, FUSED_BACKWARD):
        return role
    if role.startswith("softmax") and LOG_SOFTMAX.search(event.name):
        return "log softmax"
    by_op = OP_ROLES.get(ops[0].name) if ops else None
    if by_op is None or (by_op == "matmul" and role in KEPT_IN_MATMUL):
        return role
    return by_op


def _around(op: Op) -> tuple[tuple[Op, ...], str | None]:
    """The ops around, innermost first, and the path of modules without their numbers."""
    ops: list[Op] = []
    modules: list[str] = []
    around: Op | None = op
    while around is not None:
        if not around.is_annotation:
            ops.append(around)
        elif around.is_module:
            modules.append(re.sub(r"_\d+$", "", around.name))
        around = around.parent
    path = ".".join(list(dict.fromkeys(reversed(modules)))[-MODULES_SHOWN:]) if modules else None
    return tuple(ops), path


def _cpu_work(trace: Trace) -> list[Sequence]:
    if not trace.ops:
        return []
    end = max(op.end_ns for op in trace.ops)
    seen = cpu_seen(Step("trace", 0, end, trace.ops, []), "forward")
    sequences: dict[tuple[str, str], Sequence] = {}
    for one in seen:
        sequences.setdefault(one.ops[0].thread, []).append(_from_seen(one))
    return list(sequences.values())


def _from_seen(seen: Seen) -> Work:
    innermost = seen.ops[0]
    ops, module = _around(innermost)
    role = OP_ROLES.get(innermost.name, UNKNOWN)
    if "attention" in innermost.name:
        role = FUSED_BACKWARD if "backward" in innermost.name else FUSED
    meaning = Meaning("ATen on the CPU", role, seen.event.dtype, None, None, UNKNOWN, "")
    nanoseconds = round(seen.event.duration_us * 1e3)
    return Work(innermost.name, role, innermost.start_ns, nanoseconds, ops, meaning, None, module)
