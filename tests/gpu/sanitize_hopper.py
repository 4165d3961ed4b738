"""Runs our Hopper kernels once at small sizes: ``compute-sanitizer --tool racecheck python THIS``.

Sizes are small and cover the paths: several tiles a block, a last tile that is cut, masks, the table of tiles, keys
split over programs, whose parts the last of them or a second kernel adds up. Outputs are not read: what TMA stored,
initcheck does not know as written. What is compiled is compiled for test_hopper_gpu.py, too.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from attnscope.device import find_device
from attnscope.implementation import find
from attnscope.implementations.hopper.decode import DecodeKernel
from attnscope.implementations.hopper_cuda import HopperCuda
from attnscope.implementations.hopper_cuda.configurations import Configuration
from attnscope.inputs import make_inputs
from attnscope.workload import Workload
from rising_scores import RISES, rising

PREFILL = {
    "hopper": [
        "B2,H4/2,L200,D64,bf16,causal,sinks,layout=blhd",
        "B3,H2,L130,S190,D80,bf16,lengths=190/7/0",
        "B1,H4/2,L200,S333,D256,bf16,causal=bottom_right",
        "B2,H4,L300,D128,bf16,mask=bool",
    ],
    "hopper_cuda": ["B2,H4/2,L200,S333,D128,bf16,causal=bottom_right,layout=blhd", "B1,H2,L200,D64,bf16"],
}
CUT = Configuration(1, 16, 2, split=True)  # keys of the last round are cut
FOUR = Configuration(4, 64, 10, False, query_slots=2, fixed_max=True)  # half of the heads are computed twice
CONFIGURED = [
    ("B1,H3,L64,S4000,D64,bf16,layout=blhd", CUT),
    ("B1,H200,L60,S512,D16,fp16", CUT),  # a whole turn before
    ("B1,H4/2,L70,S4000,D64,bf16", replace(CUT, cluster=2)),
    ("B3,H32,L200,D64,bf16,causal", Configuration(3, 128, 4, schedule="table", query_slots=2, early=True)),
    ("B3,H32,L200,D128,bf16,causal", Configuration(2, 128, 2, schedule="table", query_slots=2, early=True)),
    ("B3,H64,L300,D64,bf16,causal", replace(FOUR, schedule="table", alternate=True)),
    ("B3,H64,L300,D64,fp16", FOUR),
]
DECODING = [  # splits, and whether the last program of a head adds up
    ("B2,H8/2,L1,S700,D128,bf16", 3, True),
    ("B2,H8/2,L1,S700,D128,bf16", 3, False),
    ("B1,H36/2,L1,S300,D256,bf16,sinks", 4, True),
    ("B2,H4,L3,S130,D64,bf16,causal=bottom_right", 1, None),
]


def main() -> None:
    device, wanted = find_device("cuda"), sys.argv[1:]
    for name, texts in PREFILL.items():
        for text in texts if not wanted or name in wanted else ():
            workload = Workload.parse(text)
            prepared = find(name).prepare(workload, device)
            prepared.forward(make_inputs(workload, device))
            torch.cuda.synchronize()
            print(name, text, "ran", flush=True)
    for text, configuration in CONFIGURED if not wanted or "hopper_cuda" in wanted else ():
        workload = Workload.parse(text)
        configured = HopperCuda().prepare_as(workload, device, configuration)
        assert configuration.split == configuration.splits(workload, device.multiprocessors or 132)
        assert configuration.early == configuration.starts_early(workload)
        inputs = make_inputs(workload, device)
        if configuration.keeps_maxima(workload):
            rising(inputs, RISES[workload.dtype], slice(workload.H // 2))
        configured.forward(inputs)
        torch.cuda.synchronize()
        print("hopper_cuda", text, configuration, "ran", flush=True)
    for text, splits, joined in DECODING if not wanted or "decode" in wanted else ():
        workload = Workload.parse(text)
        kernel = DecodeKernel(workload, device, splits=splits, joined=joined)
        kernel.compile()
        decoded = make_inputs(workload, device)
        for _ in range(2):  # the second finds the counters as the first left them
            kernel.forward(decoded)
        torch.cuda.synchronize()
        print("decode", text, "ran", flush=True)


if __name__ == "__main__":
    main()
