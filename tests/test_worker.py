"""The child process, a new Python and the fork that tests take for one: results, errors, crashes, hangs, restarts."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from attnscope.worker import InProcess, RemoteError, Worker, WorkerFailed


def add(a, b, *, report):
    report(("adding", a))
    return a + b


def fail(*, report):
    raise ValueError("first line\nsecond line")


def die(code, *, report):
    print("last words", flush=True)
    os._exit(code)


def get_killed(*, report):
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(seconds, *, report):
    time.sleep(seconds)


def pid(*, report):
    return os.getpid()


@pytest.fixture(params=["new", "forked"])
def worker(request):
    if request.param == "forked":
        request.getfixturevalue("monkeypatch").setattr(
            "attnscope.worker.start_child", request.getfixturevalue("nursery").start_child
        )
    made = Worker()
    yield made
    made.close()


def call(worker, function, *args, timeout_s=30.0, on_report=None):
    return worker.call(f"test_worker:{function}", *args, timeout_s=timeout_s, on_report=on_report)


@pytest.mark.parametrize("kind", [Worker, InProcess])
def test_returns_values_and_reports(kind):
    heard = []
    made = kind()
    assert call(made, "add", 2, 3, on_report=heard.append) == 5
    assert heard == [("adding", 2)]
    made.close()


@pytest.mark.parametrize("kind", [Worker, InProcess])
def test_an_exception_arrives_with_kind_message_and_log(kind):
    made = kind()
    with pytest.raises(RemoteError, match="first line") as caught:
        call(made, "fail")
    assert caught.value.kind == "ValueError"
    assert "raise ValueError" in caught.value.log
    made.close()


def test_the_child_survives_an_exception_and_keeps_its_state(worker):
    first = call(worker, "pid")
    with pytest.raises(RemoteError):
        call(worker, "fail")
    assert call(worker, "pid") == first != os.getpid()


def lose_the_device(*, report):
    """As after a CUDA fault: finding out that nothing works any more takes a while, then the child ends."""
    import sys

    for module in ("__main__", "attnscope.worker"):  # in a new Python and in a fork
        sys.modules[module]._device_is_lost = lambda: time.sleep(0.2) or True
    raise RuntimeError("an illegal memory access")


def test_the_end_of_a_child_that_lost_its_device_is_not_told_to_the_next_call(worker):
    first = call(worker, "pid")
    with pytest.raises(RemoteError, match="illegal memory access"):
        call(worker, "lose_the_device")
    assert call(worker, "pid") != first


def test_a_death_is_told_with_its_last_words_and_the_next_call_gets_a_new_child(worker):
    first = call(worker, "pid")
    with pytest.raises(WorkerFailed, match=r"exit code 7(.|\n)*last words"):
        call(worker, "die", 7)
    assert call(worker, "pid") != first


def test_a_kill_names_its_signal_and_the_likely_cause(worker):
    with pytest.raises(WorkerFailed, match=r"SIGKILL \(out of memory, most likely\)"):
        call(worker, "get_killed")


def test_a_hang_is_stopped(worker):
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"longer than its limit of 0\.5 s"):
        call(worker, "sleep", 60, timeout_s=0.5)
    assert time.monotonic() - started < 20


def test_closing_leaves_no_child_and_no_log(worker):
    child = call(worker, "pid")
    log = worker._log
    worker.close()
    assert not log.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_child_that_died_between_calls_is_replaced(worker):
    child = call(worker, "pid")
    os.kill(child, signal.SIGKILL)
    time.sleep(0.3)
    assert call(worker, "pid") != child


def here(*, report):
    return os.getcwd(), os.environ["ATTNSCOPE_TEST_MARKER"], os.getsid(0) == os.getpid()


def test_it_has_the_folder_and_environment_of_now_and_a_session_of_its_own(worker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNSCOPE_TEST_MARKER", "now")
    assert call(worker, "here") == (str(tmp_path), "now", True)


def test_a_warm_up_runs_first_in_every_new_child_outside_the_limit():
    made = Worker(warm_up=("test_worker:sleep", 1.5))
    assert call(made, "add", 1, 1, timeout_s=1.0) == 2
    with pytest.raises(WorkerFailed):
        call(made, "die", 3)
    assert call(made, "add", 1, 2, timeout_s=1.0) == 3
    made.close()


def test_another_thread_may_close_it_at_any_moment(worker):
    """The call ends with one of the errors that callers know, never with one of ours."""
    ends = []

    def work():
        try:
            call(worker, "sleep", 30)
        except (WorkerFailed, OSError) as error:
            ends.append(type(error).__name__)

    for pause in (0.0, 0.01, 0.05, 0.3, 0.6):
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(pause)
        while thread.is_alive():
            worker.close()
            thread.join(0.05)
    assert len(ends) == 5
