"""Implementations that break the contract in every way the sweep must survive. Each is right until it goes wrong."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time

from attnscope.implementation import Gradients, Output, Sheet, SheetImplementation
from attnscope.reference import compute_attention

SHEET = Sheet(
    dtypes=frozenset({"fp32", "bf16", "fp16"}),
    features=frozenset({"causal_top_left", "gqa", "cross", "scale"}),
    devices=frozenset({"cpu"}),
    lse=True,
)


class GoodPrepared:
    """Float64 attention, rounded once."""

    def forward(self, inputs, *, save=False):
        truth = compute_attention(inputs, backward=save)
        return Output(truth.out.to(inputs.q.dtype), truth.lse.float(), saved=truth)

    def backward(self, inputs, saved):
        dtype = inputs.q.dtype
        return Gradients(saved.dq.to(dtype), saved.dk.to(dtype), saved.dv.to(dtype))


class Good(SheetImplementation):
    name, summary, sheet = "good", "float64, rounded once", SHEET

    def prepare(self, workload, device):
        return GoodPrepared()


class Remarks(Good):
    """Has something to say of its times."""

    name = "remarks"

    def prepare(self, workload, device):
        class Prepared(GoodPrepared):
            def remarks(self):
                return ["the moon was full"]

        return Prepared()


class Broken(Good):
    """A library that is installed and does not import."""

    name = "broken"

    def prepare(self, workload, device):
        from attnscope.implementations.library import Library

        return Library("broken-library", "broken_library", ("attend",)).load(self.name)


class Also(Good):
    name = "also_good"


class Wrong(Good):
    name = "wrong"

    def prepare(self, workload, device):
        class Prepared(GoodPrepared):
            def forward(self, inputs, *, save=False):
                output = super().forward(inputs, save=save)
                return dataclasses.replace(output, out=output.out * 1.05)

        return Prepared()


class Raises(Good):
    name = "raises"

    def prepare(self, workload, device):
        raise RuntimeError("no kernel for this moon phase")


class Crashes(Good):
    name = "crashes"

    def prepare(self, workload, device):
        os.kill(os.getpid(), signal.SIGSEGV)


class Hangs(Good):
    name = "hangs"

    def prepare(self, workload, device):
        if marker := os.environ.get("ATTNSCOPE_TEST_MARKER"):
            open(marker, "w").close()
        time.sleep(3600)


class HangsInCheck(Good):
    """Answers its first call in each direction, and hangs in the check that follows."""

    name = "hangs_in_check"

    def prepare(self, workload, device):
        calls = [0]

        class Prepared(GoodPrepared):
            def forward(self, inputs, *, save=False):
                calls[0] += 1
                if calls[0] > 2:
                    open(os.environ["ATTNSCOPE_TEST_MARKER"], "w").close()
                    time.sleep(3600)
                return super().forward(inputs, save=save)

        return Prepared()


class OutOfMemory(Good):
    name = "out_of_memory"

    def prepare(self, workload, device):
        import torch

        torch.empty(2**60, dtype=torch.uint8)


class KilledForMemory(Good):
    name = "killed_for_memory"

    def prepare(self, workload, device):
        os.kill(os.getpid(), signal.SIGKILL)


class CrashesLater(Good):
    """Passes its check; dies once it is prepared a second time, which is when it is measured."""

    name = "crashes_later"

    def prepare(self, workload, device):
        marker = os.environ["ATTNSCOPE_TEST_MARKER"]
        if os.path.exists(marker):
            os.kill(os.getpid(), signal.SIGSEGV)
        with open(marker, "w"):
            return GoodPrepared()


class RaisesLater(CrashesLater):
    name = "raises_later"

    def prepare(self, workload, device):
        if os.path.exists(os.environ["ATTNSCOPE_TEST_MARKER"]):
            raise RuntimeError("tired")
        return super().prepare(workload, device)


class Compiles(Good):
    """Appends a line to a file each time it is prepared: pid, workload; as if a compiler kept its work on disk."""

    name = "compiles"
    sheet = dataclasses.replace(SHEET, kept_on_disk=True)

    def prepare(self, workload, device):
        with open(os.environ["ATTNSCOPE_TEST_MARKER"], "a") as file:
            file.write(f"{os.getpid()} {workload} {os.environ.get('TORCHINDUCTOR_COMPILE_THREADS')}\n")
        return GoodPrepared()


class CrashesWarm(Compiles):
    """Dies in every process but the one that checks, and there it is right."""

    name = "crashes_warm"

    def prepare(self, workload, device):
        if os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"):
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().prepare(workload, device)


class RudeReasons(Good):
    """Breaks the promise that reasons_unsupported never raises."""

    name = "rude_reasons"

    def reasons_unsupported(self, workload, device, direction="forward"):
        raise KeyError("sm_75")


class Impostor(Good):
    """Claims to run an op that it does not run."""

    name = "impostor"
    sheet = dataclasses.replace(SHEET, kernels={"cpu": (r"aten::_flash_attention_of_the_future",)})


class ForwardOnly(Good):
    name = "forward_only"
    sheet = dataclasses.replace(SHEET, directions=frozenset({"forward"}))


class LeavesItsMark(Good):
    """Right, but sets what all of torch shares."""

    name = "leaves_its_mark"

    def prepare(self, workload, device):
        import torch

        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return GoodPrepared()


class TiresOfIt(Good):
    """Right while it is checked, zeros once it is called often: what a benchmark must not time."""

    name = "tires_of_it"

    def prepare(self, workload, device):
        calls = [0]

        class Prepared(GoodPrepared):
            def forward(self, inputs, *, save=False):
                calls[0] += 1
                output = super().forward(inputs, save=save)
                late = "attnscope.jobs" in sys.modules and sys.modules["attnscope.jobs"]._state.get("prepared")
                return dataclasses.replace(output, out=output.out * (0 if late and calls[0] > 4 else 1))

        return Prepared()


class Surrogate(Good):
    name = "surrogate"

    def prepare(self, workload, device):
        raise RuntimeError("\ud800 is no text")
