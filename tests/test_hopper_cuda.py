"""hopper_cuda without a GPU: its kernel on the CPU emulator, its machine code, its configurations and refusals."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attnscope import cuda
from attnscope.device import Device, find_device
from attnscope.errors import UsageError
from attnscope.implementations import hopper_cuda
from attnscope.implementations.common import NO_TILE
from attnscope.implementations.hopper_cuda import configurations, scheduling
from attnscope.implementations.hopper_cuda.configurations import CHOICES, Configuration, usual
from attnscope.tables import Table, table_text
from attnscope.workload import Workload

torch = pytest.importorskip("torch")

import driver_stand_in  # noqa: E402
from attnscope.inputs import Inputs, make_inputs  # noqa: E402
from attnscope.reference import compute_attention  # noqa: E402

HOPPER = Device("cuda", "H100", capability=(9, 0), multiprocessors=132, l2_bytes=50 * 2**20)
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3}  # of an element's error over its condition scale
TINY = {"bf16": 1e-12, "fp16": 1e-4}  # fp16 has few bits left for weights below 6e-5
LSE_TOLERANCE = 1e-5
SMALL = Configuration(2, 64, 2, slack=8, schedule="table", query_slots=2)  # quick to compile for a CPU
PAIR = dataclasses.replace(SMALL, cluster=2)


@pytest.fixture
def emulated(monkeypatch):
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    import cuda_emulator

    monkeypatch.setattr(cuda, "load_kernel", cuda_emulator.load_kernel)
    cuda_emulator.attach(driver_stand_in.stand_in(monkeypatch))
    monkeypatch.setitem(cuda_emulator.ORDER, "value", 0)
    return cuda_emulator


def check(
    emulator, text: str, configuration: Configuration | None = None, blocks: int = 2, kind: str = "needles",
    change: Callable[[Inputs], None] = lambda inputs: None,
):  # fmt: skip
    """All orders of threads and copies agree bit for bit, and are right."""
    workload = Workload.parse(text)
    device = dataclasses.replace(emulator.DEVICE, multiprocessors=blocks)
    inputs = make_inputs(workload, find_device("cpu"), 1, kind)
    change(inputs)
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
        "B1,H2/1,L130,S150,D72,Dv40,bf16,causal=bottom_right",
    ):
        check(emulated, text, SMALL)


MASKS = ("", ",causal", ",causal=bottom_right", ",window=40", ",causal,window=40")


def test_two_blocks_that_share_keys_are_right_on_the_emulator(emulated):
    for text in (
        "B1,H2,L300,S210,D64,bf16,causal=bottom_right,layout=blhd",  # an odd number of tiles of rows; two turns
        "B2,H4/2,L130,S66,D64,bf16,causal=bottom_right",  # two heads of a group; the first rows see nothing
    ):
        check(emulated, text, PAIR)


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
    ("B1,H2,L100,S170,D128,bf16,causal=bottom_right", Configuration(1, 128, 2)),
    ("B2,H2/1,L150,S100,D64,fp16", Configuration(1, 64, 3, slack=8, query_slots=2)),
    ("B1,H3,L600,D64,bf16,causal", PAIR),
    ("B1,H2,L128,S200,D64,bf16", Configuration(2, 64, 2, cluster=2)),
    ("B1,H2,L450,D64,bf16,causal", Configuration(3, 48, 3, cluster=2)),
    ("B1,H1,L300,S400,D128,bf16", Configuration(2, 176, 2, False, slack=8, cluster=2)),
    ("B1,H1,L200,S170,D256,fp16", Configuration(2, 80, 2, slack=8, cluster=2)),
    ("B2,H2,L300,D64,fp16,window=70", dataclasses.replace(PAIR, keys=32, stages=3)),
    ("B1,H2,L600,D64,bf16,causal,window=70", dataclasses.replace(PAIR, keys=32, stages=3)),
    ("B1,H2,L550,D64,bf16,causal", Configuration(2, 64, 3, persistent=False, cluster=2)),
    ("B2,H8/2,L300,D64,bf16,causal,window=70", PAIR),
    ("B3,H4/2,L150,S210,D64,bf16", PAIR),
    ("B1,H6/2,L300,D64,bf16,causal", PAIR),
    *((f"B1,H2/1,L150,S270,D192,Dv128,bf16{mask}", None) for mask in MASKS),
    ("B2,H1,L300,D192,Dv128,fp16,causal,layout=blhd", Configuration(2, 96, 2, False, slack=8, query_slots=2)),
    ("B1,H2,L200,S170,D192,Dv128,bf16,causal", Configuration(3, 80, 3, slack=8, schedule="table")),
    *((f"B1,H1,L140,S200,D64,Dv128,bf16{mask}", None) for mask in MASKS),
    *((f"B1,H2,L140,S200,D128,Dv64,fp16{mask},layout=blhd", None) for mask in MASKS),
    *((f"B2,H1,L140,S200,D72,Dv40,bf16{mask}", Configuration(2, 48, 3, query_slots=2)) for mask in MASKS),
    ("B1,H1,L140,S200,D256,Dv64,bf16,causal=bottom_right", None),
    ("B1,H1,L140,S200,D64,Dv256,fp16,window=50", None),
    ("B1,H2,L70,S90,D8,Dv256,bf16,causal", None),
    ("B1,H2,L70,S90,D256,Dv8,bf16", None),
]


@pytest.mark.long
@pytest.mark.parametrize(("text", "configuration"), SHAPES, ids=lambda x: x if isinstance(x, str) else "")
def test_every_variant_is_right_on_the_emulator(emulated, text, configuration):
    workload = Workload.parse(text)
    for one in {configuration} if configuration else {usual(workload), usual(workload.replace(B=1000))}:
        check(emulated, text, one, blocks=2 * one.cluster)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["large", "shifted", "peaky"])
def test_hard_inputs_are_right_on_the_emulator(emulated, kind):
    for slack in (0, 8):
        check(
            emulated, "B1,H1,L130,S300,D64,bf16,causal=bottom_right", dataclasses.replace(SMALL, slack=slack), kind=kind
        )


def change_source(tmp_path, monkeypatch, stands: str, instead: str, which: str = "SOURCE") -> None:
    path = getattr(hopper_cuda, which)
    text = path.read_text()
    assert stands in text
    (tmp_path / path.name).write_text(text.replace(stands, instead))
    monkeypatch.setattr(hopper_cuda, which, tmp_path / path.name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        (
            "wait_for(&barriers->k_full[keys.stage], keys.phase);\n      take_turn();\n      start",
            "take_turn();\n      start",
        ),
        ("    wait_for_products<First ? 0 : 1>();\n", ""),
        ("    wait_for(&barriers->k_empty[key_ring.stage], key_ring.phase ^ 1);\n", ""),
        ("    wait_for(&barriers->q_empty[query_ring.stage], query_ring.phase ^ 1);\n", ""),
        ("    if (work.begin < work.end) wait_for(&barriers->q_full[queries.stage], queries.phase);\n", ""),
        ("    publish_barriers();\n", ""),
        ("    wait_for_products<0>();\n", ""),
        ("{ wait_for(&barriers->v_full[values.stage], values.phase); }", "{}"),
        ("if (last) release(&barriers->q_empty[queries.stage]);", ""),
        ("pass<256>(FIRST_TURN);", ";"),
        ("    if (work.begin < work.end) queries.next();\n", ""),
        ("queries + query_ring.stage * QUERY_BYTES, *q", "queries, *q"),
        ("query_operand + queries.stage * (QUERY_BYTES >> 4)", "query_operand"),
        ("        turns.look_ahead(shape);\n        copies", "        copies"),
        ("    turns.look_ahead(shape);  //", "  //"),
        ("(tile + 1) * KEYS > first + shape.reach)); tile--)", "tile * KEYS > first + shape.reach)); tile--)"),
    ],
)
def test_the_emulator_sees_what_the_kernel_may_lack(emulated, tmp_path, monkeypatch, stands, instead):
    change_source(tmp_path, monkeypatch, stands, instead)
    with pytest.raises(AssertionError):
        for slots in (1, 2):
            check(
                emulated,
                "B1,H2,L300,S333,D64,bf16,causal=bottom_right",
                Configuration(2, 64, 2, schedule="table", query_slots=slots),
            )


@pytest.mark.long
@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        ("if (CLUSTER > 1) meet_cluster();", "if (CLUSTER > 1) __syncthreads();"),
        ("if (CLUSTER > 1) copies.see_all_released();", ""),
        ("      wait_for(&barriers->k_empty[key_ring.stage], key_ring.phase ^ 1);\n", ""),
        ("      wait_for(&barriers->v_empty[value_ring.stage], value_ring.phase ^ 1);\n", ""),
        ("    wait_for(&barriers->v_empty[value_ring.stage], value_ring.phase ^ 1);\n    fill", "    fill"),
        ("k_empty[stage], 4 * GROUPS * CLUSTER);", "k_empty[stage], 4 * GROUPS);"),
        ("else if (threadIdx.x % 32 < CLUSTER) arrive_at", "else if (threadIdx.x % 32 < 1) arrive_at"),
        ("arrive_at(empty, threadIdx.x % 32);", "arrive_at(empty, blockIdx.x % CLUSTER);"),
        ("row + part, head", "row, head"),
        ("(panel * rows + part) * ROW_BYTES", "panel * rows * ROW_BYTES"),
        ("arrive_expecting(full, rows * ROW_BYTES", "arrive_expecting(full, rows / Blocks * ROW_BYTES"),
        ("min(first + CLUSTER_TILES * QUERIES, shape.L)", "min(work.first + QUERIES, shape.L)"),
        ("order[turn * clusters() + cluster()]", "order[turn * clusters() + blockIdx.x % clusters()]"),
    ],
)
def test_the_emulator_sees_what_a_cluster_may_lack(emulated, tmp_path, monkeypatch, stands, instead):
    change_source(tmp_path, monkeypatch, stands, instead)
    with pytest.raises(AssertionError):
        for text in ("B1,H2,L600,S333,D64,bf16,causal=bottom_right", "B1,H1,L600,D64,bf16,causal,window=70"):
            check(emulated, text, PAIR, blocks=4)


@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        ("fill<CLUSTER, VALUE_PANELS>", "fill<CLUSTER, PANELS>"),
        ("values + value_ring.stage * VALUE_BYTES", "values + value_ring.stage * KEY_BYTES"),
        ("value_operand + values.stage * (VALUE_BYTES >> 4)", "value_operand + values.stage * (KEY_BYTES >> 4)"),
        ("keys + key_ring.stage * KEY_BYTES", "keys + key_ring.stage * VALUE_BYTES"),
        ("d < HEAD_DIM / 16", "d < VALUE_DIM / 16"),
    ],
)
def test_the_emulator_sees_head_dims_that_are_taken_for_one_another(emulated, tmp_path, monkeypatch, stands, instead):
    change_source(tmp_path, monkeypatch, stands, instead)
    with pytest.raises(AssertionError):
        check(emulated, "B1,H1,L100,S200,D128,Dv40,bf16", Configuration(2, 64, 2))


# --- its machine code -------------------------------------------------------------------------------------------------


def compiled(workload: Workload, configuration: Configuration) -> cuda.Cubin:
    return compiled_source(hopper_cuda.SOURCE, "sm_90a", configuration.defines(workload))


def compiled_source(source: Path, target: str, defines: dict[str, str | int]) -> cuda.Cubin:
    try:
        cuda.compiler_version()
    except Exception as error:
        pytest.skip(f"needs NVRTC: {error}")
    return cuda.compile_source(source, target, defines)


def check_machine_code(workload: Workload, configuration: Configuration) -> None:
    """No spills, and products stay asynchronous (remarks C7510 to C7520 say where they do not)."""
    cubin = compiled(workload, configuration)
    (kernel,) = cubin.resources
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.stack_bytes) == (0, 0, 0), f"{kernel}"
    assert not cubin.remarks, f"{workload}, {configuration}: {cubin.remarks}"


def check_candidates(workload: Workload, wanted: Callable[[Configuration], bool]) -> None:
    """The same of each candidate that is wanted; there is one."""
    found = [one for one in configurations.candidates(workload, HOPPER) if wanted(one)]
    assert found
    for configuration in found:
        check_machine_code(workload, configuration)


def test_the_usual_kernel_neither_spills_nor_serialises():
    workload = Workload.parse("H1000,L1,D128,bf16")
    check_machine_code(workload, usual(workload))


@pytest.mark.long
@pytest.mark.parametrize("mask", ["", ",causal", ",window=64", ",causal,window=64"])
@pytest.mark.parametrize(
    "head_dim",
    [8, 64, 96, 128, 192, 256, "192,Dv128", "64,Dv128", "128,Dv64", "72,Dv40", "256,Dv64", "64,Dv256", "256,Dv8"],
)
def test_no_usual_kernel_spills_or_serialises(head_dim, mask):
    for dtype, heads in (("bf16", 1000), ("fp16", 1000), ("bf16", 1)):
        workload = Workload.parse(f"H{heads},L1,D{head_dim},{dtype}{mask}")
        check_machine_code(workload, usual(workload))


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, "192,Dv128"])
def test_no_candidate_spills_or_serialises(head_dim):
    for mask, (heads, length) in itertools.product(("", ",causal"), ((1000, 1), (1000, 2048), (1, 2048))):
        workload = Workload.parse(f"H{heads},L{length},D{head_dim},bf16{mask}")
        check_candidates(workload, lambda one: True)


# --- what needs no kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", sorted({key[:-2] for key in CHOICES}))
def test_candidates_fit_and_the_usual_comes_first(limits):
    for mask, (heads, length) in itertools.product(("", ",causal", ",window=9"), ((4, 512), (40, 512), (40, 2048))):
        workload = Workload.parse(f"H{heads},L{length},D{limits[0]},Dv{limits[-1]},bf16{mask}")
        found = configurations.candidates(workload, HOPPER)
        assert found[0] == usual(workload) and 3 <= len(set(found)) == len(found) <= 9
        assert all(one.fits(limits[0], limits[-1]) for one in configurations.choices(workload))
        assert all(one.schedule in configurations.SCHEDULES for one in found)
        assert all(one.shared_bytes(limits[0], limits[-1]) <= 227 * 1024 for one in found)


def test_the_usual_configuration_fits_every_pair_of_head_dims():
    for head_dim, value_dim in itertools.product(range(8, 257, 8), repeat=2):
        workload = Workload(B=1, H=1, L=512, D=head_dim, D_v=value_dim, dtype="bf16", causal="top_left")
        for one in (workload, workload.replace(L=2048, S=2048), workload.replace(causal=None)):
            assert usual(one).fits(head_dim, value_dim), one
            usable = [found for found in configurations.choices(one) if not found.split or found.splits(one, 132)]
            assert configurations.candidates(one, HOPPER) == usable


def test_a_configuration_fits_by_both_head_dims():
    wide = Configuration(2, 128, 2)
    assert wide.fits(192, 128) and not wide.fits(192, 192) and not wide.fits(256, 128)  # by shared memory
    narrow = Configuration(3, 112, 2)
    assert narrow.fits(64, 96) and not narrow.fits(64, 128) and not narrow.fits(64, 256)  # by registers
    assert wide.shared_bytes(192, 128) == 1024 + 128 * 384 + 2 * 128 * (384 + 256) + 10 * 8


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
    with pytest.raises(UsageError, match="must fit registers and shared memory at D = 256, D_v = 256"):
        hopper_cuda.HopperCuda().prepare_as(Workload.parse("H1,L64,D256,bf16"), HOPPER, Configuration(2, 176, 2))


def test_workloads_that_share_a_class_share_a_kernel():
    a, b = (
        Workload.parse(text) for text in ("B8,H4,L512,D120,bf16,causal", "B4,H8/2,L900,D128,bf16,causal=bottom_right")
    )
    kind = hopper_cuda.HopperCuda()
    assert kind.tuning_class(a) == kind.tuning_class(b) == "d128 causal bf16 short"
    assert kind.tuning_class(b.replace(L=8192)) == "d128 causal bf16 long" != kind.tuning_class(b.replace(causal=None))
    latent, small, wide = (Workload.parse(f"H4,L2048,D{dims},bf16") for dims in ("192,Dv128", "64,Dv128", "192,Dv136"))
    assert [kind.tuning_class(one).split()[0] for one in (latent, small, wide)] == ["d192v128", "d128", "d192"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("H2,L64,D64,fp32", "takes bf16 or fp16, not fp32"),
        ("H2,L64,D60,bf16", "needs D to be a multiple of 8, not 60"),
        ("H2,L64,D264,bf16", "takes D up to 256, not 264"),
        ("H2,L64,D64,bf16,scale=-1", "needs a scale of at least"),
        ("H2,L64,D64,bf16,scale=0", "needs a scale of at least"),
        ("H2,L64,D64,bf16,softcap=20", "does not support a softcap"),
        ("H2,L64,D64,Dv32,bf16", None),
        ("H2,L64,D64,Dv264,bf16", "takes D_v up to 256, not 264"),
        ("H2,L64,D64,Dv36,bf16", "needs D_v to be a multiple of 8, not 36"),
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


def test_empty_problems_launch_nothing():
    for text in ("B0,H2,L5,D64,bf16", "B1,H2,L0,S5,D64,bf16", "B1,H2,L5,S0,D64,bf16", "B1,H2,L5,S0,D64,Dv40,bf16"):
        workload = Workload.parse(text)
        output = hopper_cuda.HopperCuda().prepare(workload, HOPPER).forward(make_inputs(workload, find_device("cpu")))
        assert output.out.shape == (workload.B, 2, workload.L, workload.D_v) and not output.out.any()
        assert torch.isneginf(output.lse).all()


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
    assert lengths == list(range(1, 65)) and configuration.by_table(workload, 132)
    table = scheduling.balanced_order(lengths, 32, scheduling.section_heads(workload, HOPPER), 132)
    loads = [sum(2 * lengths[t % 64] + 3 for t in table[block::132] if t >= 0) for block in range(132)]
    assert max(loads) <= 1.02 * sum(loads) / len(loads)


def test_a_table_is_made_where_it_can_help():
    workload = Workload.parse("B2,H16,L8192,D128,bf16,causal")
    configuration = Configuration(2, 128, 3, schedule="table")
    pairs = dataclasses.replace(configuration, cluster=2)
    assert configuration.by_table(workload, 132) and pairs.by_table(workload, 132)
    assert not configuration.by_table(workload.replace(causal=None), 132)
    assert not configuration.by_table(workload.replace(B=2**16), 132)
    assert not dataclasses.replace(configuration, persistent=False).by_table(workload, 132)
    small = workload.replace(B=1, H=33, L=512)  # 132 tiles of 128 rows, 66 of two such
    assert not configuration.by_table(small, 132) and configuration.by_table(small, 131)
    assert not pairs.by_table(small, 132) and pairs.by_table(small, 131)
    assert configuration.clusters(small, 132) == 132 and pairs.clusters(small, 132) == 66 == pairs.clusters(small, 133)


def test_a_cluster_takes_heads_of_a_group_or_rows_of_a_head():
    pairs = Configuration(2, 128, 2, cluster=2)
    grouped, plain, three = (Workload.parse(f"B2,H{heads},L300,D64,bf16,causal") for heads in ("8/2", "8", "6/2"))
    assert pairs.cluster_heads(grouped) == 2 and pairs.tiles(grouped) == 2 * 4 * 3
    assert scheduling.key_tiles(grouped, pairs) == [1, 2, 3]
    assert pairs.cluster_heads(plain) == 1 == pairs.cluster_heads(three) and pairs.tiles(plain) == 2 * 8 * 2
    assert scheduling.key_tiles(plain, pairs) == [2, 3]
    decoding = Workload.parse("B16,H32/8,L1,S8192,D256,bf16")
    assert any(one.cluster > 1 for one in configurations.candidates(decoding, HOPPER))
    assert all(one.cluster == 1 for one in configurations.candidates(decoding.replace(H_kv=32), HOPPER))


def test_few_tiles_are_small():
    few, more = (Workload.parse(f"B1,H33,L{length},D128,bf16,causal") for length in (256, 257))
    assert usual(few).groups == 1 and few.B * few.H * -(-few.L // usual(few).rows) == 132
    assert usual(more).groups == 2
    classes = [hopper_cuda.HopperCuda().tuning_class(workload) for workload in (few, more)]
    assert classes == ["d128 causal bf16 short few", "d128 causal bf16 short"]


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 64, 1000, 2**15 + 1, 2**29 - 3, 2**30])
def test_a_reciprocal_divides_exactly(divisor):
    workload = Workload.parse(f"B1,H{divisor},L1,D64,bf16")
    reciprocals = hopper_cuda.kernel_sizes(workload, Configuration(2, 64, 2), 1)[8:]
    by_heads = reciprocals[0].value
    for n in (0, 1, divisor - 1, divisor, 2 * divisor - 1, 12345678, 2**30 - divisor, 2**30 - 1):
        if 0 <= n < 2**30:
            assert (4 * n * by_heads) >> 64 == n // divisor
