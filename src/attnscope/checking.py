"""Stage 3: is an implementation right on a workload, and by how much.

Reads an Implementation and a Workload, writes a CheckResult. Must not import an implementation or a later stage.

Each kind of inputs goes through the very calls that are timed: a forward alone, a forward that saves, its backward.
What comes back must have the right shape, dtype and device, and is then judged (:mod:`attnscope.judging`) against
float64 (:mod:`attnscope.reference`) within a computed budget (:mod:`attnscope.budgets`). That nothing passes by luck or
by cheating is the business of :mod:`attnscope.guards`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnscope.budgets import Expectation, expect
from attnscope.device import Device, available_memory_bytes
from attnscope.diagnosis import describe_non_finite
from attnscope.drawn_dropout import check_draws, enough_scores
from attnscope.guards import SPIN_CYCLES, Disturbance, bits, changed_inputs, fill, poisoned_memory, same_bits
from attnscope.implementation import Gradients, Implementation, Output, Prepared
from attnscope.inputs import INPUT_KINDS, Inputs, Tensor, make_inputs, torch_dtype
from attnscope.judging import factor_of, judge, judge_grossly
from attnscope.records import CheckResult, TensorCheck
from attnscope.reference import Sample, sample_heads, select
from attnscope.strides import restride
from attnscope.units import significant
from attnscope.workload import DIRECTIONS, Workload

# (query, key) pairs of which heads are sampled for the first kind of inputs; a quick check takes a quarter. Each other
# kind has a sample of its own, of a quarter: together they meet more heads than one sample of that cost would.
MAX_PAIRS = {"cpu": 2**21, "cuda": 2**28}
MAX_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # of q, k, v and out of those heads, about ten float64 numbers for each
QUICK_SHARE, LATER_SHARE = 4, 4
EQUAL_RUNS = {"cpu": 6, "cuda": 100}  # where the sheet claims determinism
QUICK_EQUAL_RUNS = {"cpu": 3, "cuda": 20}
KEPT_INPUTS = 1 / 16  # of the free memory
EQUAL_RUNS_SECONDS = {"cpu": 1.0, "cuda": 3.0}  # no run is begun later


class ReferenceCache:
    """Truth, budgets and inputs of one workload, seed and device, so that all implementations share them.

    Holds the sampled heads of each kind only, and forgets them when the workload, seed or device changes. ``spent_s``
    is how long making truth and budgets took, over all that asked.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._inputs_key: Any = None
        self._inputs: dict[tuple[int, str], tuple[Inputs, list[int]]] = {}
        self._key: Any = None
        self._kept: dict[tuple[str, Sample, str, frozenset[str]], tuple[bool, Expectation]] = {}

    def expectation(
        self, inputs: Inputs, sample: Sample, compute: str, rounds: frozenset[str] = frozenset(), *, backward: bool
    ) -> Expectation:
        """What :func:`attnscope.budgets.expect` says of the sampled heads of ``inputs``."""
        import torch

        key = (inputs.workload, inputs.seed, str(inputs.q.device))
        if key != self._key:
            self._key, self._kept = key, {}
        has_backward, kept = self._kept.get((inputs.kind, sample, compute, rounds), (False, None))
        if kept is None or (backward and not has_backward):
            started = time.perf_counter()
            kept = expect(select(inputs, sample), compute, rounds, backward=backward)
            if inputs.q.device.type == "cuda":
                torch.cuda.empty_cache()  # float64 scores take most of the memory, and poisoning it takes time
            self.spent_s += time.perf_counter() - started
            for (kind, heads, *_), (_, other) in self._kept.items():  # the truth is the same whatever is rounded
                if (kind, heads) == (inputs.kind, sample) and other.truth.keys() == kept.truth.keys():
                    kept.truth = other.truth
            self._kept[inputs.kind, sample, compute, rounds] = backward, kept
        return kept

    def inputs(self, workload: Workload, device: Device, seed: int, kind: str, strides: str) -> Inputs:
        """The inputs of that kind, to be read only; made anew where some implementation wrote into what was kept.

        Kept only as long as all kinds together are a small part of the memory that is free.
        """
        key = (workload, device, strides)
        if key != self._inputs_key:
            self._inputs_key, self._inputs = key, {}
        kept, marks = self._inputs.get((seed, kind), (None, []))
        if kept is not None and _fingerprint(kept) == marks:
            return kept
        made = restride(make_inputs(workload, device, seed, kind), strides)
        size = sum(tensor.nbytes for tensor in made.tensors().values())
        if size * len(INPUT_KINDS) <= KEPT_INPUTS * available_memory_bytes(device):
            self._inputs[seed, kind] = made, _fingerprint(made)
        return made


def _fingerprint(inputs: Inputs) -> list[int]:
    """The sum of each tensor's bits: another one tells that somebody wrote there."""
    import torch

    sums = [bits(tensor).sum(dtype=torch.int64) for tensor in inputs.tensors().values()]
    return [int(number) for number in torch.stack(sums).tolist()]


def check_implementation(
    implementation: Implementation,
    workload: Workload,
    device: Device,
    *,
    seed: int = 0,
    directions: Sequence[str] = DIRECTIONS,
    kinds: Sequence[str] = INPUT_KINDS,
    quick: bool = False,
    repeat: bool = True,
    prepared: Prepared | None = None,
    cache: ReferenceCache | None = None,
    strides: str = "plain",
    spin_cycles: int = SPIN_CYCLES,
) -> CheckResult:
    """Check one implementation on one workload; whatever it raises is raised.

    Args:
        implementation: what to check; its sheet says what it claims.
        workload: the problem; large ones are compared on a seeded sample of (batch, head) for each kind, all rows.
        device: where it runs.
        seed: of inputs and sample.
        directions: ``forward``, ``backward`` or both.
        kinds: of inputs, from ``INPUT_KINDS``.
        quick: a smaller sample and fewer equal runs.
        repeat: whether to hold a claim of determinism against equal runs.
        prepared: what its ``prepare`` returned, if that was done before.
        cache: shared by checks of several implementations.
        strides: how the inputs lie in memory, a word of :data:`attnscope.strides.STRIDES`.
        spin_cycles: of a GPU, for which each call must wait before its inputs are there; longer than launching takes.
    """
    ask = _Ask(
        implementation, workload, device, implementation.prepare(workload, device) if prepared is None else prepared,
        seed, tuple(directions), tuple(kinds), quick, repeat, cache or ReferenceCache(), strides, spin_cycles,
    )  # fmt: skip
    if workload.dropout and implementation.sheet.draws_dropout:
        return _check_with_draws(ask)
    return _Checker(ask).run()


@dataclass(frozen=True)
class _Ask:
    """What :func:`check_implementation` was asked, in its words."""

    implementation: Implementation
    workload: Workload
    device: Device
    prepared: Prepared
    seed: int
    directions: tuple[str, ...]
    kinds: tuple[str, ...]
    quick: bool
    repeat: bool
    cache: ReferenceCache
    strides: str
    spin_cycles: int

    def without_dropout(self) -> _Ask:
        """The same, asked of the workload at p = 0."""
        workload = self.workload.replace(dropout=0.0)
        return replace(self, workload=workload, prepared=self.implementation.prepare(workload, self.device))


def _check_with_draws(ask: _Ask) -> CheckResult:
    """Exactness at p = 0, then statistics over draws: a mask that an implementation draws itself has no one truth."""
    exact = _Checker(ask.without_dropout()).run()
    if not enough_scores(ask.workload):
        few = "with it nothing was judged, since so few scores say little of chance"
        return replace(exact, message=f"without dropout {exact.message}; {few}" if exact.passed else exact.message)
    inputs = restride(make_inputs(ask.workload, ask.device, ask.seed), ask.strides)
    drawn = check_draws(ask.prepared, inputs, backward="backward" in ask.directions, quick=ask.quick)
    failed = [check for check in drawn if not check.passed]
    passed = exact.passed and not failed
    message = exact.message if not exact.passed or not failed else failed[0].message
    return replace(
        exact,
        passed=passed,
        grade=exact.grade if passed else "failed",
        tensors=(*exact.tensors, *_one_each(drawn)),
        message=message if not passed else f"without dropout {message}; with it mean and spread are right",
    )


@dataclass
class _Call:
    """What one call returned: snapshots by name, as they were on the current stream right after it."""

    what: str
    tensors: dict[str, Tensor]
    problems: list[TensorCheck]


class _Checker:
    """One check. Collects what every kind of inputs brings, then sums it up."""

    def __init__(self, ask: _Ask) -> None:
        self.ask, self.sheet, self.workload, self.device = ask, ask.implementation.sheet, ask.workload, ask.device
        self.directions, self.prepared, self.quick = ask.directions, ask.prepared, ask.quick
        self.backward = "backward" in ask.directions
        compute = self.sheet.compute_precision(ask.workload.dtype)
        self.compute = compute if compute in ("fp32", "tf32", "fp64") else "fp32"
        self.rounds = self.sheet.rounded_too(ask.workload, ask.device)
        self.found: list[TensorCheck] = []
        self.told: list[TensorCheck] = []  # errors against the tight budget, for the factor
        self.deterministic: dict[str, bool] = {}
        self.is_loose = False
        self.previous: list[Tensor] = []

    def run(self) -> CheckResult:
        """Every kind, then equal runs where the sheet claims determinism."""
        w, seed, kinds = self.workload, self.ask.seed, self.ask.kinds
        self.samples = kind_samples(w, self.device.kind, seed, kinds, quick=self.quick)
        working = restride(make_inputs(w, self.device, seed + 1, kinds[0]), self.ask.strides)  # own: it is written to
        if len(kinds) == 1:  # so that a result kept from an earlier call is another one's
            self._calls(working, working.clone(), twice=False)
        for position, kind in enumerate(kinds):
            self._check_kind(working, self._make_inputs(seed, kind), twice=position == 0)
        if self.ask.repeat and self.sheet.deterministic and all(t.passed for t in self.found):
            self._check_equal_runs(self._fill(working, self._make_inputs(seed, kinds[0])), kinds[0])
        return self._result(seed)

    def _make_inputs(self, seed: int, kind: str) -> Inputs:
        return self.ask.cache.inputs(self.workload, self.device, seed, kind, self.ask.strides)

    def _fill(self, working: Inputs, pristine: Inputs) -> Inputs:
        return fill(working, pristine, self.ask.spin_cycles)

    def _check_kind(self, working: Inputs, pristine: Inputs, *, twice: bool) -> None:
        calls = self._calls(working, pristine, twice=twice)
        judged: list[_Call] = []
        for call in calls:
            self.found += call.problems
            repeats = (
                all(name in old.tensors and same_bits(t, old.tensors[name]) for name, t in call.tensors.items())
                for old in judged
            )
            if not call.tensors or any(repeats):
                continue
            judged.append(call)
            self._judge(call, pristine)
        self.previous = [call.tensors["out"] for call in calls if "out" in call.tensors]

    def _calls(self, working: Inputs, pristine: Inputs, *, twice: bool) -> list[_Call]:
        """The calls that are timed, each on poisoned memory; inputs are compared after each."""
        calls = []
        if "forward" in self.directions:
            inputs = self._fill(working, pristine)
            with poisoned_memory(inputs):
                output = self.prepared.forward(inputs, save=False)
                calls.append(self._outcome("forward", output, inputs))
            del output
            calls[-1].problems += self._mutations("forward", inputs, pristine)
        if not self.backward:
            return calls
        inputs = self._fill(working, pristine)
        with poisoned_memory(inputs):
            output = self.prepared.forward(inputs, save=True)
            calls.append(self._outcome("forward that saves", output, inputs))
        for _ in range(2 if twice else 1):
            with poisoned_memory(inputs):
                gradients = self.prepared.backward(inputs, output.saved)
                calls.append(self._outcome("backward", gradients, inputs))
        calls[-1].problems += self._mutations("backward", inputs, pristine)
        return calls

    def _outcome(self, what: str, returned: Output | Gradients, inputs: Inputs) -> _Call:
        """Snapshots of what came back, and how it breaks the contract."""
        tensors, problems = {}, []
        for name, shape, dtype in self._required(returned, inputs):
            tensor = getattr(returned, name, None)
            problem = _contract_problem(name, tensor, shape, dtype, inputs.q.device)
            if problem:
                problems.append(TensorCheck(name, inputs.kind, False, None, None, message=problem))
            else:
                tensors[name] = tensor.detach().clone()  # type: ignore[union-attr]
        return _Call(what, tensors, problems)

    def _required(self, returned: Output | Gradients, inputs: Inputs) -> Iterable[tuple[str, tuple[int, ...], Any]]:
        import torch

        w = self.workload
        dtype = torch_dtype(w.dtype)
        if hasattr(returned, "out"):
            yield "out", (w.B, w.H, w.L, w.D_v), dtype
            if self.sheet.lse:
                yield "lse", (w.B, w.H, w.L), torch.float32
            return
        for name in ("q", "k", "v", "bias", "sinks"):
            tensor = getattr(inputs, name)
            if tensor is not None:
                yield f"d{name}", tuple(tensor.shape), tensor.dtype

    def _mutations(self, what: str, inputs: Inputs, pristine: Inputs) -> list[TensorCheck]:
        return [
            TensorCheck(name, inputs.kind, False, None, None, message=f"{name} was changed by the {what}")
            for name in changed_inputs(inputs, pristine)
        ]

    def _judge(self, call: _Call, pristine: Inputs) -> None:
        stale = [old for old in self.previous if "out" in call.tensors and same_bits(old, call.tensors["out"])]
        expected = self._expectation(pristine)
        tensors = self._sampled(call.tensors, pristine.kind)
        checks = tight = judge(tensors, expected, pristine.kind)
        if self.sheet.approximate:
            checks = [judge_grossly(check, tensors, expected) for check in tight]
        elif self.rounds and not all(check.passed for check in tight):
            checks = judge(tensors, self._expectation(pristine, self.rounds), pristine.kind)
            self.is_loose = True
        if stale and not all(check.passed for check in checks):
            message = f"out on {pristine.kind} inputs is the output of an earlier call, bit for bit"
            checks = [TensorCheck("out", pristine.kind, False, None, None, message=message), *checks]
        self.told += tight
        self.found += checks + self._outside_sample(call.tensors, pristine)

    def _expectation(self, pristine: Inputs, rounds: frozenset[str] = frozenset()) -> Expectation:
        sample = self.samples[pristine.kind]
        return self.ask.cache.expectation(pristine, sample, self.compute, rounds, backward=self.backward)

    def _sampled(self, tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
        """The heads of each tensor that are sampled for that kind of inputs."""
        sample = self.samples[kind]
        batches, kv, heads = list(sample.batches), list(sample.kv_heads), sample.heads(self.workload.group)

        def cut(name: str, tensor: Tensor) -> Tensor:
            if name == "dsinks":
                return tensor[heads]
            rows = tensor if name == "dbias" and tensor.shape[0] == 1 else tensor[batches]
            if name == "dbias" and rows.shape[1] == 1:
                return rows
            return rows[:, kv if name in ("dk", "dv") else heads]

        return tensors if self._is_whole(kind) else {name: cut(name, tensor) for name, tensor in tensors.items()}

    def _is_whole(self, kind: str) -> bool:
        sample, w = self.samples[kind], self.workload
        return len(sample.batches) == w.B and len(sample.kv_heads) == w.H_kv

    def _outside_sample(self, tensors: dict[str, Tensor], inputs: Inputs) -> list[TensorCheck]:
        """What can be said of the heads that were not compared: they are finite, and 0 where no key is seen."""
        import torch

        if self._is_whole(inputs.kind):
            return []
        found = []
        unseen = _unseen_rows(inputs)
        for name, tensor in tensors.items():
            wrong = ~torch.isfinite(tensor)
            if name == "lse" and not self.workload.sinks:
                wrong = torch.where(unseen, tensor != -torch.inf, wrong)
            message = describe_non_finite(name, tensor, wrong) if bool(wrong.any()) else ""
            if not message and name in ("out", "dq") and bool((tensor.ne(0).any(-1) & unseen).any()):
                message = "it is not 0 where a row sees no key"
            if message:
                message = f"{name} on {inputs.kind} inputs: {message}"
                found.append(TensorCheck(name, inputs.kind, False, None, None, message=message))
        return found

    def _check_equal_runs(self, inputs: Inputs, kind: str) -> None:
        """Bitwise the same result of equal calls, beside a second stream that occupies varying multiprocessors."""
        runs = (QUICK_EQUAL_RUNS if self.quick else EQUAL_RUNS)[self.device.kind]
        disturbance = Disturbance(inputs.q.device, inputs.seed)
        saved = self.prepared.forward(inputs, save=True).saved if self.backward else None
        for direction in self.directions:
            started, first, differs = time.monotonic(), None, None
            for _ in range(runs):
                disturbance.start()
                if direction == "forward":
                    output = self.prepared.forward(inputs, save=False)
                    now = {"out": output.out} | ({"lse": output.lse} if self.sheet.lse else {})
                else:
                    now = self.prepared.backward(inputs, saved).tensors()
                if first is None:
                    first = {name: bits(tensor).clone() for name, tensor in now.items()}
                differs = differs or next((n for n, t in now.items() if not same_bits(bits(t), first[n])), None)
                if differs or time.monotonic() - started > EQUAL_RUNS_SECONDS[self.device.kind]:
                    break
            self.deterministic[direction] = differs is None
            if differs:
                message = f"{differs} differs between equal runs, though its sheet claims to be deterministic"
                self.found.append(TensorCheck(differs, kind, False, None, None, message=message))

    def _result(self, seed: int) -> CheckResult:
        passed = bool(self.found) and all(check.passed for check in self.found)
        grade = "approximate" if self.sheet.approximate else "loose" if self.is_loose else "tight"
        told = [check for check in self.told if check.error_budget is not None]
        worst = max(told, key=factor_of, default=None)
        group = self.workload.group
        return CheckResult(
            passed=passed,
            grade=grade if passed else "failed",
            row_rel_error_max=None if worst is None else worst.row_rel_error_max,
            error_budget=None if worst is None else worst.error_budget,
            factor=factor_of(worst) if worst is not None and worst.error_budget else None,
            tensors=tuple(_one_each(self.found)),
            directions=self.directions,
            seed=seed,
            heads_checked=len(set().union(*(sample.pairs() for sample in self.samples.values()))) * group,
            heads_total=self.workload.B * self.workload.H,
            message=self._sentence(worst),
            deterministic=self.deterministic,
        )

    def _sentence(self, worst: TensorCheck | None) -> str:
        """What is worst, in one sentence."""
        failed = [check for check in self.found if not check.passed]
        if failed:
            # what broke first explains the rest: the contract, then the first kind of inputs, then the forward
            kinds = list(dict.fromkeys(check.kind for check in self.found))
            cause = {"out": 0, "lse": 1}
            first = min(
                failed,
                key=lambda c: (
                    c.error_budget is not None, kinds.index(c.kind), cause.get(c.tensor, 2), -factor_of(c)
                ),
            )  # fmt: skip
            more = len({(check.tensor, check.kind) for check in failed}) - 1
            return first.message + (f" (and {more} more)" if more else "")
        if worst is None or not worst.error_budget or worst.row_rel_error_max is None:
            return "nothing to compare"
        sentence = (
            f"{worst.tensor} on {worst.kind} inputs comes nearest its budget: {worst.worst} is off by "
            f"{significant(worst.row_rel_error_max)}, {significant(worst.error_budget)} is allowed"
        )
        if self.sheet.approximate:
            return (
                sentence.replace("comes nearest its budget", "is the farthest off")
                + " to a kernel that is not approximate"
            )
        if self.is_loose:
            words = " and ".join(sorted(self.rounds))
            return sentence.replace("comes nearest its budget", "is the farthest off") + (
                f" to a kernel that rounds no more than it must; one that also rounds its {words} may err as much"
            )
        return sentence


def kind_samples(
    workload: Workload, device_kind: str, seed: int, kinds: Sequence[str], *, quick: bool = False
) -> dict[str, Sample]:
    """Which heads are compared for each kind of inputs."""
    found = {}
    for position, kind in enumerate(kinds):
        share = (QUICK_SHARE if quick else 1) * (LATER_SHARE if position else 1)
        limits = MAX_PAIRS[device_kind] // share, MAX_ELEMENTS[device_kind] // share
        found[kind] = sample_heads(workload, seed + position, *limits)
    return found


def _one_each(checks: list[TensorCheck]) -> list[TensorCheck]:
    """One check a tensor and kind: the failed one, else the one nearest its budget."""
    best: dict[tuple[str, str], TensorCheck] = {}
    for check in checks:
        old = best.get((check.tensor, check.kind))
        if old is None or _gravity(check) > _gravity(old):
            best[check.tensor, check.kind] = check
    return list(best.values())


def _gravity(check: TensorCheck) -> tuple[bool, bool, float]:
    return not check.passed, check.error_budget is None, factor_of(check)


def _contract_problem(name: str, tensor: Any, shape: tuple[int, ...], dtype: Any, device: Any) -> str:
    import torch

    if tensor is None:
        return f"{name} is missing"
    if not isinstance(tensor, torch.Tensor):
        return f"{name} must be a tensor, got {type(tensor).__name__}"
    for what, wanted, got in (
        ("shape", shape, tuple(tensor.shape)),
        ("dtype", dtype, tensor.dtype),
        ("device", device, tensor.device),
    ):
        if wanted != got:
            return f"{name} must have {what} {wanted}, got {got}"
    return ""


def _unseen_rows(inputs: Inputs) -> Tensor:
    """Bool (B, H, L): True where a row sees no key."""
    import torch

    w = inputs.workload
    if inputs.mask is None:
        low, high = inputs.row_bounds()
        return (high <= low).expand(w.B, w.L)[:, None].expand(w.B, w.H, w.L)
    visible: Tensor = inputs.visible()
    unseen: Tensor = ~visible.any(-1)
    return torch.broadcast_to(unseen, (w.B, w.H, w.L))
