"""Runs every rung once at small sizes, for compute-sanitizer: ``compute-sanitizer --tool racecheck python THIS``."""

from __future__ import annotations

import sys

import torch

from attnscope.device import find_device
from attnscope.implementations.cuda_ladder import RUNGS
from attnscope.inputs import make_inputs
from attnscope.ladder import workload_for
from attnscope.workload import Workload


def main() -> None:
    device, wanted = find_device("cuda"), sys.argv[1:]
    for way, rungs in RUNGS.items():
        for kind in rungs:
            rung = kind()
            if wanted and rung.name not in wanted:
                continue
            for length, blocks in ((65, rung.block_sizes[1:4:2]), (130, (rung.default_block_size,))):
                workload = workload_for(rung, Workload.parse(f"B1,H2,L{length},D64,fp32,causal,layout=qkv"), device)
                inputs = make_inputs(workload, device)
                for block in blocks:
                    prepared = rung.prepare(workload, device, block_size=block)
                    output = prepared.forward(inputs, save=way == "backward")
                    if way == "backward":
                        prepared.backward(inputs, output.saved)
                    torch.cuda.synchronize()
            print(rung.name, "ran", flush=True)


if __name__ == "__main__":
    main()
