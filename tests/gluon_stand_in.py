"""A stand-in for Gluon that runs the kernel of ``hopper`` on a CPU: its own source, each partition a thread.

Tiles are numpy arrays, mbarriers and named barriers are kept to their rules (a phase flips when arrivals and bytes are
complete; a wait returns when the phase of that parity is over), asynchronous products read their operands when they
are waited for, and loads land late. What a group reads or writes in shared memory itself, TMA is ordered after only by
a fence; of two stores to one place the second waits until the first is written. So a wrong phase, a slot that is
overwritten while it is read, a missing fence or arrival or a deadlock shows.
What it cannot show is what the hardware does between the lines: registers, layouts.
"""

from __future__ import annotations

import functools
import random
import threading
import time
import types
from typing import Any

import numpy as np
import torch

from attnscope.implementations.hopper import Plan, kernels, mask_kernels
from attnscope.implementations.hopper.masked import LIST_CHUNK, MaskPlan, bias_arguments
from attnscope.inputs import Inputs, row_bounds
from ptx_snippets import compute

TIMEOUT_S = 20.0
BF16 = np.dtype(np.uint16).type  # a bias in bf16 is kept as its bits, which the kernel itself widens


class Deadlock(RuntimeError):
    """A wait that nobody ends."""


class Clock:
    """One lock for everything that waits; a waiter wakes when something changed."""

    def __init__(self, seed: int, overflows: bool = False) -> None:
        self.overflows = overflows  # the kernel may meet infinities and what is no number, and knows them
        self.changed = threading.Condition()
        self.random = random.Random(seed)
        self.failed: BaseException | None = None
        self.loose: list[Any] = []  # memory that a group left before its reads were sure to be over

    def wait_for(self, what: Any, name: str) -> None:
        with self.changed:
            ended = self.changed.wait_for(lambda: self.failed is not None or what(), TIMEOUT_S)
            if self.failed is not None or not ended:
                raise Deadlock(name)

    def pause(self) -> None:
        """Lets another thread go first, now and then."""
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 2e-4)


CLOCK = Clock(0)


class Barrier:
    """An mbarrier: ``count`` arrivals and no bytes outstanding complete a phase."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
        CLOCK.changed.notify_all()


class Touched(threading.local):
    """Shared memory that this group read or wrote by itself: since each thread's last fence, and fenced, but not yet
    known to one thread for all of them."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.fenced: list[Any] = []

    def fence(self) -> None:
        self.fenced, self.arrays = self.fenced + self.arrays, []

    def barrier(self) -> None:
        self.fenced = []

    def leave(self) -> None:
        """At an arrival, which speaks for all threads: what comes later comes too late."""
        CLOCK.loose += self.arrays + self.fenced


TOUCHED = Touched()


def assert_ordered(shared: Shared, arrays: list[Any]) -> None:
    """None of ``arrays`` is memory that TMA is about to use."""
    assert not any(np.may_share_memory(shared.array, array) for array in arrays), "TMA is not ordered after a group"


class Shared:
    """Shared memory: an array whose first dim is a ring, or a view of it."""

    def __init__(self, array: Any, dtype: Any = None) -> None:
        self.array, self.dtype = array, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def index(self, i: Any) -> Any:
        part = self.array[int(i)]
        return part[0] if part.dtype == object else Shared(part, self.dtype)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.array.transpose(order), self.dtype)

    def reshape(self, shape: tuple[int, ...]) -> Shared:
        made = self.array.reshape(shape)
        assert np.shares_memory(made, self.array)
        return Shared(made, self.dtype)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.array[start : start + length], self.dtype)

    def store(self, value: Any) -> None:
        TOUCHED.arrays.append(self.array)
        self.array[...] = value.array

    def load(self, layout: Any) -> Tile:
        CLOCK.pause()
        TOUCHED.arrays.append(self.array)
        return Tile(self.array.copy(), layout)


class Tile:
    """A tensor in registers. A pointer is a tile of places in an array."""

    __array_ufunc__ = None

    def __init__(self, array: Any, layout: Any = None, memory: Any = None) -> None:
        self.array, self.layout, self.memory = np.asarray(array), layout, memory
        self.type = self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return (self.array if self.memory is None else self.memory).dtype

    def reshape(self, shape: Any) -> Tile:
        return Tile(self.array.reshape(shape), self.layout)

    def permute(self, order: tuple[int, ...]) -> Tile:
        return Tile(self.array.transpose(order), self.layout)

    def to(self, dtype: Any, bitcast: bool = False) -> Tile:
        return Tile(self.array.view(dtype) if bitcast else self.array.astype(dtype), self.layout)

    def __neg__(self) -> Tile:
        return Tile(-self.array, self.layout)

    def __invert__(self) -> Tile:
        return Tile(~self.array, self.layout)

    def _with(self, other: Any, function: Any) -> Tile:
        value = other.array if isinstance(other, Tile) else other
        memory = self.memory if self.memory is not None else getattr(other, "memory", None)
        with np.errstate(over="ignore"):  # to infinity, as on the card
            return Tile(function(self.array, value), self.layout, memory)


def _operator(function: Any) -> Any:
    return lambda self, other: self._with(other, function)


for _name, _function in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "lt": np.less, "ge": np.greater_equal, "gt": np.greater,
    "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "floordiv": np.floor_divide, "mod": np.mod, "truediv": np.divide, "le": np.less_equal, "lshift": np.left_shift,
    "rshift": np.right_shift,
}.items():  # fmt: skip
    setattr(Tile, f"__{_name}__", _operator(_function))
    setattr(Tile, f"__r{_name}__", _operator(lambda a, b, f=_function: f(b, a)))


class Scalar(int):
    """A whole number on the card."""

    def to(self, dtype: Any) -> int:
        return int(self)


def _scalar(value: Any) -> Any:
    if isinstance(value, Tile) and value.array.ndim == 0 and value.memory is None:
        value = value.array[()]
    return Scalar(value) if isinstance(value, bool | np.bool_ | int | np.integer) else value


def _fused(x: Tile, y: Any, z: Tile) -> Any:
    """x y + z rounded once: products of two fp32 numbers are exact in float64."""
    factor = y.array.astype(np.float64) if isinstance(y, Tile) else float(np.float32(y))
    with np.errstate(over="ignore", invalid="ignore"):
        return (x.array.astype(np.float64) * factor + z.array.astype(np.float64)).astype(np.float32)


class Named:
    """Named barriers: bar.sync and bar.arrive of 256 threads, 128 an arrival."""

    def __init__(self) -> None:
        self.arrived: dict[str, int] = {}
        self.completed: dict[str, int] = {}

    def arrive(self, number: str, threads: int) -> int:
        """How often the barrier must have completed before this arrival's sync may go on."""
        turn = self.completed.get(number, 0) + 1
        self.arrived[number] = self.arrived.get(number, 0) + 128
        assert self.arrived[number] <= threads
        if self.arrived[number] == threads:
            self.arrived[number], self.completed[number] = 0, turn
            CLOCK.changed.notify_all()
        return turn


class Queue(threading.local):
    """Products of one group that are under way, oldest first."""

    def __init__(self) -> None:
        self.products: list[Any] = []


class Language:
    """What the kernels call ``gl``."""

    float32, float16, bfloat16, int32, int64 = np.float32, np.float16, BF16, np.int32, np.int64
    static_range = staticmethod(range)
    expand_dims = staticmethod(lambda t, axis: Tile(np.expand_dims(t.array, axis), t.layout))
    convert_layout = staticmethod(lambda t, layout: Tile(t.array, layout))
    constexpr = staticmethod(lambda value: value)
    cast = staticmethod(lambda value, dtype: value)
    join = staticmethod(lambda a, b: Tile(np.stack([a.array, b.array], -1), a.layout))
    split = staticmethod(lambda t: (Tile(t.array[..., 0], t.layout), Tile(t.array[..., 1], t.layout)))
    BlockedLayout = staticmethod(lambda *_: "blocked")
    SwizzledSharedLayout = staticmethod(lambda *_: "rows")
    fma = staticmethod(lambda x, y, z: Tile(_fused(x, y, z), x.layout))
    exp2 = staticmethod(lambda t: Tile(np.exp2(t.array.astype(np.float32)), t.layout))
    log2 = staticmethod(lambda t: Tile(np.log2(t.array), t.layout))
    abs = staticmethod(lambda t: Tile(np.abs(t.array), t.layout))
    max = staticmethod(lambda t, axis: Tile(t.array.max(axis), t.layout))
    SliceLayout = staticmethod(lambda dim, parent: ("slice", dim, parent))
    NVMMADistributedLayout = staticmethod(lambda **_: "mma")
    DotOperandLayout = staticmethod(lambda **_: "operand")

    def __init__(self, block: int, blocks: int, written: Any) -> None:
        self.block, self.blocks, self.named, self.written = block, blocks, Named(), written

    def program_id(self, axis: int) -> Scalar:
        return Scalar(self.block)

    def num_programs(self, axis: int) -> Scalar:
        return Scalar(self.blocks)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        values = [x.array if isinstance(x, Tile) else x for x in (condition, a, b)]
        layout = next((x.layout for x in (condition, a, b) if isinstance(x, Tile)), None)
        if not any(isinstance(x, Tile) for x in (condition, a, b)):
            return _scalar(a if condition else b)
        dtype = next((x.array.dtype for x in (a, b) if isinstance(x, Tile)), None)
        whole = all(isinstance(value, int) for value in values[1:])
        return Tile(np.where(*values).astype(dtype or (np.int32 if whole else np.float32)), layout)

    def _either(self, a: Any, b: Any, function: Any) -> Any:
        if isinstance(a, Tile):
            return a._with(b, function)
        return b._with(a, function) if isinstance(b, Tile) else _scalar(function(a, b))

    def minimum(self, a: Any, b: Any) -> Any:
        return self._either(a, b, np.minimum)

    def maximum(self, a: Any, b: Any) -> Any:
        return self._either(a, b, np.maximum)

    def arange(self, start: int, end: int, layout: Any) -> Tile:
        return Tile(np.arange(start, end, dtype=np.int32), layout)

    def full(self, shape: Any, value: float, dtype: Any, layout: Any) -> Tile:
        return Tile(np.full(shape, value, dtype), layout)

    def zeros(self, shape: Any, dtype: Any, layout: Any) -> Tile:
        return self.full(shape, 0, dtype, layout)

    def sum(self, t: Tile, axis: int) -> Any:
        whole = t.array.dtype.kind == "i"
        found = Tile(t.array.sum(axis, dtype=t.array.dtype if whole else np.float32), t.layout)
        return found if found.array.ndim else _scalar(found)

    def reduce(self, t: Tile, axis: int, combine: Any) -> Any:
        found = functools.reduce(combine, (Tile(part) for part in np.moveaxis(t.array, axis, 0)))
        return found if found.array.ndim else _scalar(found)

    def load(self, places: Tile, mask: Any = None, other: Any = None) -> Any:
        if mask is not None:
            places_, kept = np.broadcast_arrays(places.array, mask.array)
            found = Tile(np.full(places_.shape, other, places.memory.dtype), places.layout)
            found.array[kept] = places.memory[places_[kept]]
            return found
        found = Tile(places.memory[places.array], places.layout)
        return found if found.array.ndim else _scalar(found) if found.array.dtype.kind == "i" else found.array[()]

    def store(self, places: Tile, value: Any, mask: Any = None) -> None:
        value = value.array if isinstance(value, Tile) else np.asarray(value)
        kept = np.asarray(True if mask is None else mask.array if isinstance(mask, Tile) else mask)
        at, value, kept = np.broadcast_arrays(places.array, value, kept)
        places.memory[at[kept]] = value[kept]

    def atomic_add(self, places: Tile, value: int, sem: str, scope: str) -> Scalar:
        assert sem == "relaxed" and scope == "gpu"
        CLOCK.pause()
        with CLOCK.changed:
            before = Scalar(places.memory[places.array])
            places.memory[places.array] += value
        return before

    def allocate_shared_memory(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        if layout == "barrier":
            made = np.empty(shape, object)
            for i in range(shape[0]):
                made[i, 0] = Barrier()
            return Shared(made)
        return Shared(np.full(shape, unwritten(np.dtype(dtype)), dtype), dtype)

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        if asm.startswith("{ bar."):
            kind, number, threads = asm.replace(",", " ").replace(";", " ").split()[1:4]
            CLOCK.pause()
            with CLOCK.changed:
                turn = self.named.arrive(number, int(threads))
            if kind == "bar.sync":
                CLOCK.wait_for(lambda: self.named.completed.get(number, 0) >= turn, asm)
            return 0
        if asm.startswith("{ cp.async.bulk.wait_group 0;"):
            self.written()
            return 0
        if asm in ("mov.b32 $0, $1;", "mov.b64 $0, $1;"):  # of a whole number or a pointer
            return args[0]
        return elementwise(asm, constraints.count("="), args, dtype, pack)

    def warp_specialize(self, partitions: Any, warps: Any, registers: Any) -> None:
        side_by_side(partitions)


def side_by_side(calls: Any) -> None:
    """Runs (function, arguments) each in a thread; raises what the first that failed raises."""

    def run(function: Any, arguments: Any) -> None:
        try:
            with np.errstate(**({"all": "ignore"} if CLOCK.overflows else {})):
                function(*arguments)
        except BaseException as error:
            with CLOCK.changed:
                CLOCK.failed = CLOCK.failed or error
                CLOCK.changed.notify_all()

    threads = [threading.Thread(target=run, args=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if CLOCK.failed is not None:
        raise CLOCK.failed


def elementwise(asm: str, results: int, args: Any, dtype: Any, pack: int) -> Tile:
    """A snippet on each element of tiles, or on pairs of neighbours of 16 bits each in one register."""
    given = np.broadcast_arrays(*(on_card(tile.array) for tile in args))
    assert pack == results == 4 // given[0].dtype.itemsize, "as many elements at a time as a register holds"
    words = [np.ascontiguousarray(array).view(np.uint32) for array in given]
    found = np.stack(compute(asm, results, words), -1).reshape(given[0].shape)
    return Tile(np.ascontiguousarray(found).view(dtype), args[0].layout)


def on_card(array: Any) -> Any:
    """Whole numbers as the card holds them, in 32 bits, with a sign or without: numpy widens them beside its own."""
    if array.dtype != np.int64:
        return array
    assert ((array >= -(2**31)) & (array < 2**32)).all()
    return array.astype(np.uint32).view(np.int32)


def unwritten(dtype: Any) -> Any:
    """What memory that nobody may read holds: NaN, also as bits of bf16; of whole numbers the largest."""
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.nan


class MBarrier:
    """What the kernels call ``mbarrier``."""

    MBarrierLayout = staticmethod(lambda: "barrier")

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def expect(self, barrier: Barrier, size: int) -> None:
        with CLOCK.changed:
            barrier.pending -= 1
            barrier.bytes += size
            assert barrier.pending >= 0
            barrier.settle()

    def arrive(self, barrier: Barrier, count: int) -> None:
        CLOCK.pause()
        with CLOCK.changed:
            TOUCHED.leave()
            barrier.pending -= count
            assert barrier.pending >= 0, "arrived once too often"
            barrier.settle()

    def wait(self, barrier: Barrier, parity: int) -> None:
        CLOCK.pause()
        CLOCK.wait_for(lambda: barrier.phase != parity, f"mbarrier.wait, parity {parity}")


class Descriptor:
    """A TMA descriptor: reads zeros beyond the tensor, writes nothing there."""

    def __init__(self, array: Any, block: tuple[int, ...]) -> None:
        self.array, self.dtype, self.layout = array, array.dtype.type, "tile"
        self.block_type = self
        self.shape, self.nbytes = block, int(np.prod(block)) * array.dtype.itemsize

    def places(self, at: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        sizes = [max(0, min(b, n - int(i))) for i, b, n in zip(at, self.shape, self.array.shape, strict=True)]
        return tuple(slice(int(i), int(i) + n) for i, n in zip(at, sizes, strict=True)), tuple(map(slice, sizes))


def load_tile(descriptor: Descriptor, at: Any, barrier: Barrier, shared: Shared) -> None:
    """Lands later, in a thread of its own."""

    def land() -> None:
        time.sleep(CLOCK.random.random() * 3e-4)
        outside, inside = descriptor.places(at)
        shared.array[...] = 0
        shared.array[inside] = descriptor.array[outside]
        with CLOCK.changed:
            barrier.bytes -= descriptor.nbytes
            barrier.settle()

    assert_ordered(shared, CLOCK.loose)
    shared.array[...] = unwritten(shared.array.dtype)  # from now on nobody may read what was there
    threading.Thread(target=land, daemon=True).start()


class Stores(threading.local):
    """Stores of one group that are under way: what they will read; and where what was read may not be written yet."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.unwritten: list[Any] = []


def names(block: int, blocks: int) -> dict[str, Any]:
    """The kernels' names for one block of threads."""
    queue, stores = Queue(), Stores()

    def multiply(a: Any, b: Shared, acc: Tile, use_acc: bool = True, is_async: bool = False) -> Any:
        box: list[Any] = []

        def run() -> None:
            left = a.array.astype(np.float32)
            box.append(Tile(left @ b.array.astype(np.float32) + (acc.array if use_acc else 0), acc.layout))

        queue.products.append((box, run))
        return box

    def multiplied(outstanding: int, deps: Any) -> Any:
        CLOCK.pause()
        while len(queue.products) > outstanding:
            _, run = queue.products.pop(0)
            run()
        results = tuple(box[0] for box in deps)
        return results[0] if len(results) == 1 else results

    def store_tile(descriptor: Descriptor, at: Any, shared: Shared) -> None:
        assert_ordered(shared, TOUCHED.arrays)
        TOUCHED.barrier()  # Triton's own, in front of the thread that stores
        before = stores.unwritten + [one.places(there)[0] for one, there, _ in stores.queued]
        assert descriptor.places(at)[0] not in before, "two stores to one place are not ordered"
        stores.queued.append((descriptor, at, shared))

    def stored(outstanding: int) -> None:
        while len(stores.queued) > outstanding:
            descriptor, at, shared = stores.queued.pop(0)
            outside, inside = descriptor.places(at)
            descriptor.array[outside] = shared.array[inside]
            stores.unwritten.append(outside)

    def written() -> None:
        stored(0)
        stores.unwritten.clear()

    return {
        "gl": Language(block, blocks, written), "mbarrier": MBarrier(), "multiply": multiply, "multiplied": multiplied,
        "load_tile": load_tile, "store_tile": store_tile, "stored": stored, "fence_async_shared": TOUCHED.fence,
        "thread_barrier": TOUCHED.barrier,
    }  # fmt: skip


def run_plan(plan: Plan, inputs: Inputs, blocks: int, seed: int) -> tuple[Any, Any]:
    """(out, lse) of a plan's kernel, one block of threads after the other, those that share a queue at once; P and out
    are not rounded.

    Raises:
        Deadlock: a barrier's wait never ends.
        AssertionError: a barrier is arrived at once too often.
    """
    w = inputs.workload
    out = np.full((w.B, w.H, w.L, w.D_v), np.nan, np.float32)
    lse = np.full(w.B * w.H * w.L, np.nan, np.float32)
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    tensors = {name: tensor.float().numpy() for name, tensor in arrays.items()} | {"o": out}
    options: dict[str, Any] = {"lengths": inputs.lengths, "slopes": inputs.alibi_slopes, "sinks": inputs.sinks}
    if w.packed is not None:
        low, high = row_bounds(w.replace(causal=None, window=None), "cpu")
        options |= {"starts": low[0].to(torch.int32), "ends": high[0].to(torch.int32)}
    blocks = min(blocks, plan.tiles)
    if plan.scheduled:
        options["order"] = torch.tensor(plan.schedule(blocks), dtype=torch.int32)
    pointers = {name: in_memory(option) for name, option in options.items() if option is not None}
    scalars = plan.scalars()
    if w.mask is not None:
        masks = MaskPlan(plan)
        pointers |= run_masks(masks, inputs.mask, pointers)
        scalars += masks.scalars()
    if w.bias is not None:
        bias, told = bias_arguments(inputs.bias, plan)
        tensors["bias"] = bias.view(torch.uint16).numpy() if bias.dtype == torch.bfloat16 else bias.float().numpy()
        pointers["bias"] = in_memory(bias)
        scalars += told
    descriptors = {f"{name}_desc": Descriptor(tensors[name], (1, 1, *box)) for name, box in plan.boxes().items()}
    pointers = {name: pointers[name] for name, there in plan.pointers.items() if there}
    numbers = {name: number(value) for name, value in zip(plan.scalar_types(), scalars, strict=True)}

    def run_block(kernel: Any) -> None:
        kernel(lse=Tile(0, None, lse), **descriptors, **pointers, **numbers, **plan.constants())

    of_block = [device_function("hopper_attention_forward", block, blocks) for block in range(blocks)]
    together = blocks if plan.queued else 1
    for first in range(0, blocks, together):
        CLOCK.__init__(seed + first, plan.fixed)  # type: ignore[misc]
        side_by_side([(run_block, (kernel,)) for kernel in of_block[first : first + together]])
    return torch.from_numpy(out), torch.from_numpy(lse).view(w.B, w.H, w.L)


def run_masks(masks: MaskPlan, mask: Any, pointers: dict[str, Any]) -> dict[str, Any]:
    """What the two kernels that read a mask write: words and lists; nothing of it may be read that is not written."""
    lists, kinds, *_ = masks.offsets
    made = {
        "words": np.full(lists, 0x5A5A5A5A, np.int32),
        "lists": np.full(kinds - lists, 2**30, np.int32),
        "kinds": np.full(masks.tiles, 99, np.uint8),
        "queue": np.full(1, 2**30, np.int32),
    }
    written = {name: Tile(0, None, array) for name, array in made.items()}
    mask = masks.readable(mask)
    read = in_memory(mask)
    if masks.step:  # four keys at a time
        read = Tile(read.array // 4, None, np.pad(read.memory, (0, -len(read.memory) % 4)).view(np.int32))
    numbers = {
        name: number(value) for name, value in zip(mask_kernels.WORDS_SCALARS, masks.words_scalars(mask), strict=True)
    }
    given = {name: pointers[name] for name, there in masks.pointers.items() if there}
    for block in range(masks.tiles):
        kernel = device_function("hopper_attention_mask_words", block, masks.tiles)
        kernel(
            mask=read, words=written["words"], kinds=written["kinds"],
            **given, **numbers, **masks.constants(),
        )  # fmt: skip
    queue = written["queue"] if masks.queued else None
    for block in range(masks.lists):
        kernel = device_function("hopper_attention_mask_lists", block, masks.lists)
        kernel(written["kinds"], written["lists"], queue, masks.key_tiles, LIST_CHUNK)
    return written


def in_memory(tensor: Any) -> Tile:
    """A pointer to a tensor's first element, in the memory that it is a view of."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    if whole.dtype == torch.bool:
        whole = whole.view(torch.uint8)
    return Tile(tensor.storage_offset(), None, (whole.float() if whole.is_floating_point() else whole).numpy())


def number(value: Any) -> Any:
    """A ctypes scalar as the kernels see it."""
    return Scalar(value.value) if isinstance(value.value, int) else value.value


def device_function(name: str, block: int = 0, blocks: int = 1) -> Any:
    """One of the kernel's functions on whole numbers."""
    module = vars(kernels) | names(block, blocks)
    for key, function in (kernels._DEVICE_FUNCTIONS | mask_kernels._DEVICE_FUNCTIONS).items():
        module[key] = types.FunctionType(function.__code__, module, key)
    return module[name]
