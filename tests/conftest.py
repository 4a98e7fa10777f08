"""Fixtures and the search path of the support modules."""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from support import jobs
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from flyteplugins_tracking._util import files
from flyteplugins_tracking.testing import RecordedRuns

# A busy machine is no finding.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases of the tests that are marked as sampled or crossed to `make test-all`, or to `make test-wide`.

    Of a crossed test, `make test-all` has no case with two values that are not the first ones of their arguments.
    """
    first: dict[object, dict[str, object]] = {}
    cases: Counter[object] = Counter()
    of_all: Counter[object] = Counter()
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_place)
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) and not any(map(item.get_closest_marker, ("full", "wide"))):
            cases[item.function] += 1
            if cases[item.function] > sampled.args[0]:
                item.add_marker("full")
        if (sampled := item.get_closest_marker("sampled_full")) and not item.get_closest_marker("wide"):
            of_all[item.function] += 1
            if of_all[item.function] > sampled.args[0]:
                item.add_marker("wide")
        if item.get_closest_marker("crossed") and isinstance(item, pytest.Function):
            # `callspec.indices` counts the cases of a test, and not the values of its argument.
            values = item.callspec.params
            of_first = first.setdefault(item.function, values)
            if sum(value != of_first[name] for name, value in values.items()) > 1:
                item.add_marker("wide")


# The longest files, in whose order the workers begin them. The other tests without a job come last: they are short.
LONGEST = (
    "test_command_run",
    "test_examples",
    "test_blocks",
    "test_flytekit",
    "test_watch",
    "test_signals",
    "test_field",
    "test_conformance",
    "test_flyte2",
    "test_wandb",
    "test_send",
    "test_unavailable_jobs",
    "test_testing",
    "test_sigterm",
)


def _place(item: pytest.Item) -> int:
    if item.path.stem in LONGEST:
        return LONGEST.index(item.path.stem)
    return len(LONGEST) + (item.path.parent.name == "unit")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file all of whose tests have a mark that `-m "not ..."` names, without a look at its tests."""
    if not collection_path.name.startswith("test_"):
        return None
    marks = re.findall(r"^pytestmark = pytest\.mark\.(\w+)$", collection_path.read_text(), re.MULTILINE)
    return any(f"not {mark}" in config.option.markexpr for mark in marks) or None


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    """Kill what the test has started and not waited for."""
    jobs.started.clear()
    yield
    for job in jobs.started:
        jobs.kill(job)


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process's environment without any launcher's variables."""
    for name in set(os.environ) - set(jobs.environment(Path())):
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def recorder(bare_environment: pytest.MonkeyPatch, recorded_runs: RecordedRuns) -> RecordedRuns:
    """The test kit's own recorder, under no launcher. A test of claims or signals passes `tracker=` instead.

    The kit simulates what is outside of the process, so that no signal is watched for and no run is claimed.
    """
    return recorded_runs


@pytest.fixture
def shared_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary directory that all users can write to, as /tmp."""
    tmp_path_factory.getbasetemp()  # which would be in there, else
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setattr(files, "_warn_once", files.WarnOnce(files.logger))
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(path)


class _Scheduler(LoadScopeScheduling):
    """A file's tests stay in one worker, in their order; those of the longest files go where one is free.

    Only where each job has a project of its own (`scripted_training.py`): a run that is open has its project and id on
    the machine.
    (xdist's own groups do nothing under pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        path, _, parameters = nodeid.partition("[")
        path = path.partition("::")[0]
        if Path(path).stem in ("test_kills", "test_left_runs", "test_offline_kills", "test_reliability", "test_shared"):
            return nodeid
        # Where a shared fixture has parameters, they stand first in the test's.
        return f"{path}[{parameters.rstrip(']').partition('-')[0]}" if _has(path, 'scope="module", params=') else path


@functools.cache
def _has(path: str, text: str) -> bool:
    return text in (Path(__file__).parents[1] / path).read_text()


def pytest_configure(config: pytest.Config) -> None:
    """Where the workers of this session find the server of warm jobs, which ends with the session."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.option.numprocesses:
        # Each worker has its own: an open run has its project and id on the machine, as a lock in this directory.
        os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="t-")  # short, for the sockets in it
        os.environ.pop("XDG_RUNTIME_DIR", None)
        if "PYTEST_XDIST_WORKER" in os.environ:
            tempfile.tempdir = os.environ["TMPDIR"]  # Python has looked at the variable once, for the line above
        config.add_cleanup(functools.partial(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        directory = tempfile.mkdtemp(prefix="warm-")
        os.environ.update(TESTS_WARM_DIR=directory, TESTS_WARM_OWNER=str(os.getpid()))
        config.add_cleanup(functools.partial(shutil.rmtree, directory, ignore_errors=True))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # they are in order: `_place`
    return _Scheduler(config, log)
