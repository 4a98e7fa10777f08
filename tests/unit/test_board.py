"""The board of a job's ranks, over a store of torch's."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
from support.waiting import wait_until

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job import board as board_module
from flyteplugins_tracking._job import failures as failures_module
from flyteplugins_tracking._job import pulse as pulse_module
from flyteplugins_tracking._job import watch as watch_module
from flyteplugins_tracking._job.board import Board, from_text, job_board, to_text
from flyteplugins_tracking._job.failure import Failure
from flyteplugins_tracking._job.failures import FailureReader
from flyteplugins_tracking._job.pulse import Pulse, PulseDuty

MPI = DistributedInfo(0, 2, 0, 2, 0, 1, launcher="mpich")


@pytest.fixture
def store():
    return pytest.importorskip("torch.distributed").HashStore()


def test_a_text_that_is_counted_and_not_yet_stored_is_read_when_it_is(store):
    board = Board(store, "topic")
    number = board.count("texts", 1)
    board.append("next")
    assert board.texts() == {1: "next"}
    board.put(f"text/{number}", "late")
    assert board.texts() == {0: "late", 1: "next"}


def test_a_store_that_does_not_answer_is_an_error_and_not_as_if_there_was_none():
    info = DistributedInfo(0, 2, 0, 2, 0, 1, launcher="torchelastic")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        env = {**os.environ, **address, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        with pytest.raises(RuntimeError, match="the job's store does not answer"):
            job_board(info, env, "topic", timedelta(seconds=0.1))


NESTED = "[" * 100_000
BAD_TEXTS = [
    *("", "{", "[1]", "7", "null", NESTED, '{"nothing": 1}', "\ud800", f'{{"type": "{"x" * 5_000_000}"}}'),
    *('{"rank": 1, "memory": 1e999}', '{"put_at": NaN, "memory": 1}', '{"node": 1, "load": {"cpu": 1e999}}'),
    f'{{"node": 1, "load": {{"memory": {10**30}}}}}',
    f'{{"rank": 1, "type": "E", "message": "m", "exit_code": 1, "failed_at": {10**400}}}',
    f'{{"cuda_memory": {10**400}, "memory": {10**400}}}',
]


def test_a_text_that_is_damaged_or_another_programs_is_left_out_with_one_warning(store, caplog, monkeypatch):
    for text in BAD_TEXTS:
        assert (from_text(Failure, text), from_text(Pulse, text)) == (None, None), text[:100]
    monkeypatch.setattr(board_module, "_warn_once", board_module.WarnOnce(board_module.logger))
    caplog.clear()
    board = Board(store, "pulse")
    for rank, text in enumerate(["{", to_text(Pulse(step_s=3.0)), NESTED]):
        board.put(str(rank), text)
    assert [(rank, pulse.step_s) for rank, pulse in pulse_module.read(board, 4).items()] == [(1, 3)]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            to_text(Failure(1, "E", "\x1b]0;title\x07 red\x9b31m\nline\ttab", 1)),
            "\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER} red\N{REPLACEMENT CHARACTER}31m\nline\ttab",
        ),
        ('{"rank": 1, "type": "at \\ud800", "message": "\\udfff", "exit_code": 1}', "\N{REPLACEMENT CHARACTER}"),
        ('{"rank": 1, "type": 5, "message": ["m"], "exit_code": 1, "traceback": "t", "host": 2}', "5: ['m']"),
    ],
    ids=["what a terminal obeys", "no UTF-8", "no text"],
)
def test_what_a_peer_has_put_in_the_place_of_words_can_be_told(text, told):
    failure = from_text(Failure, text)
    assert failure is not None
    assert told in str(failure)
    assert str(failure).encode()


def test_a_text_with_fields_of_other_types_ends_nothing_and_is_told_once(store, caplog, monkeypatch):
    for module, topic in ((failures_module, "failures"), (watch_module, "ranks")):
        monkeypatch.setattr(module, "_warn_once", module.WarnOnce(module.logger))
        monkeypatch.setattr(module, "job_board", lambda *_, topic=topic: Board(store, topic))
    monkeypatch.setattr("flyteplugins_tracking._job.siblings.can_watch", lambda _: False)
    Board(store, "failures/causes").append('{"rank": [], "type": {}, "message": 3, "exit_code": null}')
    for _ in range(2):
        verdict, _ = FailureReader(MPI, is_alone=False, is_own_run=False).verdict(Failure(0, "E", "own", 1), None)
        assert verdict is not None
        assert verdict.text == f"rank 0 on {socket.gethostname()}: own"
    assert len(caplog.records) == 1
    watch, rows = watch_module.Watch(), []
    pulse = PulseDuty(MPI, 0.02, rows.append)
    watch.add(MPI, pulse, without="")
    wait_until(lambda: rows)
    Board(store, "pulse").put("1", '{"step_s": "a", "put_at": 1e18}')
    wait_until(lambda: len(caplog.records) == 2)
    # Later than the damaged one: a rank whose pulse keeps its time is silent after 0.04 s.
    Board(store, "pulse").put("1", to_text(Pulse(step_s=3.0, put_at=2e18)))
    wait_until(lambda: any(row.get("ranks/step_time/max") == 3.0 for row in rows))
    watch.remove(pulse)
    assert len(caplog.records) == 2
