"""hopper_cuda without a GPU: its kernel on the CPU emulator, its machine code, its configurations and refusals."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import threading

import pytest

from attnscope import cuda
from attnscope.device import Device, find_device
from attnscope.errors import UsageError
from attnscope.implementations import hopper_cuda
from attnscope.implementations.common import NO_TILE
from attnscope.implementations.hopper_cuda import configurations, launching, scheduling
from attnscope.implementations.hopper_cuda.configurations import CHOICES, Configuration, usual
from attnscope.tables import Table, table_text
from attnscope.workload import Workload

torch = pytest.importorskip("torch")

from attnscope.inputs import make_inputs  # noqa: E402
from attnscope.reference import compute_attention  # noqa: E402

HOPPER = Device("cuda", "H100", capability=(9, 0), multiprocessors=132, l2_bytes=50 * 2**20)
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3}  # of an element's error over its condition scale
TINY = {"bf16": 1e-12, "fp16": 1e-4}  # fp16 has few bits left for weights below 6e-5
LSE_TOLERANCE = 1e-5
SMALL = Configuration(2, 64, 2, slack=8, schedule="table", query_slots=2)  # quick to compile for a CPU


@pytest.fixture
def emulated(monkeypatch):
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    import cuda_emulator

    monkeypatch.setattr(cuda, "load_kernel", cuda_emulator.load_kernel)
    monkeypatch.setattr(launching, "encode", cuda_emulator.encode_tensor_map)
    monkeypatch.setattr(launching, "bind", cuda_emulator.bind)
    monkeypatch.setitem(cuda_emulator.ORDER, "value", 0)
    return cuda_emulator


def check(emulator, text: str, configuration: Configuration | None = None, blocks: int = 2, kind: str = "needles"):
    """All orders of threads and copies agree bit for bit, and are right."""
    workload = Workload.parse(text)
    device = dataclasses.replace(emulator.DEVICE, multiprocessors=blocks)
    inputs = make_inputs(workload, find_device("cpu"), 1, kind)
    truth = compute_attention(inputs)
    prepared = hopper_cuda.HopperCuda().prepare_as(workload, device, configuration or usual(workload))
    found = []
    for order in (0, 1, 2):
        emulator.ORDER["value"] = order
        found.append(prepared.forward(inputs))
    first = found[0]
    for other in found[1:]:
        assert torch.equal(first.out, other.out) and torch.equal(first.lse, other.lse), "hangs on the order of threads"
    error = ((first.out.double() - truth.out).abs() / (truth.scales["out"] + TINY[workload.dtype])).max().item()
    assert error < TOLERANCE[workload.dtype], f"{text}, {configuration}: out is off by {error:.1e}"
    seen = torch.isfinite(truth.lse)
    assert torch.equal(first.lse[~seen].double(), truth.lse[~seen])
    lse_error = (first.lse.double() - truth.lse)[seen].abs() / (1 + truth.lse[seen].abs())
    assert not seen.any() or lse_error.max().item() < LSE_TOLERANCE, f"{text}: lse is off by {lse_error.max():.1e}"
    assert not first.out[~seen].any(), "a row that sees no key is not 0"
    return first


# --- the kernel on a CPU ----------------------------------------------------------------------------------------------


def test_the_kernel_is_right_on_the_emulator(emulated):
    for text in (
        "B2,H2/1,L150,S210,D64,bf16,causal=bottom_right,layout=blhd",
        "B1,H3,L130,S66,D64,bf16,causal=bottom_right",  # the first rows see nothing
        "B1,H2,L129,D64,bf16,causal,layout=qkv,scale=0.5",
    ):
        check(emulated, text, SMALL)


SHAPES = [
    ("B1,H2,L130,S400,D128,bf16", None),
    ("B2,H2/1,L300,D128,bf16,causal", None),
    ("B1,H1,L70,S300,D128,fp16,causal=bottom_right,layout=blhd", None),
    ("B1,H2,L200,S300,D64,bf16", None),
    ("B1,H2,L450,D64,fp16,causal", None),
    ("B1,H1,L200,S170,D256,bf16", None),
    ("B1,H1,L200,D256,bf16,causal", None),
    ("B1,H1,L400,D128,bf16,causal,window=150", None),
    ("B1,H1,L300,D64,bf16,window=40", Configuration(2, 64, 3)),
    ("B1,H1,L300,D64,bf16,causal,window=30,scale=0.3", Configuration(2, 64, 2, slack=8)),
    ("B1,H2,L150,S250,D72,bf16", None),
    ("B1,H3,L400,D64,bf16,causal", Configuration(2, 64, 2, schedule="table")),
    ("B1,H3,L400,D64,bf16,causal", Configuration(3, 64, 2, query_slots=2)),
    (
        "B1,H4/2,L400,S300,D128,bf16,causal=bottom_right",
        Configuration(2, 64, 2, False, schedule="table", query_slots=2),
    ),
    ("B2,H2,L300,D64,fp16,window=70", Configuration(2, 32, 3, slack=8, schedule="table", query_slots=2)),
    ("B1,H2,L257,D96,bf16,causal", Configuration(2, 80, 2, ping_pong=False, slack=8, persistent=False, snake=False)),
    ("B1,H1,L150,S230,D192,bf16", None),
    ("B1,H1,L190,D64,bf16,causal", Configuration(3, 16, 3, slack=8)),
    ("B2,H3,L100,S1,D8,bf16", Configuration(2, 16, 2)),
    ("B3,H4/2,L200,D32,bf16,causal,layout=blhd", Configuration(2, 32, 2)),
]


@pytest.mark.long
@pytest.mark.parametrize(("text", "configuration"), SHAPES, ids=lambda x: x if isinstance(x, str) else "")
def test_every_variant_is_right_on_the_emulator(emulated, text, configuration):
    check(emulated, text, configuration)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["large", "shifted", "peaky"])
def test_hard_inputs_are_right_on_the_emulator(emulated, kind):
    for slack in (0, 8):
        check(
            emulated, "B1,H1,L130,S300,D64,bf16,causal=bottom_right", dataclasses.replace(SMALL, slack=slack), kind=kind
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        (
            "wait_for(&barriers->k_full[keys.stage], keys.phase);\n    take_turn();\n    start",
            "take_turn();\n    start",
        ),
        ("    wait_for_products<First ? 0 : 1>();\n", ""),
        ("    wait_for(&barriers->k_empty[key_ring.stage], key_ring.phase ^ 1);\n", ""),
        ("    wait_for(&barriers->q_empty[query_ring.stage], query_ring.phase ^ 1);\n", ""),
        ("wait_for(&barriers->q_full[own.queries.stage], own.queries.phase);", ";"),
        ("    publish_barriers();\n", ""),
        ("    wait_for_products<0>();\n", ""),
        ("{ wait_for(&barriers->v_full[values.stage], values.phase); }", "{}"),
        ("if (last) release(&barriers->q_empty[queries.stage]);", ""),
        ("pass<256>(FIRST_TURN);", ";"),
        ("      if (work.begin < work.end) own.queries.next();\n", ""),
        ("queries + query_ring.stage * QUERY_BYTES, *q", "queries, *q"),
        ("query_operand + queries.stage * (QUERY_BYTES >> 4)", "query_operand"),
        ("        turns.look_ahead();\n        copies", "        copies"),
        ("      turns.look_ahead();  //", "  //"),
        ("(tile + 1) * KEYS > first + shape.reach; tile--)", "tile * KEYS > first + shape.reach; tile--)"),
    ],
)
def test_the_emulator_sees_what_the_kernel_may_lack(emulated, tmp_path, monkeypatch, stands, instead):
    text = hopper_cuda.SOURCE.read_text()
    assert stands in text
    (tmp_path / "forward.cu").write_text(text.replace(stands, instead))
    monkeypatch.setattr(hopper_cuda, "SOURCE", tmp_path / "forward.cu")
    with pytest.raises(AssertionError):
        for slots in (1, 2):
            check(
                emulated,
                "B1,H2,L300,S333,D64,bf16,causal=bottom_right",
                Configuration(2, 64, 2, schedule="table", query_slots=slots),
            )


# --- its machine code -------------------------------------------------------------------------------------------------


def compiled(workload: Workload, configuration: Configuration) -> cuda.Cubin:
    try:
        cuda.compiler_version()
    except Exception as error:
        pytest.skip(f"needs NVRTC: {error}")
    return cuda.compile_source(hopper_cuda.SOURCE, "sm_90a", configuration.defines(workload))


def check_machine_code(workload: Workload, configuration: Configuration) -> None:
    """No spills, and products stay asynchronous (remarks C7510 to C7520 say where they do not)."""
    cubin = compiled(workload, configuration)
    (kernel,) = cubin.resources
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.stack_bytes) == (0, 0, 0), f"{kernel}"
    assert not cubin.remarks, f"{workload}, {configuration}: {cubin.remarks}"


def test_the_usual_kernel_neither_spills_nor_serialises():
    workload = Workload.parse("H1,L1,D128,bf16")
    check_machine_code(workload, usual(workload))


@pytest.mark.long
@pytest.mark.parametrize("mask", ["", ",causal", ",window=64", ",causal,window=64"])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 192, 256])
def test_no_usual_kernel_spills_or_serialises(head_dim, mask):
    for dtype in ("bf16", "fp16"):
        workload = Workload.parse(f"H1,L1,D{head_dim},{dtype}{mask}")
        check_machine_code(workload, usual(workload))


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_no_candidate_spills_or_serialises(head_dim):
    for mask in ("", ",causal"):
        workload = Workload.parse(f"H1,L1,D{head_dim},bf16{mask}")
        for configuration in configurations.candidates(workload, HOPPER):
            check_machine_code(workload, configuration)


# --- what needs no kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", sorted({limit for limit, *_ in CHOICES}))
def test_candidates_fit_and_the_usual_comes_first(limit):
    for mask, length in itertools.product(("", ",causal", ",window=9"), (512, 2048)):
        workload = Workload.parse(f"H4,L{length},D{limit},bf16{mask}")
        found = configurations.candidates(workload, HOPPER)
        assert found[0] == usual(workload) and 3 <= len(set(found)) == len(found) <= 7
        assert len(found) == len(configurations.choices(workload)), "an entry of CHOICES does not fit"
        assert all(one.schedule in configurations.SCHEDULES for one in found)
        assert all(one.shared_bytes(limit) <= 227 * 1024 for one in found)


def test_every_class_has_a_shipped_configuration_that_is_a_candidate(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNSCOPE_CACHE_DIR", str(tmp_path))
    kind, found = hopper_cuda.HopperCuda(), {}
    for workload in kind.tuning_workloads():
        found[kind.tuning_class(workload)] = kind.tables.choose(kind.tuning_class(workload), HOPPER)
        assert found[kind.tuning_class(workload)] in [None, *kind.candidates(workload, HOPPER)]
    assert len(found) == len(kind.tuning_workloads()) and sum(one is not None for one in found.values()) >= 72


def test_the_users_table_goes_before_what_ships(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNSCOPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hopper_cuda, "PreparedHopperCuda", lambda workload, device, configuration: configuration)
    kind, workload = hopper_cuda.HopperCuda(), Workload.parse("B9,H9,L512,D64,bf16")
    assert kind.prepare(workload, HOPPER) == kind.tables.shipped(kind.tuning_class(workload), HOPPER)
    own = Configuration(2, 64, 3, slack=4)
    path = kind.tables.user_path(HOPPER)
    path.parent.mkdir(parents=True)
    path.write_text(table_text(Table("hopper_cuda", HOPPER.name, {kind.tuning_class(workload): own})))
    assert kind.prepare(workload, HOPPER) == own
    assert kind.prepare(workload.replace(dtype="fp16"), HOPPER) != own


def test_a_configuration_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="must fit registers and shared memory at D = 256"):
        hopper_cuda.HopperCuda().prepare_as(Workload.parse("H1,L64,D256,bf16"), HOPPER, Configuration(2, 176, 2))


def test_workloads_that_share_a_class_share_a_kernel():
    a, b = (
        Workload.parse(text) for text in ("B2,H4,L512,D120,bf16,causal", "B1,H8/2,L900,D128,bf16,causal=bottom_right")
    )
    kind = hopper_cuda.HopperCuda()
    assert kind.tuning_class(a) == kind.tuning_class(b) == "d128 causal bf16 short"
    assert kind.tuning_class(b.replace(L=8192)) == "d128 causal bf16 long" != kind.tuning_class(b.replace(causal=None))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("H2,L64,D64,fp32", "takes bf16 or fp16, not fp32"),
        ("H2,L64,D60,bf16", "needs D to be a multiple of 8, not 60"),
        ("H2,L64,D264,bf16", "takes D up to 256, not 264"),
        ("H2,L64,D64,bf16,scale=-1", "needs a scale of at least"),
        ("H2,L64,D64,bf16,scale=0", "needs a scale of at least"),
        ("H2,L64,D64,bf16,softcap=20", "does not support a softcap"),
        ("H2,L64,D64,Dv32,bf16", "does not support a value head dim that differs"),
        ("H2,L2000000000,D64,bf16", "takes L + S up to"),
        ("B600000,H32,L64,D64,bf16", None),
        ("B60000000,H32,L64,D64,bf16", "tiles of rows over batch and heads"),
    ],
)
def test_what_it_does_not_take_is_refused_with_a_reason(text, reason, monkeypatch):
    from attnscope import implementation

    monkeypatch.setattr(implementation, "missing_package", lambda requirement: None)
    found = hopper_cuda.HopperCuda().reasons_unsupported(Workload.parse(text), HOPPER)
    assert found == [] if reason is None else any(reason in one for one in found)


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_it_is_for_hopper_alone(capability):
    other = dataclasses.replace(HOPPER, capability=capability)
    assert hopper_cuda.HopperCuda.sheet.device_reasons(other)


def test_tensors_that_the_copy_engine_cannot_read_are_copied():
    base = torch.arange(2 * 3 * 16 * 32, dtype=torch.float32).to(torch.bfloat16)
    plain = base.view(2, 3, 16, 32)
    for good in (plain, plain.transpose(1, 2), base.view(2, 3, 8, 64)[..., :32], plain[:1, :1].expand(1, 1, 16, 32)):
        assert launching.copyable(good) is good
    crooked = torch.zeros(base.numel() + 1, dtype=torch.bfloat16)[1:].view(2, 3, 16, 32)
    for bad in (
        crooked,
        plain[:1].expand(2, 3, 16, 32),
        plain.transpose(2, 3),
        base[: 2 * 3 * 5 * 20].view(2, 3, 5, 20)[..., :16],
    ):
        made = launching.copyable(bad)
        assert made is not bad and torch.equal(made, bad) and made.data_ptr() % 16 == 0
        assert launching.copyable(made) is made


def test_maps_name_the_innermost_axis_first():
    t = torch.zeros(2, 5, 3, 64, dtype=torch.float16).transpose(1, 2)
    assert launching.map_sizes(t) == ((64, 5, 3, 2), (3 * 64 * 2, 64 * 2, 5 * 3 * 64 * 2))
    assert launching.TensorMap().address % 64 == 0


def test_empty_problems_launch_nothing():
    for text in ("B0,H2,L5,D64,bf16", "B1,H2,L0,S5,D64,bf16", "B1,H2,L5,S0,D64,bf16"):
        workload = Workload.parse(text)
        output = hopper_cuda.HopperCuda().prepare(workload, HOPPER).forward(make_inputs(workload, find_device("cpu")))
        assert output.out.shape == (workload.B, 2, workload.L, 64) and not output.out.any()
        assert torch.isneginf(output.lse).all()


@pytest.fixture
def counted(monkeypatch):
    """A prepared workload whose launches are counted, not made."""
    seen = {"packed": 0, "ran": 0}

    def bind(*_):
        seen["packed"] += 1
        return lambda: seen.__setitem__("ran", seen["ran"] + 1)

    class Kernel:
        def allow_shared_bytes(self, *_):
            pass

    monkeypatch.setattr(cuda, "load_kernel", lambda *_, **__: Kernel())
    monkeypatch.setattr(launching, "encode", lambda *_: None)
    monkeypatch.setattr(launching, "bind", bind)
    return seen


def test_launches_are_packed_once_and_few_are_kept(counted):
    workload = Workload.parse("B1,H2,L32,D64,bf16")
    prepared = hopper_cuda.HopperCuda().prepare(workload, HOPPER)
    inputs = make_inputs(workload, find_device("cpu"))
    out, lse = torch.empty_like(inputs.q), torch.empty(1, 2, 32)
    for _ in range(3):
        prepared.launch(inputs.q, inputs.k, inputs.v, out, lse)
    assert counted == {"packed": 1, "ran": 3}
    others = [torch.empty_like(out) for _ in range(3 * hopper_cuda.KEPT_LAUNCHES)]
    for other in others:
        prepared.launch(inputs.q, inputs.k, inputs.v, other, lse)
    assert len(prepared.launches) <= hopper_cuda.KEPT_LAUNCHES
    prepared.launch(inputs.q.transpose(1, 2).contiguous().transpose(1, 2), inputs.k, inputs.v, out, lse)
    assert counted["packed"] == 2 + len(others)


def test_threads_may_share_a_prepared_workload(counted):
    workload = Workload.parse("B1,H2,L32,D64,bf16")
    prepared = hopper_cuda.HopperCuda().prepare(workload, HOPPER)
    inputs = make_inputs(workload, find_device("cpu"))
    failed = []

    def work():
        try:
            for _ in range(50):
                prepared.forward(inputs)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and counted["packed"] >= 1


def test_longest_rows_come_first_within_what_the_cache_holds():
    full, causal = (Workload.parse(f"B4,H32,L8192,D128,bf16{mask}") for mask in ("", ",causal"))
    assert scheduling.section_heads(full, HOPPER) == 1
    heads = scheduling.section_heads(causal, HOPPER)
    assert 1 < heads and heads & (heads - 1) == 0
    assert heads * 2 * 8192 * 128 * 2 <= scheduling.L2_SHARE * HOPPER.l2_bytes < 2 * heads * 2 * 8192 * 128 * 2
    assert scheduling.section_heads(causal.replace(B=1, H=2, L=64), HOPPER) == 2


@pytest.mark.parametrize("blocks", [1, 3, 132])
@pytest.mark.parametrize(("heads", "section"), [(1, 1), (7, 2), (32, 8), (40, 64)])
@pytest.mark.parametrize("lengths", [[1], [0, 0, 1, 2], list(range(1, 65)), [5, 9, 9, 9, 2]])
def test_the_table_names_each_tile_once_and_balances(lengths, heads, section, blocks):
    table = scheduling.balanced_order(lengths, heads, section, blocks)
    assert len(table) % blocks == 0 and set(table[-blocks:]) == {NO_TILE}
    columns = [table[block::blocks] for block in range(blocks)]
    walked = [list(itertools.takewhile(lambda tile: tile >= 0, column)) for column in columns]
    assert sorted(itertools.chain.from_iterable(walked)) == list(range(heads * len(lengths)))
    costs = [
        [scheduling.COSTS_A_KEY_TILE * lengths[t % len(lengths)] + scheduling.COSTS_A_TILE for t in column]
        for column in walked
    ]
    loads = [sum(column) for column in costs]
    assert max(loads) - min(loads) <= max(itertools.chain.from_iterable(costs))
    for column, tiles in zip(costs, walked, strict=True):  # the longest of a section first
        keys = [(tile // len(lengths) // section, -cost) for tile, cost in zip(tiles, column, strict=True)]
        assert keys == sorted(keys)


def test_long_causal_tiles_are_dealt_almost_evenly():
    workload, configuration = (
        Workload.parse("B2,H16,L8192,D128,bf16,causal"),
        Configuration(2, 128, 3, schedule="table"),
    )
    lengths = scheduling.key_tiles(workload, configuration)
    assert lengths == list(range(1, 65)) and configuration.by_table(workload)
    table = scheduling.balanced_order(lengths, 32, scheduling.section_heads(workload, HOPPER), 132)
    loads = [sum(2 * lengths[t % 64] + 3 for t in table[block::132] if t >= 0) for block in range(132)]
    assert max(loads) <= 1.02 * sum(loads) / len(loads)
    assert not configuration.by_table(workload.replace(causal=None))
    assert not configuration.by_table(workload.replace(B=2**16))
    assert not dataclasses.replace(configuration, persistent=False).by_table(workload)
