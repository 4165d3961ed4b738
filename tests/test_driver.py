"""attnscope.driver and the host's part of hopper, its decoding and hopper_cuda, on a stand-in for CUDA's driver.

What a call costs is counted, not timed: tensors made, Python functions called. Times are measured on a card, in
tests/gpu/test_host_path_gpu.py.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from attnscope import driver  # noqa: E402
from attnscope.device import find_device  # noqa: E402
from attnscope.errors import PrepareFailed  # noqa: E402
from attnscope.inputs import make_inputs  # noqa: E402
from attnscope.workload import Workload  # noqa: E402
from driver_stand_in import Driver, TensorMap, stand_in  # noqa: E402
from prepared_on_stand_in import NAMES, prepare  # noqa: E402

CPU = find_device("cpu")
FUNCTION = driver.Function("kernel", 5, (3, 2, 1), 384, 1000)
PLAIN = Workload.parse("B1,H4/2,L8,S64,D64,bf16,layout=blhd")
OPTIONS = Workload.parse("B2,H4/2,L8,S64,D64,bf16,lengths=64/5,sinks")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = stand_in(monkeypatch)
    made.kernels[5] = [ctypes.c_int32, ctypes.c_float], None
    return made


def arguments(number: int) -> list[Any]:
    return [ctypes.c_int32(number), ctypes.c_float(0.5)]


# --- structures and tensor maps ---------------------------------------------------------------------------------------


def test_a_launch_s_structure_lies_as_in_cudas_header() -> None:
    """Offsets and size of CUlaunchConfig in cuda.h of CUDA 13.0, as a C compiler gives them."""
    shape = driver._Shape
    assert [shape.shared_bytes.offset, shape.stream.offset, shape.attributes.offset] == [24, 32, 40]
    assert [shape.attribute_count.offset, ctypes.sizeof(shape)] == [48, 56]


def test_a_tensor_map_walks_a_tensor_where_it_lies(cuda: Driver) -> None:
    inputs = make_inputs(Workload.parse("B2,H4/2,L5,S7,D80,bf16,layout=blhd"), CPU)
    for _ in range(20):  # wherever its memory begins
        made = driver.tensor_map(inputs.k, "bf16", (128, 64))
        found = TensorMap.from_buffer(made)
        assert ctypes.addressof(made) % 64 == 0 and found.address == inputs.k.data_ptr()
        assert [list(a) for a in (found.sizes, found.strides, found.box)] == [
            [80, 7, 2, 2], [320, 160, 2240], [64, 128, 1, 1]
        ]  # fmt: skip
    assert driver.map_sizes((2, 5, 3, 64), (960, 64, 320, 1), 2) == ([64, 3, 5, 2], [640, 128, 1920])


def test_what_the_driver_does_not_describe_is_a_sentence(cuda: Driver) -> None:
    with pytest.raises(PrepareFailed, match=r"shape \(1, 1, 8, 64\) and strides .* cuTensorMapEncodeTiled .* error 1"):
        driver.tensor_map(torch.zeros(1, 1, 8, 65, dtype=torch.bfloat16)[..., :64], "bf16", (64, 64))


def test_what_the_copy_engine_can_read_and_what_is_copied() -> None:
    buffer = torch.zeros(2, 3, 8, 64, dtype=torch.bfloat16)
    one = buffer[:1, :1]
    for good in (buffer, buffer.transpose(1, 2), one.expand(1, 1, 8, 64), buffer[..., 8:16], buffer.view(2, 3, 4, 128)):
        assert driver.as_readable(good) is good
    crooked = torch.zeros(buffer.numel() + 1, dtype=torch.bfloat16)[1:].view(2, 3, 8, 64)
    for bad in (buffer.mT, buffer[..., 4:12], buffer[:, :1].expand(2, 3, 8, 64), buffer[..., ::2], crooked):
        made = driver.as_readable(bad)
        assert made is not bad and torch.equal(made, bad) and driver.readable(made)


# --- launches ---------------------------------------------------------------------------------------------------------


def test_a_launch_passes_what_it_was_given(cuda: Driver) -> None:
    calls = (FUNCTION, arguments(9)), (driver.Function("two", 5, (8, 1, 1), 32, 0), arguments(3))
    driver.Launches(0).start("key", *calls)
    first, second = cuda.launched
    assert (first.handle, first.grid, first.threads, first.shared_bytes, first.stream) == (5, (3, 2, 1), 384, 1000, 7)
    assert [value.value for value in first.values] == [9, 0.5]
    assert (second.grid, second.threads, second.values[0].value) == ((8, 1, 1), 32, 3)


def test_launches_are_kept_by_key_and_stream(cuda: Driver) -> None:
    launches = driver.Launches(0)
    assert not launches.replay("a")
    launches.start("a", (FUNCTION, arguments(1)))
    assert launches.replay("a") and not launches.replay("b")
    cuda.stream = 70
    assert not launches.replay("a")
    launches.start("a", (FUNCTION, arguments(2)))
    assert launches.replay("a")
    assert [(launch.stream, launch.values[0].value) for launch in cuda.launched] == [(7, 1), (7, 1), (70, 2), (70, 2)]


def test_kept_launches_are_bounded_and_the_oldest_goes(cuda: Driver) -> None:
    launches = driver.Launches(0)
    for number in range(driver.KEPT + 3):
        launches.start(number, (FUNCTION, arguments(number)))
    launches.start(3, (FUNCTION, arguments(3)))  # there already: nothing goes
    assert len(launches) == driver.KEPT
    assert [number for number in range(5) if launches.replay(number)] == [3, 4]


@pytest.mark.parametrize("with_workspace", [False, True])
def test_what_passes_a_workspace_is_neither_kept_by_a_capture_nor_queued_again_in_one(
    cuda: Driver, with_workspace: bool
) -> None:
    launches = driver.Launches(0, with_workspace=with_workspace)
    launches.start("eager", (FUNCTION, arguments(1)))
    cuda.capture = 3
    launches.start("captured", (FUNCTION, arguments(2)))
    assert [launches.replay(key) for key in ("eager", "captured")] == [not with_workspace] * 2
    cuda.capture = None
    assert [launches.replay(key) for key in ("eager", "captured")] == [True, not with_workspace]


def test_what_passes_a_workspace_is_not_kept_for_a_stream_that_is_another_one_in_each_thread(cuda: Driver) -> None:
    cuda.stream = driver.PER_THREAD_STREAM
    for with_workspace in (False, True):
        launches = driver.Launches(0, with_workspace=with_workspace)
        launches.start("a", (FUNCTION, arguments(1)))
        assert launches.replay("a") is not with_workspace


def test_the_capture_of_a_stream_has_a_number(cuda: Driver) -> None:
    launches = driver.Launches(0)
    assert launches.stream_and_capture() == (7, None)
    cuda.capture = 3
    assert launches.stream_and_capture() == (7, 3)
    cuda.stream = driver.LEGACY_STREAM  # of which the driver is not asked: no capture takes it
    assert launches.stream_and_capture() == (0, None)


def test_the_device_of_the_launch_becomes_the_current_one(cuda: Driver) -> None:
    launches = driver.Launches(1)
    seen: list[int] = []
    cuda.kernels[5] = cuda.kernels[5][0], lambda launch: seen.append(cuda.device)
    launches.start("a", (FUNCTION, arguments(1)))
    assert launches.replay("a")
    assert seen == [1, 1] and cuda.device == 0 and {launch.stream for launch in cuda.launched} == {8}


def test_a_thread_without_a_context_gets_one(cuda: Driver) -> None:
    launches = driver.Launches(0)
    cuda.without_context.add(threading.get_ident())
    launches.start("a", (FUNCTION, arguments(1)))
    assert launches.replay("a")
    assert cuda.contexts_given == 1 and len(cuda.launched) == 2


def test_a_refused_launch_is_a_sentence(cuda: Driver) -> None:
    cuda.refuses = 719
    with pytest.raises(PrepareFailed, match=r"launching kernel failed with CUDA's error 719: .*grid=\(3, 2, 1\)"):
        driver.Launches(0).start("a", (FUNCTION, arguments(1)))


def test_a_driver_that_is_not_there_or_lacks_a_function_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    driver.library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", none)
    with pytest.raises(PrepareFailed, match="CUDA's driver does not load: libcuda"):
        driver.library()
    monkeypatch.setattr(driver, "library", object)
    with pytest.raises(PrepareFailed, match="has no cuTensorMapEncodeTiled\nhint: a driver for CUDA 12"):
        driver.tensor_map(torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16), "bf16", (8, 64))


# --- the implementations ----------------------------------------------------------------------------------------------


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest, cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> Callable[[Workload], Any]:
    """Prepares a workload by one of the implementations."""

    def made(workload: Workload) -> Any:
        if request.param == "hopper_cuda" and workload is OPTIONS:
            pytest.skip("takes no options")
        return prepare(request.param, cuda, monkeypatch, workload)

    return made


def described(launch: Any) -> list[Any]:
    """(address, strides) of the tensors that a launch reads, as far as it is told them by tensor maps."""
    return [(value.address, list(value.strides)) for value in launch.values if isinstance(value, TensorMap)]


def passed(launch: Any) -> list[Any]:
    """All that a launch passes, comparable."""
    return described(launch) + [value.value for value in launch.values if not isinstance(value, TensorMap)]


class Made(TorchFunctionMode):
    """Names of torch's functions, called from Python, that make a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found is not args[0]:
            self.names.append(func.__name__)
        return found


@pytest.mark.parametrize("workload", [PLAIN, OPTIONS], ids=str)
def test_a_call_makes_its_outputs_and_nothing_else(make: Any, cuda: Driver, workload: Workload) -> None:
    prepared, inputs = make(workload), make_inputs(workload, CPU)
    prepared.forward(inputs)
    cuda.made = 0
    with Made() as others:
        output = prepared.forward(inputs)
    assert (cuda.made, others.names) == (2, [])
    like = inputs.grad_out
    assert (output.out.shape, output.out.stride(), output.out.dtype) == (like.shape, like.stride(), like.dtype)
    assert output.lse.dtype == torch.float32 and output.lse.is_contiguous()


def test_tensors_are_made_on_the_device_of_the_workload(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made_on: list[int] = []
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", lambda *form: made_on.append(cuda.device))
    form = (2, 3), (3, 1), torch.float32
    driver.Fresh(1, form, form)()
    driver.Fresh(0, form)()
    assert made_on == [1, 1, 0] and cuda.device == 0


def test_a_call_seen_before_takes_five_functions(make: Any, cuda: Driver) -> None:
    """Each costs the host some tenth of a microsecond; time itself is not measured well beside other tests."""
    prepared, inputs = make(PLAIN), make_inputs(PLAIN, CPU)
    cuda.same = {}
    prepared.forward(inputs)
    called: list[str] = []
    source = str(Path(driver.__file__).parent)

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(source):
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        prepared.forward(inputs)
    finally:
        sys.setprofile(None)
    ours = [name for name in called if not name.startswith("<")]  # comprehensions are functions up to Python 3.11
    assert ours == ["forward", "__call__", "launch_key", "replay", "_queue"]


@pytest.mark.parametrize("workload", [PLAIN, OPTIONS], ids=str)
def test_a_call_passes_the_tensors_of_this_call(make: Any, cuda: Driver, workload: Workload) -> None:
    prepared = make(workload)
    kept = [make_inputs(workload, CPU, seed) for seed in range(3)]
    for inputs in [*kept, *kept]:
        cuda.launched.clear()
        output = prepared.forward(inputs)
        found = passed(cuda.launched[0])
        addresses = {value[0] if isinstance(value, tuple) else value for value in found}
        wanted = [inputs.q, inputs.k, inputs.v, output.lse, inputs.lengths, inputs.sinks, output.out]
        assert {tensor.data_ptr() for tensor in wanted if tensor is not None} <= addresses


def other_strides(tensor: Any) -> Any:
    """The same shape at the same address, with heads and rows the other way round."""
    _, H, L, D = tensor.shape
    swapped = (H * L * D, L * D, D, 1) if tensor.stride(2) != D else (H * L * D, D, H * D, 1)
    return tensor.as_strided(tensor.shape, swapped)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_other_strides_at_an_address_are_another_call(make: Any, cuda: Driver, name: str) -> None:
    """As where a tensor was freed and another one lies where it lay."""
    prepared, inputs = make(PLAIN), make_inputs(PLAIN, CPU)
    first = getattr(inputs, name)
    seen = []
    for tensor in (first, other_strides(first), first, other_strides(first)):
        setattr(inputs, name, tensor)
        cuda.launched.clear()
        prepared.forward(inputs)
        seen.append(told(cuda.launched[0]))
    assert seen[0] == seen[2] != seen[1] == seen[3]


def told(launch: Any) -> list[Any]:
    """All that a launch passes but addresses."""
    values = [value for value in launch.values if not isinstance(value, TensorMap)]
    return [strides for _, strides in described(launch)] + [v.value for v in values if (v.value or 0) < 2**32]


def test_a_tensor_that_cannot_be_read_is_copied_in_every_call(make: Any, cuda: Driver) -> None:
    prepared, inputs = make(PLAIN), make_inputs(PLAIN, CPU)
    crooked = torch.zeros(inputs.k.numel() + 1, dtype=torch.bfloat16)[1:].view(inputs.k.shape)
    inputs.k = crooked
    for _ in range(3):
        with Made() as others:
            prepared.forward(inputs)
        assert others.names == ["clone"]
        assert crooked.data_ptr() not in passed(cuda.launched[-1])


def test_options_that_are_not_dense_are_copied_in_every_call(make: Any, cuda: Driver) -> None:
    prepared, inputs = make(OPTIONS), make_inputs(OPTIONS, CPU)
    prepared.forward(inputs)
    own = inputs.sinks
    wide = torch.zeros(2 * own.numel()).as_strided(own.shape, (2,))
    for sinks, in_place in ((wide, False), (wide, False), (wide.as_strided(own.shape, (1,)), True)):
        inputs.sinks = sinks
        cuda.launched.clear()
        prepared.forward(inputs)
        assert any(wide.data_ptr() in passed(launch) for launch in cuda.launched) == in_place


def test_threads_may_share_a_prepared_workload(make: Any, cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "KEPT", 4)  # so that they throw away each other's
    prepared, failed, seen = make(PLAIN), [], threading.local()

    def run(launch: Any) -> None:
        seen.launches.append(passed(launch))

    cuda.kernels = {handle: (types, run) for handle, (types, _) in cuda.kernels.items()}

    def work(seed: int) -> None:
        try:
            inputs = [make_inputs(PLAIN, CPU, seed + n) for n in range(3)]
            for turn in range(60):
                seen.launches, one = [], inputs[turn % 3]
                output = prepared.forward(one)
                found = {v[0] if isinstance(v, tuple) else v for v in seen.launches[0]}
                wanted = {t.data_ptr() for t in (one.q, one.k, one.v, output.out, output.lse)}
                assert wanted <= found
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
