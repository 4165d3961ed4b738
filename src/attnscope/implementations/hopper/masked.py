"""Stage 2: what ``hopper`` does where there is a bool mask or an additive bias.

Reads Inputs, writes Output. Must not import another implementation or a later stage. A mask goes through two kernels of
``mask_kernels.py`` first, in the same call; what they write is allocated anew in each call, so calls on any streams and
replays of any graphs may overlap. A bias goes to the kernel as it is.
"""

from __future__ import annotations

import ctypes
from typing import Any

from attnscope import driver
from attnscope.device import Device
from attnscope.implementations.common import output_forms
from attnscope.implementations.hopper import (
    BIAS_COLUMN,
    BIAS_TILE,
    NO_BIAS,
    WARPS,
    Plan,
    PreparedHopper,
    kernel_arguments,
)  # fmt: skip
from attnscope.implementations.hopper.configurations import GROUP_ROWS, Configuration
from attnscope.inputs import Tensor
from attnscope.workload import Workload

WORDS_A_TILE = GROUP_ROWS * 4  # 32 bits each: kernels.py's _hide_by_words
LIST_CHUNK = 64  # tiles of keys that are ranked at a time


class MaskPlan:
    """What a workload and a configuration fix of the two kernels in front, and of the memory between them.

    Words and lists are shared by the heads, and by the batch entries, that a mask and the geometry do not tell apart.
    """

    def __init__(self, plan: Plan) -> None:
        w, c = plan.workload, plan.configuration
        self.workload, self.configuration, self.queued = w, c, plan.queued
        batch, self.heads, _, _ = w.broadcast_shape(w.mask)
        self.batch = w.B if w.lengths is not None else batch
        self.step = 0 if w.broadcast_shape(w.mask)[3] == 1 else 1  # of the mask along keys
        self.key_tiles, self.row_tiles = -(-w.S // c.keys), plan.row_tiles
        self.lists = self.batch * self.heads * self.row_tiles
        self.tiles = self.lists * self.key_tiles
        self.pointers = {
            "lengths": w.lengths is not None, "starts": w.packed is not None, "ends": w.packed is not None
        }  # fmt: skip

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Where lists, kinds and the queue begin in the memory between, and its end, in units of 4 bytes; words are
        first."""
        lists = self.tiles * self.configuration.groups * WORDS_A_TILE
        kinds = lists + self.lists * (self.key_tiles + 1)
        queue = kinds + -(-self.tiles // 4)
        return lists, kinds, queue, queue + self.queued

    def scalars(self) -> list[Any]:
        """The attention kernel's: tile t of head (b, h) has list b * list_batch + h * list_head + t; the length of a
        list, and of the words of 64 rows."""
        batch = self.heads * self.row_tiles if self.batch > 1 else 0
        head = self.row_tiles if self.heads > 1 else 0
        steps = self.key_tiles + 1, self.key_tiles * WORDS_A_TILE
        return [*(ctypes.c_int32(value) for value in (batch, head)), *(ctypes.c_int64(value) for value in steps)]

    def constants(self) -> dict[str, Any]:
        """What the first kernel is compiled with."""
        w, c = self.workload, self.configuration
        return {name: None for name, there in self.pointers.items() if not there} | {
            "GROUPS": c.groups,
            "KEYS": c.keys,
            "STEP": self.step,
            "CAUSAL": w.causal is not None,
            "BOTTOM_RIGHT": w.causal == "bottom_right",
            "WINDOWED": w.window is not None,
        }

    def readable(self, mask: Tensor) -> Tensor:
        """The mask, or a copy where four keys at a time cannot be read: rows begin at multiples of 4 bytes, and end."""
        strides = [stride for size, stride in zip(mask.shape[:3], mask.stride(), strict=False) if size > 1]
        whole = mask.stride(3) == 1 and not mask.shape[3] % 4 and not any(stride % 4 for stride in strides)
        return mask if self.step == 0 or (whole and not mask.data_ptr() % 4) else padded(mask)

    def words_scalars(self, mask: Tensor) -> list[Any]:
        """Values of the first kernel's scalars, in its order."""
        w = self.workload
        strides = mask.expand(self.batch, self.heads, w.L, mask.shape[3]).stride()[:3]
        strides = tuple(stride // 4 for stride in strides) if self.step else strides
        whole = (self.heads, w.L, w.S, self.row_tiles, self.key_tiles, min(w.window or 0, w.L + w.S))
        return [*(ctypes.c_int64(value) for value in strides), *(ctypes.c_int32(value) for value in whole)]

    def compile(self) -> list[Any]:
        """Machine code of the two kernels; no GPU is asked. Raises what Triton raises."""
        from attnscope.implementations.hopper import gluon_shim, mask_kernels

        module = mask_kernels.load()
        pointers = [name for name, there in self.pointers.items() if there]
        types = {"mask": "*i32" if self.step else "*u8", "words": "*i32", "kinds": "*u8"} | dict.fromkeys(
            pointers, "*i32"
        )
        types |= {name: "i64" if name.startswith("mask_") else "i32" for name in mask_kernels.WORDS_SCALARS}
        words = gluon_shim.compile_kernel(module.hopper_attention_mask_words, types, self.constants(), WARPS)
        types = {"kinds": "*u8", "lists": "*i32"} | ({"queue": "*i32"} if self.queued else {}) | {"key_tiles": "i32"}
        constants = {"CHUNK": LIST_CHUNK} | ({} if self.queued else {"queue": None})
        lists = gluon_shim.compile_kernel(module.hopper_attention_mask_lists, types, constants, WARPS)
        words.require([8] * (3 + len(pointers) + 3) + [4] * 6 + [8, 8])
        lists.require([8] * (2 + self.queued) + [4, 8, 8])
        return [words, lists]


def bias_arguments(bias: Tensor, plan: Plan) -> tuple[Tensor, list[Any]]:
    """(the bias as the kernel reads it, the kernel's scalars that tell how).

    Tiles are read where they lie if TMA can; else a copy with rows of whole 16 bytes is. Batch entries or heads that
    are the same memory are one to the kernel.
    """
    if plan.bias_kind == BIAS_TILE:
        for dim in (0, 1):
            if bias.stride(dim) == 0 and bias.shape[dim] > 1:
                bias = bias.narrow(dim, 0, 1)
        if not driver.readable(bias):
            bias = padded(bias)
        return bias, [ctypes.c_int32(int(size > 1)) for size in bias.shape[:2]]
    w = plan.workload
    batch, head, row, column = bias.expand(w.B, w.H, *bias.shape[2:]).stride()
    step = column if plan.bias_kind != BIAS_COLUMN else row if bias.shape[2] > 1 else 0
    return bias, [ctypes.c_int64(value) for value in (batch, head, step)]


def padded(tensor: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 16 bytes."""
    columns, step = tensor.shape[3], 16 // tensor.element_size()
    made = tensor.new_empty((*tensor.shape[:3], -(-columns // step) * step))[..., :columns]
    return made.copy_(tensor)


class PreparedMasked(PreparedHopper):
    """The kernel, and those in front of it, with all that a workload fixes."""

    def __init__(self, workload: Workload, device: Device, configuration: Configuration) -> None:
        super().__init__(workload, device, configuration)
        if self.empty:
            return
        brought = [name for name in ("mask", "bias") if getattr(workload, name) is not None]
        self.options, self.attributes = [*self.options, *brought], [*self.attributes, *brought]
        self.masks: MaskPlan | None = None
        if workload.mask is None:
            return
        import torch

        self.masks = MaskPlan(self.plan)
        elements = self.masks.offsets[-1]
        self.workspace_bytes = 4 * elements
        self.fresh = driver.Fresh(device.index, *output_forms(workload), ((elements,), (1,), torch.int32))
        self.in_front = [
            driver.Function(
                machine.name, driver.load(machine.cubin, machine.name, machine.shared_bytes, device.index),
                (blocks, 1, 1), machine.threads, machine.shared_bytes,
            )
            for machine, blocks in zip(self.masks.compile(), (self.masks.tiles, self.masks.lists), strict=True)
        ]  # fmt: skip

    def _start(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, others: list[Tensor]) -> None:
        """Queue the kernels of a call that was not seen before. ``others``: the memory between them, where there is a
        mask, then the options. What had to be copied for TMA lives until they are queued."""
        names = [*["between"] * (self.masks is not None), *self.options]
        given = {
            name: tensor if name in ("mask", "bias") else tensor.contiguous()
            for name, tensor in zip(names, others, strict=True)
        }
        scalars, calls = self.plan.scalars(), []
        read = {name: driver.as_readable(tensor) for name, tensor in (("q", q), ("k", k), ("v", v))} | {"o": out}
        told: list[Any] = []
        if self.plan.bias_kind != NO_BIAS:
            given["bias"], told = bias_arguments(given["bias"], self.plan)
            read["bias"] = given["bias"]
        if self.masks is not None:
            given["mask"] = self.masks.readable(given["mask"])
        places = {name: tensor.data_ptr() for name, tensor in ({"lse": lse} | given | self.tables).items()}
        if self.masks is not None:
            offsets = (0, *self.masks.offsets)
            for name, offset in zip(("words", "lists", "kinds", "queue"), offsets, strict=False):
                places[name] = places["between"] + 4 * offset
            calls += self._in_front(given["mask"], places)
            scalars += self.masks.scalars()
        calls.append((self.function, self._arguments(read, places, [*scalars, *told])))
        self.launches.start(driver.launch_key(read["q"], read["k"], read["v"], out, lse, list(given.values())), *calls)

    def _in_front(self, mask: Tensor, places: dict[str, int]) -> list[tuple[driver.Function, list[Any]]]:
        """The two kernels that read the mask."""
        assert self.masks is not None
        names = ["mask", "words", "kinds", *(name for name, there in self.masks.pointers.items() if there)]
        words = kernel_arguments([places[name] for name in names], self.masks.words_scalars(mask))
        key_tiles = ctypes.c_int32(self.masks.key_tiles)
        names = ["kinds", "lists", *["queue"] * self.masks.queued]
        lists = kernel_arguments([places[name] for name in names], [key_tiles])
        return list(zip(self.in_front, (words, lists), strict=True))
