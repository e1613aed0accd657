"""Signals to a run.

The first is a request to stop, a second one an end at once; the code has its number.
"""

import os
import signal
import time
from collections.abc import Callable
from threading import Thread

import pytest

from nanogpt_bench.cli import main
from nanogpt_bench.system.signals import SAME_REQUEST_SECONDS, stop_requests, stop_requests_once


def exit_code_of(child: Callable[[], None]) -> int:
    """Fork, run `child`, and return how the process ended.

    The code is 0 if it came to its end.
    """
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os._exit(0)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_request_and_handlers_are_restored(number):
    old_handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    with stop_requests() as stop:
        assert not stop.asked
        signal.raise_signal(number)
        assert (stop.asked, stop.name) == (True, number.name)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == old_handlers


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_exits_at_once_with_128_and_its_number(first, second):
    read_end, write_end = os.pipe()

    def child():
        try:
            with stop_requests(lambda: os.write(write_end, b"x")):
                signal.raise_signal(first)
                time.sleep(SAME_REQUEST_SECONDS * 1.5)
                signal.raise_signal(second)
        finally:
            os.write(write_end, b"cleaned up")

    assert exit_code_of(child) == 128 + second
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"x"


def test_a_signal_that_comes_twice_at_once_or_to_a_worker_is_one_request():
    """As from `timeout`, which signals its child and then the group."""

    def child():
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.name == "SIGTERM"

    assert exit_code_of(child) == 0
    with stop_requests_once() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(SAME_REQUEST_SECONDS * 1.5)
    assert stop.asked


def test_outside_of_the_main_thread_nothing_is_handled():
    handlers = []

    def work():
        with stop_requests() as stop:
            handlers.extend((signal.getsignal(signal.SIGTERM), stop.asked))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM), False]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_with_its_number(number, monkeypatch, text_file):
    monkeypatch.setattr(
        "nanogpt_bench.commands.prepare.main", lambda _: signal.raise_signal(number)
    )
    old_handler = signal.getsignal(signal.SIGTERM)
    interrupts = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it
    try:
        assert main(["prepare", "text", "--input", str(text_file)]) == 128 + number
    finally:
        signal.signal(signal.SIGTERM, old_handler)
        signal.signal(signal.SIGINT, interrupts)


def test_the_signal_that_a_lost_process_brings_does_not_hide_it(monkeypatch, text_file):
    def lost(_):
        try:
            raise RuntimeError("Socket closed [127.0.0.1]:40123")
        finally:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("nanogpt_bench.commands.prepare.main", lost)
    with (
        stop_requests(),
        pytest.raises(RuntimeError, match="Socket closed"),
    ):  # stop_requests restores the handlers
        main(["prepare", "text", "--input", str(text_file)])
