"""Stage 6: how many warps a kernel can keep on one multiprocessor, recomputed from what the trace says of it.

torch's profiler estimates occupancy with the default shared memory limit of 48 KiB a block, so every kernel that opted
in to more reads 0 %. Here the opt-in limit counts. Pure arithmetic after NVIDIA's ``cuda_occupancy.h``; imports
neither torch nor an implementation.
"""

from __future__ import annotations

from attnscope.trace.events import DeviceEvent, DeviceProperties

DEFAULT_SHARED_LIMIT_BYTES = 48 * 1024
REGISTER_GRANULE = 256  # registers are given to a warp in this many
SHARED_GRANULE = 128
SHARED_RESERVED_BYTES = 1024  # per block, from compute capability 8.0 on
SUB_PARTITIONS = 4
MAX_BLOCKS = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}
MAX_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


def occupancy_percent(event: DeviceEvent, device: DeviceProperties | None) -> float | None:
    """Warps resident on a multiprocessor over those it can hold, in percent; None where the trace lacks a number.

    Like the profiler's estimate it counts the blocks that the grid offers, so a small grid gives a small figure.
    """
    if device is None or event.block is None or event.grid is None or not device.num_sms:
        return None
    blocks = resident_blocks(event, device)
    if blocks is None:
        return None
    offered = _product(event.grid) / device.num_sms
    warps = _warps(event.block, device.warp_size)
    return 100 * min(blocks, offered) * warps / (_max_threads(device) // device.warp_size)


def resident_blocks(event: DeviceEvent, device: DeviceProperties) -> int | None:
    """Blocks of this kernel that fit on one multiprocessor, by threads, registers and shared memory."""
    if event.block is None or event.registers is None or event.shared_memory_bytes is None:
        return None
    if not device.regs_per_multiprocessor or not device.shared_mem_per_multiprocessor:
        return None
    if device.compute_major is None or device.compute_major < 7:
        return None
    warps = _warps(event.block, device.warp_size)
    limits = [MAX_BLOCKS.get(_capability(device), 32), _max_threads(device) // (warps * device.warp_size)]
    if event.registers:
        per_warp = _round_up(event.registers * device.warp_size, REGISTER_GRANULE)
        per_partition = device.regs_per_multiprocessor // SUB_PARTITIONS // per_warp
        limits.append(per_partition * SUB_PARTITIONS // warps)
    reserved = SHARED_RESERVED_BYTES if device.compute_major >= 8 else 0
    shared = _round_up(event.shared_memory_bytes + reserved, SHARED_GRANULE)
    if shared:
        limits.append(device.shared_mem_per_multiprocessor // shared)
    return min(limits)


def _capability(device: DeviceProperties) -> tuple[int, int]:
    return device.compute_major or 0, device.compute_minor or 0


def _max_threads(device: DeviceProperties) -> int:
    """Threads a multiprocessor holds; one writer puts the number of multiprocessors in this field."""
    known = device.max_threads_per_multiprocessor or 0
    return known if known >= 1024 else MAX_THREADS.get(_capability(device), 2048)


def _warps(block: tuple[int, ...], warp_size: int) -> int:
    return max(-(-_product(block) // warp_size), 1)


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
