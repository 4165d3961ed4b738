"""Sharing traces: what is refused before anything is sent, and what arrives at a stand-in for the hub."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope import share
from attnscope.errors import AttnscopeError, TraceError, UsageError
from attnscope.scrubbing import look_for_private
from hub_stand_in import Hub

needs_hub = pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="needs huggingface_hub")
CLEAN = {"traceEvents": [{"name": "aten::mm", "ph": "X", "ts": 1, "dur": 2}]}
HOME = CLEAN | {"traceName": "/home/jane/run/trace.json"}
DUMP = CLEAN | {"environ": {"HOME": "/srv", "LD_LIBRARY_PATH": "/opt/lib", "API_TOKEN": "hunter2"}}


@pytest.fixture
def folder(tmp_path):
    """A folder of traces, with a file beside them that is none."""
    place = tmp_path / "traces"
    (place / "deep er").mkdir(parents=True)
    (place / "a.json").write_text(json.dumps(CLEAN))
    (place / "deep er" / "b.json.gz").write_bytes(gzip.compress(json.dumps(CLEAN).encode()))
    (place / "notes.txt").write_text("not a trace")
    (place / "login.json").write_text('{"password": "hunter2", "ph": 1}')  # nor is this, for all its name
    return place


def attnscope_share(hub, home, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "attnscope", "share", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_TOKEN": "hf_test"},
    )


@pytest.mark.parametrize("body", [HOME, DUMP])
@pytest.mark.parametrize("name", ["c.json", "c.json.gz"])
def test_a_trace_that_gives_something_away_is_not_sent(folder, monkeypatch, body, name):
    data = json.dumps(body).encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    monkeypatch.setattr(share, "_uploader", lambda: pytest.fail("it went on to send"))
    with pytest.raises(UsageError, match=f"nothing was sent.*\n{name} holds .*\nhint: --scrub"):
        share.share_traces(folder, "me/traces")


@pytest.mark.parametrize(
    ("text", "environment", "homes"),
    [
        ('{"env": {"HOME": "/srv", "USER": "x"}}', True, set()),
        ('{"args": "LD_LIBRARY_PATH=/usr/lib"}', True, set()),
        ('{"args": {"PATH": 1}}', False, set()),  # one word that happens to be a variable's
        ('{"f": "/home/jane/x.py(3): f"}', False, {"/home/jane"}),
        (r'{"f": "C:\\Users\\jane\\x.py"}', False, {r"C:\\Users\\jane"}),
        ('{"f": "/usr/lib/python3/x.py"}', False, set()),
    ],
)
def test_what_a_trace_gives_away(tmp_path, text, environment, homes):
    path = tmp_path / "t.json"
    path.write_text(" " * ((1 << 20) - 12) + text)  # across two blocks
    found = look_for_private(path)
    assert (found.environment, found.homes) == (environment, homes)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (json.dumps(CLEAN), True),
        (' [{"ph": "X"}]', True),
        (" " * ((1 << 20) - 6) + '{"traceEvents": []}', True),
        ("[1, 2]", False),
        ('{"ph": "X"}', False),
    ],
)
def test_only_what_is_a_trace_is_shared(tmp_path, text, found):
    (tmp_path / "t.json").write_text(text)
    (tmp_path / "u.json").write_text(json.dumps(CLEAN))
    traces, left_out = share.find_traces(tmp_path)
    assert (set(traces), left_out) == (({"t.json", "u.json"}, ()) if found else ({"u.json"}, ("t.json",)))


def test_real_traces_of_others_are_scrubbed(shared, tmp_path):
    """The one with a user's home in it, by its bytes before and after; and a small one without any."""
    for name, has_home in (("mi300-sdpa-long.json.gz", True), ("h100-mha-fastpath.json.gz", False)):
        path = shared / "traces" / name
        assert bool(look_for_private(path).homes) == has_home
        share.scrubbed(path, tmp_path / name)
        assert not list(look_for_private(tmp_path / name).sentences())
        before, after = (json.loads(gzip.decompress(p.read_bytes()))["traceEvents"] for p in (path, tmp_path / name))
        kept = [[event.get(key) for key in ("ph", "ts", "dur", "pid", "tid")] for event in after]
        assert kept == [[event.get(key) for key in ("ph", "ts", "dur", "pid", "tid")] for event in before]
        assert [e["name"] for e in after if e.get("cat") == "kernel"] == [
            e["name"] for e in before if e.get("cat") == "kernel"
        ]


@pytest.mark.parametrize("body", [HOME, DUMP])
def test_a_scrubbed_copy_gives_nothing_away_and_keeps_its_events(tmp_path, body):
    path, target = tmp_path / "t.json.gz", tmp_path / "copy.json.gz"
    path.write_bytes(gzip.compress(json.dumps(body).encode()))
    share.scrubbed(path, target)
    assert json.loads(gzip.decompress(target.read_bytes())) == CLEAN


LEAKS = [
    "/home/jane",
    "/home/jane doe/my runs/x y.py(3): f",
    r"C:\Users\Jane Doe\x.py(3): f",
    "/Users/jane/Library/Application Support/x.py(1): g",
    "file:///mnt/nfs/home/jane/x.py",
    "~/secret/x.py",
    "PATH=/home/jane/bin:/usr/bin",
    r"\\fileserver7\jane\x.py",
    "jane@gpubox17:/data/x.py",
    "mail jane@gpubox17.example.org",
    "run --token hf_abcdefghijklmnopqrstuvwx",
    "https://jane:hunter2@example.org/x.git",
    "/root",
    "/data/team/jane/x.py",
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("text", LEAKS)
def test_no_user_host_or_secret_is_left_of_a_string_wherever_it_stands(tmp_path, text, as_list, packed):
    events = [
        {"name": text, "ph": "X", "ts": 1, "args": {"file": text, text: 1, "nested": [{"deep": text}]}},
        {
            "name": "aten::mm",
            "ph": "X",
            "ts": 2,
            "args": {"hostname": "gpubox17", "owner": "jane", "in": "/home/jane/x"},
        },
    ]
    body = json.dumps(
        events if as_list else {"traceEvents": events, "hostname": "gpubox17", "traceName": text}
    ).encode()
    path, target = (tmp_path / name for name in (("a.json.gz", "b.json.gz") if packed else ("a.json", "b.json")))
    path.write_bytes(gzip.compress(body) if packed else body)
    share.scrubbed(path, target)
    left = gzip.decompress(target.read_bytes()).decode() if packed else target.read_text()
    for word in ("jane", "Jane", "doe", "Doe", "gpubox17", "fileserver7", "hunter2", "hf_", "/root", "secret/", "home"):
        assert word not in left, (word, left)
    kept = json.loads(left)["traceEvents"]
    assert [event["ts"] for event in kept] == [1, 2] and kept[1]["name"] == "aten::mm"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"hostname": "gpubox17", "traceEvents": []}', "names the machine"),
        (b'{"traceEvents": [{"args": {"x": "jane@gpubox17:/data"}}]}', "names the machine"),
        (b'{"traceEvents": [{"args": {"x": "\\/home\\/jane\\/x"}}]}', "paths of a user"),
        (b'{"traceEvents": [{"args": {"x": "hf_abcdefghijklmnopqrstuvwx"}}]}', "an access token"),
        (b'{"traceEvents": [{"args": {"x": "https://me:pw@example.org"}}]}', "an access token or a password"),
    ],
)
def test_more_that_a_trace_gives_away(tmp_path, body, sentence):
    path = tmp_path / "t.json"
    path.write_bytes(body)
    assert any(sentence in said for said in look_for_private(path).sentences())


def test_the_name_of_this_machine_gives_it_away(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "gpubox17")
    path = tmp_path / "t.json"
    for text, told in (("on gpubox17 now", True), ("gpubox171", False), ("agpubox17", False)):
        path.write_text(json.dumps({"traceEvents": [{"name": text}]}))
        assert look_for_private(path).host is told, text


def test_a_file_that_torchs_handler_named_after_the_machine_is_renamed_by_scrub(folder, monkeypatch):
    name, new = "gpubox17_4242.1700000000000000000.pt.trace.json", "trace_4242.1700000000000000000.pt.trace.json"
    (folder / "deep er" / name).write_text(json.dumps(CLEAN))
    with pytest.raises(UsageError, match=f"{name} names the machine it was recorded on"):
        share.share_traces(folder, "me/traces")
    sent = {}

    def upload(staging, bucket, mirror):
        sent.update({path.relative_to(staging).as_posix(): path for path in staging.rglob("*.json*")})
        return set(sent)

    monkeypatch.setattr(share, "_uploader", lambda: "huggingface_hub")
    monkeypatch.setattr(share, "_by_hub", upload)
    monkeypatch.setattr(share, "_is_public", lambda bucket: True)
    monkeypatch.setattr(share, "perfetto_link", lambda bucket, path: path)
    shared = share.share_traces(folder, "me/traces", scrub=True)
    assert set(shared.links) == set(sent) == {"a.json", "deep er/b.json.gz", f"deep er/{new}"}
    (folder / "deep er" / name.replace("17_", "18_")).write_text(json.dumps(CLEAN))
    with pytest.raises(UsageError, match="would both be called"):
        share.share_traces(folder, "me/traces", scrub=True)


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def message(number, body):
    """A length-delimited field of a protobuf message."""
    return varint(number << 3 | 2) + varint(len(body)) + body


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_perfetto_trace_is_looked_into_and_never_scrubbed(tmp_path, compressed, packed):
    inner = message(1, message(2, b'x /home/jane/run.py {"HOME": 1, "USER": 2}'))
    packet = message(1, varint(8 << 3) + b"\x07" + message(50, zlib.compress(inner))) if compressed else inner
    path = tmp_path / ("t.pftrace.gz" if packed else "t.pftrace")
    path.write_bytes(gzip.compress(packet) if packed else packet)
    found = look_for_private(path)
    assert (found.environment, found.homes) == (True, {"/home/jane"})
    with pytest.raises(TraceError, match="cannot be scrubbed"):
        share.scrubbed(path, tmp_path / "copy")
    path.write_bytes(message(1, message(50, b"no zlib")))
    with pytest.raises(TraceError, match="cannot look into"):
        look_for_private(path)


@given(st.binary(max_size=200))
def test_any_bytes_are_looked_into(body):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "t.pftrace"
        path.write_bytes(body)
        with contextlib.suppress(TraceError):
            look_for_private(path)


def test_what_cannot_be_scrubbed_is_not_sent(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [{"name": "x", "args": {"HOME": "1", "USER": "jane"}}]}))
    with pytest.raises(TraceError, match="cannot be scrubbed: what is left holds environment"):
        share.scrubbed(path, tmp_path / "copy.json")
    path.write_text("{not json")
    with pytest.raises(TraceError, match="cannot be scrubbed, it is not JSON"):
        share.scrubbed(path, tmp_path / "copy.json")


@pytest.mark.parametrize(
    ("bucket", "make", "sentence"),
    [
        ("traces", lambda p: p, "--bucket must be USER/NAME"),
        ("me/a/b", lambda p: p, "--bucket must be USER/NAME"),
        ("me/traces", lambda p: p / "none", "share must be given a folder"),
        ("me/traces", lambda p: p.parent / "empty", "it holds none"),
    ],
)
def test_arguments(folder, bucket, make, sentence):
    (folder.parent / "empty").mkdir()
    with pytest.raises(UsageError, match=sentence):
        share.share_traces(make(folder), bucket)


def test_without_a_library_that_uploads_it_says_which(folder, monkeypatch):
    monkeypatch.setattr(
        "attnscope.implementation.missing_package", lambda package: f"package {package} is not installed"
    )
    with pytest.raises(UsageError, match=r"huggingface-hub.* is not installed\nhint: pip install 'attnscope\[hub\]'"):
        share.share_traces(folder, "me/traces")


@needs_hub
def test_an_upload_that_fails_is_one_sentence_that_blames_nobody(folder, monkeypatch):
    def broken(*_):
        raise ImportError("libcudart.so.12: cannot open\nsecond line")

    monkeypatch.setattr(share, "_uploader", lambda: "huggingface_hub")
    monkeypatch.setattr(share, "_by_hub", broken)
    with pytest.raises(AttnscopeError, match=r"^the upload to me/traces failed: ImportError: .* cannot open\nhint: .*"):
        share.share_traces(folder, "me/traces")


@needs_hub
@pytest.mark.parametrize("mirror", [False, True])
def test_trace_util_is_told_not_to_delete_since_it_would(folder, monkeypatch, capsys, mirror):
    """By a module with the signature of trace-util 0.2, whose ``delete`` is True by default."""
    asked = {}

    def upload_traces(bucket_name, folder_path, *, token=None, delete=True, do_login=True, recursive=True):
        asked.update(bucket=bucket_name, delete=delete, do_login=do_login)
        print("Sync plan: as huggingface_hub prints it where it is not told to be quiet")
        return [types.SimpleNamespace(path=name) for name in share.find_traces(folder_path)[0]]

    stand_in = types.ModuleType("trace_util")
    stand_in.upload_traces = upload_traces
    monkeypatch.setitem(sys.modules, "trace_util", stand_in)
    monkeypatch.setattr("attnscope.implementation.missing_package", lambda package: None)
    monkeypatch.setattr(share, "_is_public", lambda bucket: True)
    shared = share.share_traces(folder, "me/traces", mirror=mirror)
    assert asked == {"bucket": "me/traces", "delete": mirror, "do_login": False}
    assert shared.through == "trace-util"
    said = capsys.readouterr()
    assert (said.out, said.err[:9]) == ("", "Sync plan"), "stdout is for the links"
    assert shared.links["deep er/b.json.gz"].endswith("/buckets/me/traces/resolve/deep%20er/b.json.gz")


OTHER = {"type": "file", "path": "old.json", "size": 1, "xetHash": "0" * 64}


@needs_hub
@pytest.mark.slow
def test_traces_arrive_and_nothing_is_deleted(folder, tmp_path):
    """Through whichever library is installed: both speak to the same endpoint."""
    (folder / "c.json").write_text(json.dumps(HOME))
    with Hub(buckets={"me/traces": {"old.json": OTHER}}) as hub:
        done = attnscope_share(hub, tmp_path, folder, "--bucket", "me/traces", "--scrub")
    assert done.returncode == 0, done.stderr
    assert {(one["type"], one["path"]) for one in hub.operations} == {
        ("addFile", "a.json"), ("addFile", "deep er/b.json.gz"), ("addFile", "c.json"),
    }  # fmt: skip
    assert "old.json" in hub.buckets["me/traces"]
    assert "left out, no traces: login.json" in done.stderr
    through = "trace-util" if importlib.util.find_spec("trace_util") else "huggingface_hub"
    assert f"uploaded through {through}" in done.stderr
    names, links = done.stdout.splitlines()[::2], [line.strip() for line in done.stdout.splitlines()[1::2]]
    assert names == ["a.json", "c.json", "deep er/b.json.gz"], "nothing else is on stdout"
    assert links == [
        f"https://ui.perfetto.dev/#!/?url={hub.endpoint}/buckets/me/traces/resolve/{path}"
        for path in ("a.json", "c.json", "deep%20er/b.json.gz")
    ]


@needs_hub
@pytest.mark.slow
def test_only_mirror_deletes(folder, tmp_path):
    with Hub(buckets={"me/traces": {"old.json": OTHER}}) as hub:
        done = attnscope_share(hub, tmp_path, folder, "--bucket", "me/traces", "--mirror")
    assert done.returncode == 0, done.stderr
    assert [one["path"] for one in hub.operations if one["type"] == "deleteFile"] == ["old.json"]
