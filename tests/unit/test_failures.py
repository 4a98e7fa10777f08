"""Which failure is the cause, what it holds, and how it travels between ranks."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from urllib.parse import quote

import pytest
from support.waiting import wait_until

from flyteplugins_tracking import DistributedInfo, tracking_init
from flyteplugins_tracking._job import failures
from flyteplugins_tracking._job.board import Board, from_text, to_text
from flyteplugins_tracking._job.failure import Failure, is_secondary
from flyteplugins_tracking._job.failures import FailureReader, announce_failure, withdraw_failure
from flyteplugins_tracking._job.siblings import Ended
from flyteplugins_tracking._util import secrets
from flyteplugins_tracking._util.secrets import masked
from flyteplugins_tracking._util.text import has_credentials, without_credentials
from flyteplugins_tracking.errors import TrackerUnavailableError
from flyteplugins_tracking.testing import RecordingTracker

RANKS = [DistributedInfo(rank, 4, rank, 4, 0, 1, launcher="mpich") for rank in range(4)]
KEY = "0123456789abcdef0123456789abcdef01234567"


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def cut_off() -> BaseException:
    """As gloo's: raised in a file of torch.distributed."""
    code = compile(
        "raise RuntimeError('Connection closed by peer [127.0.0.1]:1234')", "/x/torch/distributed/c10d.py", "exec"
    )
    try:
        exec(code)
    except RuntimeError as error:
        return error
    raise AssertionError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A job of this test's ranks, which are this process, with a store; and a directory of its machine."""
    store = pytest.importorskip("torch.distributed").HashStore()
    monkeypatch.setattr(failures, "job_board", lambda info, env, topic: Board(store, topic))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr("flyteplugins_tracking._job.siblings.can_watch", lambda _: False)
    monkeypatch.setattr("flyteplugins_tracking._job.failures._GRACE_S", 0.2)
    return tmp_path


def fail(rank: int, error: BaseException) -> Failure:
    failure = Failure.of_error(raised(error) if error.__traceback__ is None else error, rank, 1)
    announce_failure(error, failure, RANKS[rank])
    return failure


def read(own: Failure | None = None, terminated_s: float | None = 0.0, is_own_run: bool = False) -> str:
    """What a rank reads that SIGTERM has reached so many seconds ago."""
    reader = FailureReader(RANKS[0], is_alone=False, is_own_run=is_own_run)
    verdict, _ = reader.verdict(own, None if terminated_s is None else time.monotonic() - terminated_s)
    return "none" if verdict is None else f"{verdict.cause.rank} {verdict.cause.type} {verdict.others}"


def test_the_first_exception_of_user_code_is_the_cause_and_echoes_do_not_hide_it(machine):
    for _ in range(100):
        fail(2, cut_off())
    fail(3, ValueError("bad batch"))
    fail(1, MuteError())
    assert read() == "3 ValueError 1"
    own = Failure.of_error(raised(KeyError("own")), 0, 1)
    assert read(own, is_own_run=True) == "0 KeyError 0"
    assert read(own) == "3 ValueError 2"


def test_what_is_withdrawn_or_raised_because_of_sigterm_or_earlier_or_has_no_exit_code_does_not_count(
    machine, monkeypatch
):
    withdraw_failure(fail(3, ValueError("handled")), RANKS[3])
    error = raised(ValueError("a peer's"))
    announce_failure(error, replace(Failure.of_error(error, 2, 1), exit_code=10**17), RANKS[2])
    assert read() == "none"
    fail(3, ValueError("its handler raises"))
    fail(2, cut_off())
    assert read(terminated_s=60.0) == "none"
    assert read() == "3 ValueError 0"
    monkeypatch.setattr("flyteplugins_tracking._util.proc.started_at", lambda: 2**40)
    assert read() == "none"


def test_an_echo_alone_is_the_cause_unless_this_rank_is_terminated_and_alone_has_it(machine):
    own = Failure.of_error(cut_off(), 0, 1)
    assert read(own, terminated_s=None) == "0 RuntimeError 0"
    assert read(own) == "none"  # preempted: the others were too
    fail(2, cut_off())
    assert read(own) == "0 RuntimeError 0"  # a scheduler cuts nobody off


def test_what_lost_a_peer_is_an_echo_and_what_only_sounds_so_is_not():
    assert is_secondary(cut_off())
    assert not is_secondary(raised(RuntimeError("Connection closed by peer")))  # in the user's own code
    assert not is_secondary(raised(ValueError("NCCL")))
    torch = pytest.importorskip("torch.distributed")
    assert is_secondary(raised(torch.DistNetworkError("anything")))


def test_a_failure_has_the_last_lines_and_no_key(monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "abracadabra-1")
    text = f"key {KEY}, abracadabra-1, https://user:pw@host/x, api_key='whatever12'"
    failure = Failure.of_error(raised(ValueError(text + "\n" * 200)), 1, 1)
    whole = to_text(failure)
    for secret in (KEY, "abracadabra-1", "user:pw", "whatever12"):
        assert secret not in whole
    assert len(failure.traceback.splitlines()) <= 50
    assert from_text(Failure, whole) == failure


def test_a_run_that_cannot_be_opened_is_why_its_rank_fails(machine, monkeypatch):
    file = machine / "error.json"
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "WANDB_MODE": "online"}
    for name, value in {**variables, "TORCHELASTIC_ERROR_FILE": str(file)}.items():
        monkeypatch.setenv(name, value)

    @tracking_init(project="tests", run_mode="new", id="unopened", secret=lambda: {}["key"])
    def train() -> None:
        raise AssertionError

    with pytest.raises(TrackerUnavailableError):
        train()
    assert "TrackerUnavailableError: secret= raised KeyError" in json.loads(file.read_text())["message"]["message"]
    assert read() == "3 flyteplugins_tracking.errors.TrackerUnavailableError 0"
    tracking_init(project="tests")(lambda: None)()  # the caller has handled the exception
    assert read() == "none"


class MuteError(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_key_of_secret_is_masked_in_the_exception_of_the_training(monkeypatch, bare_environment):
    key = "key-that-no/pattern-knows"

    @tracking_init(tracker=ReadsSecret(), secret=lambda: key)
    def train() -> None:
        raise ValueError(f"{key} and {quote(key, safe='')}")

    with pytest.raises(ValueError, match="key-that") as caught:
        train()
    failure = Failure.of_error(caught.value, 0, 1)
    assert failure.message == "*** and ***"
    assert key not in failure.traceback


def test_a_failure_whose_text_cannot_be_had_or_is_no_text_or_very_long_is_small_and_valid():
    assert "exception str() failed" in Failure.of_error(raised(MuteError()), 1, 1).message
    failure = Failure.of_error(raised(ValueError("first " + "x" * 10_000_000)), 1, 1)
    assert failure.message.startswith("first ")
    assert len(to_text(failure)) < 10_000
    failure = Failure.of_error(raised(ValueError("name \udcff")), 1, 1)
    assert failure.message.encode() == rb"name \udcff"
    assert rb"name \udcff" in failure.traceback.encode()


class ReadsSecret(RecordingTracker):
    def open(self, request):
        assert request.read_secret()
        return super().open(request)


def test_a_password_in_an_address_is_masked_whatever_it_has(monkeypatch, subtests):
    users = {"me": ["p@ss", "p/ss", "p ss word", "p@s/s w:rd", "12345", "a?b#c"], "me@example.com": ["word", "p@s/s"]}
    for user, password in ((user, password) for user, passwords in users.items() for password in passwords):
        with subtests.test(f"{user} {password}"):
            address = f"https://{user}:{password}@host.example.com/path"
            shown = "cannot reach https://***@host.example.com/path: no route"
            assert masked(f"cannot reach {address}: no route") == shown
            assert has_credentials(address)
            assert without_credentials(address) == "https://host.example.com/path"
            monkeypatch.setenv("WANDB_BASE_URL", f"https://me:long-{password}@host")
            assert masked(f"got 'long-{password}'") == "got '***'"
    assert masked("see postgresql://me:80/secret@host/db") == "see postgresql://***@host/db"  # no port
    for address in ("https://host/@me/x", "http://host", "sqlite:////tmp/a@b/x.db", "file:///a:b@c", "~/x"):
        assert masked(address) == address == without_credentials(address)
        assert not has_credentials(address)


def test_a_key_is_masked_as_it_is_and_as_a_literal_and_ordinary_text_is_not(monkeypatch):
    for key in ("two\nlines-of-a-key", "a-quote'and\"another", "back\\slash-of-a-key", "ключ-из-букв"):
        monkeypatch.setenv("SOME_TOKEN", key)
        monkeypatch.setenv("SOME_URL", f"https://me:{quote('long-' + key, safe='')}@host")
        for printed in (key, quote(key, safe=""), repr(key)[1:-1], f"long-{key}"):
            assert "key" not in masked(f"got {printed}, refused").replace("ключ", "key")
    secrets.learn("first-line-of-it\nsecond-line-of-it\nshort\n")
    assert masked("it ends: second-line-of-it\nshort") == "it ends: ***\nshort"
    assert masked("first-line-of-it\nsecond-line-of-it\nshort") == "***"
    monkeypatch.setenv("SHORT_KEY", "abc")
    text = "KeyError: 'loss', expected a token of 5 characters; abc; the key is missing"
    text += "; see http://localhost:5000/path or write to me@host.example.com"
    assert masked(text) == text


def test_masking_takes_no_time_that_grows_with_the_square_of_a_line():
    started = time.process_time()
    masked("://a:" * 50_000)
    assert time.process_time() - started < 3.0


# The exits of other ranks of this machine. This one has seen each at 10 s.


@pytest.mark.parametrize(
    ("status", "kind", "exit_code", "is_cause"),
    [
        # By when this rank got SIGTERM, in seconds: for one that exits by itself, a training process is not as fast.
        (0, "exit", 0, {None: False, 20.0: False, 5.0: False}),
        (7 << 8, "exit", 7, {None: True, 20.0: True, 5.0: False, 10.001: True, 9.997: True, 9.993: False}),
        (9, "SIGKILL", 137, {None: True, 20.0: True, 5.0: False, 9.99: True}),
        (137 << 8, "SIGKILL", 137, {None: True, 20.0: True, 5.0: False}),  # a shell around the rank
        (11, "SIGSEGV", 139, {None: True, 20.0: True, 5.0: False, 9.99: True}),
        (2, "SIGINT", 130, {None: True, 20.0: True, 5.0: False, 9.99: False}),
        (15, "SIGTERM", 143, {None: False, 20.0: False, 5.0: False, 9.99: False}),
        (143 << 8, "SIGTERM", 143, {None: False, 20.0: False, 5.0: False}),
        (None, "unknown", 1, {12.0: True, 100.0: False, 5.0: False}),  # soon before the job's end; it had returned
    ],
)
def test_the_exit_of_another_rank_is_the_cause_by_its_status_and_its_time(status, kind, exit_code, is_cause):
    ended = Ended(rank=2, pid=1, status=status, at=10.0)
    assert {at: ended.is_cause(terminated_at=at) for at in is_cause} == is_cause
    failure = ended.failure(is_out_of_memory=False)
    assert (failure.type, failure.exit_code) == (kind, exit_code)
    if status == 9:
        assert "(signal 9, often out of memory)" in str(failure)
        assert "(signal 9, out of memory)" in str(ended.failure(is_out_of_memory=True))


def test_the_error_file_is_written_as_torchelastic_does_until_the_failure_is_withdrawn(machine, monkeypatch):
    file = machine / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    failure = fail(1, ValueError("bad"))
    fail(1, ValueError("other"))  # somebody has written it
    written = json.loads(file.read_text())
    assert written["message"]["message"] == "ValueError: bad"
    assert {*written["message"]["extraInfo"]} == {"py_callstack", "timestamp"}
    withdraw_failure(failure, RANKS[1])
    assert not file.exists()


def test_the_error_file_is_never_half_there(machine, monkeypatch):
    """torchelastic's agent raises on such a file, and does not restart the job."""
    file, found = machine / "error.json", list[str]()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    failure = replace(Failure.of_error(raised(ValueError("bad")), 1, 1), traceback="x" * 20_000_000)
    reader = threading.Thread(target=lambda: found.append(wait_until(lambda: file.exists() and file.read_text())))
    reader.start()
    announce_failure(ValueError("bad"), failure, RANKS[1])
    reader.join()
    assert json.loads(found[0])["message"]["message"] == "ValueError: bad"


@pytest.mark.parametrize(("code", "kind"), [(1, "ValueError"), ("the text", "SystemExit")])
def test_an_exit_with_a_number_in_a_handler_is_the_failure_that_was_handled(code, kind):
    try:
        try:
            raise ValueError("made to fail")
        except ValueError:
            raise SystemExit(code)  # noqa: B904 as frameworks do it
    except SystemExit as error:
        failure = Failure.of_error(error, 1, 1)
    assert (failure.type, failure.message) == (kind, "made to fail" if code == 1 else "the text")
