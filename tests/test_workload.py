"""Stage 1: the workload, its spelling and its counts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope.errors import WorkloadError
from attnscope.units import DTYPE_BYTES
from attnscope.workload import MAX_SIZE, Workload
from strategies import workloads


def sees(w: Workload, b: int, i: int, j: int) -> bool:
    """Whether row i of batch b sees key j, written from the workload's definition and nothing else."""
    keys = w.S if w.lengths is None else w.lengths[b]
    position = i + keys - w.L if w.causal == "bottom_right" else i
    if j >= keys or (w.causal and j > position) or (w.window is not None and abs(position - j) >= w.window):
        return False
    if w.packed is None:
        return True
    owner = [n for n, length in enumerate(w.packed) for _ in range(length)]
    return owner[i] == owner[j]


# --- spelling ---------------------------------------------------------------------------------------------------------


@given(workloads(dtypes=tuple(DTYPE_BYTES)))
def test_spelling_round_trips(w):
    assert Workload.parse(str(w)) == w
    assert str(Workload.parse(str(w))) == str(w)
    assert hash(Workload.parse(str(w))) == hash(w)


def test_the_design_s_example_reads_field_by_field():
    w = Workload.parse(
        "B3,H32/8,L1024,S2048,D64,Dv128,bf16,causal=bottom_right,window=512,softcap=30,scale=0.1,alibi,sinks,mask=bool,"
        "bias=bf16:1xHxLxS,lengths=7/5/0,dropout=0.1,layout=blhd"
    )
    assert w == Workload(
        B=3, H=32, H_kv=8, L=1024, S=2048, D=64, D_v=128, dtype="bf16", causal="bottom_right", window=512, softcap=30.0,
        scale=0.1, alibi=True, sinks=True, mask="Bx1xLxS", bias="bf16", bias_shape="1xHxLxS", lengths=(7, 5, 0),
        dropout=0.1, layout="blhd",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("H4,L7,D8", "dtype", "bf16"),
        ("H4,L7,D8", "S", 7),
        ("H4,L7,D8", "H_kv", 4),
        ("H4,L7,D8", "D_v", 8),
        ("H4,L7,D8", "B", 1),
        ("H4,L7,D8,causal", "causal", "top_left"),
        ("H4,L7,D8,bias=fp16", "bias_shape", "1xHxLxS"),
        ("H4,L7,D8,mask=bool:1x1x1xS", "mask", "1x1x1xS"),
        ("H4,D8,packed=300/212/0/512", "L", 1024),
        ("H4,D8,packed=0", "S", 0),
        ("H4,L7,S9,D8,lengths=9/0", "B", 2),
        (" H4 , L7 , D8 ", "H", 4),
        ("D8,L7,H4", "D", 8),
    ],
)
def test_defaults(text, field, value):
    assert getattr(Workload.parse(text), field) == value


def test_lists_and_whole_numbers_mean_what_tuples_and_floats_mean():
    made = Workload(H=4, L=7, D=8, B=2, lengths=[7, 3], scale=1, softcap=30)
    assert made == Workload.parse("B2,H4,L7,D8,lengths=7/3,scale=1.0,softcap=30")
    assert str(made) == str(Workload.parse(str(made)))
    assert made.visible_pairs() == 70


BAD = {
    "": "empty part",
    "H4,,L7,D8": "empty part",
    "H4,L7,D8,": "empty part",
    "H4,L7": "must name D",
    "L7,D8": "must name H",
    "H4,L7,D8,Q3": "unknown workload field 'Q3'",
    "H4,L7,D8,casual": "did you mean causal",
    "H4,L7,D8,bf61": "did you mean bf16",
    "H4,L7,D8,H5": "names H twice",
    "H4,L7,D8,bf16,fp32": "names dtype twice",
    "H4,L7/3,D8": "only H takes a second number",
    "H0,L7,D8": "H must be a whole number from 1",
    "H4,L7,D0": "D must be a whole number from 1",
    "H4,L7,D8,Dv0": "D_v must be a whole number from 1",
    "H4/0,L7,D8": "H_kv must be a whole number from 1",
    "H12/8,L7,D8": "H must be a multiple of H_kv = 8, got 12",
    "H4,L4294967296,D8": "L must be a whole number from 0 to 2**31 - 1",
    "H4,L" + "9" * 4000 + ",D8": "L must be a whole number",
    "H4,L7,D8,causal=lower_right": "unknown causal 'lower_right'",
    "H4,L7,D8,causal=": "causal needs a value",
    "H4,L7,D8,alibi=3": "alibi takes no value",
    "H4,L7,D8,window": "window needs a value",
    "H4,L7,D8,window=0": "window must be a whole number of keys, at least 1, got 0",
    "H4,L7,D8,window=2.5": "does not read as a value of window",
    "H4,L7,D8,softcap=-1": "softcap must be above 0",
    "H4,L7,D8,softcap=nan": "softcap must be a finite number",
    "H4,L7,D8,scale=inf": "scale must be a finite number",
    "H4,L7,D8,scale=big": "does not read as a value of scale",
    "H4,L7,D8,dropout=1": "dropout must lie in [0, 1)",
    "H4,L7,D8,dropout=nan": "dropout must be a finite number",
    "H4,L7,D8,mask=float": "mask must be bool",
    "H4,L7,D8,mask=bool:LxS": "mask must broadcast to (B, H, L, S)",
    "H4,L7,D8,mask=bool:2x1xLxS": "mask must broadcast to (B, H, L, S)",
    "H4,L7,D8,mask=bool:1x1xSxL": "mask must broadcast to (B, H, L, S)",
    "H4,L7,D8,bias=int8": "unknown bias dtype 'int8'",
    "H4,L7,D8,bias=bf16:HxLxS": "bias must broadcast to (B, H, L, S)",
    "B2,H4,L7,D8,lengths=7": "lengths must name one key length per batch entry, B = 2, got 1",
    "H4,L7,D8,lengths=8": "lengths must lie in 0..S = 7, got 8",
    "H4,L7,D8,lengths=-1": "lengths must lie in 0..S = 7, got -1",
    "H4,L7,D8,lengths=": "lengths needs a value",
    "H4,D8,packed=3/x": "does not read as a value of packed",
    "H4,D8,packed=3/-1": "packed lengths must be 0 or more",
    "H4,L9,D8,packed=3/4": "B must be 1 and L = S = 7",
    "B2,H4,D8,packed=3/4": "B must be 1",
    "H4,L7,D8,packed=3/4,lengths=7": "exclude each other",
    "H4,L7,D8,layout=hbld": "unknown layout 'hbld'",
    "H4/2,L7,D8,layout=qkv": "needs H = H_kv",
    "H4,L7,S8,D8,layout=qkv": "needs H = H_kv, L = S",
    "H4,L7,D8,Dv4,layout=qkv": "D = D_v",
}


@pytest.mark.parametrize(("text", "sentence"), BAD.items(), ids=[text[:40] for text in BAD])
def test_a_bad_spelling_is_a_sentence_with_a_hint(text, sentence):
    with pytest.raises(WorkloadError) as caught:
        Workload.parse(text)
    message = str(caught.value)
    assert sentence in message
    assert message.count("\nhint: ") == 1
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"H": 4.0}, {"H": True}, {"L": "7"}, {"S": -2}, {"S": MAX_SIZE + 1}, {"L": 2**20000}, {"window": True},
        {"window": 2.0}, {"scale": "0.1"}, {"scale": True}, {"dropout": None}, {"alibi": 1}, {"sinks": "yes"},
        {"lengths": ()}, {"lengths": 7}, {"lengths": (7.0,)}, {"packed": ()}, {"packed": "3/4"}, {"mask": 3},
        {"mask": ""}, {"bias_shape": "1xHxLxS"}, {"dtype": 16}, {"layout": None}, {"causal": True}, {"bias": ""},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_a_bad_field_in_python_is_a_sentence_with_a_hint(fields):
    with pytest.raises(WorkloadError, match=r"\nhint: "):
        Workload(**{"H": 4, "L": 7, "D": 8} | fields)


@given(st.text(alphabet="BHLSDv0123456789/,=.causlwindoprtbkmh:x -", max_size=40))
def test_no_spelling_ends_in_another_error(text):
    try:
        w = Workload.parse(text)
    except WorkloadError:
        return
    assert Workload.parse(str(w)) == w


def test_needs_no_torch():
    code = "import sys, attnscope.workload, attnscope.suites; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# --- names and changes ------------------------------------------------------------------------------------------------


@given(workloads(), workloads())
def test_slug_is_a_safe_file_name_and_tells_workloads_apart(one, other):
    for w in (one, other):
        assert set(w.slug) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,_-")
        assert 0 < len(w.slug) <= 180 and not w.slug.startswith((".", "-"))
    assert (one.slug == other.slug) == (one == other)


def test_long_slugs_differ_too():
    one = Workload.parse("H4,D8,packed=" + "/".join(["100"] * 100))
    other = Workload.parse("H4,D8,packed=" + "/".join(["100"] * 99 + ["101"]))
    assert len(one.slug) == len(other.slug) == 180
    assert one.slug != other.slug


def test_replace_lets_equal_sizes_follow():
    w = Workload.parse("B2,H4,L7,D8,bias=fp32:1x1xLxS")
    assert w.replace(L=9, H=2, D=16) == Workload.parse("B2,H2,L9,D16,bias=fp32:1x1xLxS")
    assert w.replace(S=3).replace(L=9).S == 3
    assert w.replace(bias=None) == Workload.parse("B2,H4,L7,D8")
    with pytest.raises(WorkloadError):
        w.replace(H_kv=3)


def test_features_name_what_a_sheet_must_claim():
    assert Workload.parse("H4,L7,D8").features == frozenset()
    everything = Workload.parse(
        "B1,H4/2,L5,S7,D8,Dv4,causal=bottom_right,window=2,softcap=3,scale=1,alibi,sinks,mask=bool,bias=fp32,lengths=3,"
        "dropout=0.1"
    )
    assert everything.features == {
        "gqa", "cross", "unequal_head_dims", "causal_bottom_right", "window", "softcap", "scale", "alibi", "sinks",
        "mask", "bias", "lengths", "dropout",
    }  # fmt: skip
    assert Workload.parse("H4,D8,packed=3/4,causal").features == {"packed", "causal_top_left"}


# --- geometry ---------------------------------------------------------------------------------------------------------


@given(workloads())
def test_row_interval_is_the_definition(w):
    for b in range(w.B):
        for i in range(w.L):
            low, high = w.row_interval(b, i)
            assert [j for j in range(w.S) if low <= j < high] == [j for j in range(w.S) if sees(w, b, i, j)]
            assert low <= high


@given(workloads(max_length=12))
def test_visible_pairs_is_a_double_loop(w):
    expected = sum(sees(w, b, i, j) for b in range(w.B) for i in range(w.L) for j in range(w.S))
    assert w.visible_pairs() == expected


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("H1,L1,S16,D8,causal", [[0]]),
        ("H1,L1,S16,D8,causal=bottom_right", [list(range(16))]),
        ("H1,L2,S5,D8,causal=bottom_right", [[0, 1, 2, 3], [0, 1, 2, 3, 4]]),
        ("H1,L5,S2,D8,causal", [[0], [0, 1], [0, 1], [0, 1], [0, 1]]),
        ("H1,L5,S2,D8,causal=bottom_right", [[], [], [], [0], [0, 1]]),
        ("H1,L4,D8,causal,window=2", [[0], [0, 1], [1, 2], [2, 3]]),
        ("H1,L4,D8,window=2", [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]),
        ("H1,L4,D8,window=1", [[0], [1], [2], [3]]),
        ("H1,L3,S5,D8,lengths=2", [[0, 1], [0, 1], [0, 1]]),
        ("H1,L3,S5,D8,lengths=4,causal=bottom_right", [[0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        ("H1,D8,packed=2/0/3,causal", [[0], [0, 1], [2], [2, 3], [2, 3, 4]]),
        ("H1,D8,packed=2/1", [[0, 1], [0, 1], [2]]),
    ],
)
def test_alignments_by_hand(text, rows):
    w = Workload.parse(text)
    assert [list(range(*w.row_interval(0, i))) for i in range(w.L)] == rows
    assert w.visible_pairs() == sum(map(len, rows))


def test_counting_takes_no_time_however_long():
    L = MAX_SIZE
    assert Workload.parse(f"H1,L{L},D64,causal").visible_pairs() == L * (L + 1) // 2
    assert Workload.parse(f"H1,L{L},D64,causal,window=512").visible_pairs() == 512 * 513 // 2 + (L - 512) * 512
    assert Workload.parse(f"B7,H1,L{L},D64").visible_pairs() == 7 * L * L


# --- counts -----------------------------------------------------------------------------------------------------------


def test_the_blog_s_counts():
    w = Workload.parse("B8,H16,L1024,D64,bf16,causal")
    assert w.visible_pairs() == 8 * 1024 * 1025 // 2
    assert w.flops("forward") / 1e9 == pytest.approx(17.196646, abs=1e-6)
    assert w.flops("backward") == 2.5 * w.flops("forward")
    assert w.exponentials("forward") == w.exponentials("backward") == 16 * w.visible_pairs()
    tensor = 8 * 16 * 1024 * 64 * 2
    assert w.min_bytes("forward") == 4 * tensor
    assert w.min_bytes("backward") == 8 * tensor + 4 * 8 * 16 * 1024
    assert w.score_bytes() == 8 * 16 * 1024 * 1024 * 2


def test_counts_by_hand():
    w = Workload.parse("B2,H4/2,L3,S5,D8,Dv6,fp32,mask=bool:Bx1xLxS,bias=bf16:1xHx1xS,dropout=0.5,lengths=5/2")
    pairs = 3 * 5 + 3 * 2
    assert w.flops("forward") == 2 * pairs * 4 * (8 + 6)
    assert w.flops("backward") == 2 * pairs * 4 * (3 * 8 + 2 * 6)
    assert w.flops("forward", pairs=10) == 2 * 10 * 4 * 14
    assert w.exponentials("forward", pairs=10) == 40
    q, out = 2 * 4 * 3 * 8 * 4, 2 * 4 * 3 * 6 * 4
    k, v = (5 + 2) * 2 * 8 * 4, (5 + 2) * 2 * 6 * 4
    mask, bias, keep = 2 * 3 * 5, 4 * 5 * 2, 2 * 4 * 3 * 5
    assert w.min_bytes("forward") == q + k + v + out + mask + bias + keep
    assert w.min_bytes("backward") == 2 * (q + k + v + bias) + 2 * out + 4 * 2 * 4 * 3 + mask + keep


def test_flops_ignore_hidden_pairs():
    full, causal = Workload.parse("H4,L64,D32"), Workload.parse("H4,L64,D32,causal")
    assert causal.flops("forward") / full.flops("forward") == pytest.approx(65 / 128)
    assert Workload.parse("H4,L64,D32,lengths=0").flops("forward") == 0


@pytest.mark.parametrize("text", ["B0,H4,L7,D8", "H4,L0,S7,D8", "H4,L7,S0,D8", "H4,D8,packed=0/0"])
def test_empty_workloads_count_nothing(text):
    w = Workload.parse(text)
    assert w.visible_pairs() == w.flops("backward") == w.exponentials("forward") == 0
