"""Keys that name the rank, and metrics of one process. For several ranks see `test_process_group_jobs.py`."""

from __future__ import annotations

import math
import statistics
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flyteplugins_tracking import (
    ConfigError,
    DistributedInfo,
    gather_metrics,
    override_distributed_info,
    prefix_metrics,
    process_group,
)

NUMBERS = st.one_of(st.integers(-(2**63), 2**63), st.floats(allow_nan=True, allow_infinity=True))


@pytest.fixture(autouse=True)
def _bare(bare_environment):
    """Hide the launcher that may have started these tests."""


@pytest.fixture
def group_of_one():
    with process_group():
        yield


def test_prefixed_keys_name_the_rank():
    picture = object()
    with override_distributed_info(DistributedInfo(rank=3, world_size=8)):
        assert prefix_metrics({"loss": 0.5, "picture": picture}) == {"rank_3/loss": 0.5, "rank_3/picture": picture}


def test_one_process_is_rank_0_as_it_is_for_rank_prefix():
    metrics = {"loss": 0.5}
    assert prefix_metrics(metrics) == {"rank_0/loss": 0.5}
    assert metrics == {"loss": 0.5}


@pytest.mark.parametrize("metrics", [None, 0.5, "loss", [("loss", 0.5)], {1: 0.5}, {None: 0.5}])
@pytest.mark.parametrize("function", [prefix_metrics, gather_metrics])
def test_metrics_that_are_not_a_mapping_of_text_are_refused(function, metrics):
    with pytest.raises(ConfigError, match="metrics must be a mapping of text to values, got "):
        function(metrics)


def test_without_a_process_group_the_metrics_come_back():
    metrics = {"loss": np.float32(0.5), "epoch": 3, "done": True}
    gathered = gather_metrics(metrics)
    assert gathered == {"loss": 0.5, "epoch": 3, "done": 1}
    assert [type(value) for value in gathered.values()] == [float, int, int]
    assert gathered is not metrics


def test_without_torch_the_metrics_come_back(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    assert gather_metrics({"loss": 0.5}) == {"loss": 0.5}
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ("mean", r"stats must be a sequence of names such as \('mean',\), got 'mean'"),
        (None, "stats must be a sequence of names such as .*, got None"),
        (("maen",), "'maen' is not one of max, mean, min, std, sum; did you mean 'mean'"),
        ((max,), "is not one of"),
    ],
)
def test_unknown_statistics_are_refused_also_without_a_group(stats, message):
    with pytest.raises(ConfigError, match=message):
        gather_metrics({"loss": 0.5}, stats)


def test_a_value_is_refused_by_its_key_also_without_a_group():
    with pytest.raises(ConfigError, match=r"metrics\['note'\] is 'slow', of type str: pass a number"):
        gather_metrics({"loss": 0.5, "note": "slow"})


def test_a_value_that_torch_cannot_read_or_a_float_cannot_hold_is_refused_by_its_key():
    import torch

    with pytest.raises(ConfigError, match=r"metrics\['lost'\] is tensor\(.*, of type Tensor: pass a number"):
        gather_metrics({"loss": torch.ones(1), "lost": torch.ones(1, device="meta")})
    assert gather_metrics({"loss": torch.ones(1), "sparse": torch.ones(1).to_sparse()}) == {"loss": 1.0, "sparse": 1.0}
    with pytest.raises(ConfigError, match=r"metrics\['seed'\] has 16610 bits: pass a number that a float can hold"):
        gather_metrics({"seed": 10**5000})  # its text would be refused by Python


def test_a_group_of_one_has_the_columns_of_a_job(group_of_one):
    assert gather_metrics({"loss": 0.5}) == {"loss/mean": 0.5, "loss/min": 0.5, "loss/max": 0.5, "rank_0/loss": 0.5}


@pytest.mark.parametrize(
    ("primary_rank", "message"), [(1, "primary_rank=1 is not in the process group"), ("0", "an int")]
)
def test_a_primary_that_the_group_does_not_have_is_refused(group_of_one, primary_rank, message):
    assert gather_metrics({"loss": 0.5}, ["mean"], primary_rank=-1) == {"loss/mean": 0.5, "rank_0/loss": 0.5}
    with pytest.raises(ConfigError, match=message):
        gather_metrics({"loss": 0.5}, primary_rank=primary_rank)


def test_tensors_of_all_types_are_numbers():
    import torch

    losses = {f"loss{i}": torch.tensor(float(i)) for i in range(20)}
    half = {"half": torch.tensor([0.5], dtype=torch.float16), "more": torch.tensor([[1.5]], dtype=torch.float16)}
    gathered = gather_metrics({**losses, **half})
    assert list(gathered.items()) == [*((f"loss{i}", float(i)) for i in range(20)), ("half", 0.5), ("more", 1.5)]


@example([1.0, math.nan])
@example([2**53 + 1, math.inf])
@given(st.lists(NUMBERS, min_size=1, max_size=8))
def test_statistics_are_those_of_the_standard_library_or_nan(values):
    def gather_object(own, payloads, dst):
        payloads[:] = [own, *({"x": value} for value in values[1:])]

    world = {"get_rank": lambda: 0, "get_world_size": lambda: len(values), "group": SimpleNamespace(WORLD=None)}
    names = ("mean", "min", "max", "sum", "std")
    with pytest.MonkeyPatch.context() as patch:
        dist = SimpleNamespace(**world, gather_object=gather_object)
        patch.setattr("flyteplugins_tracking._job.metrics.initialised_distributed", lambda: dist)
        merged = gather_metrics({"x": values[0]}, names)
    found = [merged[f"x/{name}"] for name in names]
    floats = [float(value) for value in values]
    if any(math.isnan(value) for value in values):
        assert all(math.isnan(value) for value in found)
    elif all(math.isfinite(value) and abs(value) < 1e100 for value in values):
        expected = [statistics.fmean(floats), min(floats), max(floats), math.fsum(floats), statistics.pstdev(floats)]
        scale = max(abs(value) for value in floats)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9 * scale + 1e-150)  # less has no square
    else:
        assert found[1:3] == [min(floats), max(floats)]  # a whole number beside other numbers counts as one of them
