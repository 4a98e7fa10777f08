"""Keys that name the rank."""

from __future__ import annotations

import pytest

from flyteplugins_tracking import ConfigError, DistributedInfo, override_distributed_info, prefix_metrics


@pytest.fixture(autouse=True)
def _bare(bare_environment):
    """Hide the launcher that may have started these tests."""


def test_prefixed_keys_name_the_rank():
    picture = object()
    with override_distributed_info(DistributedInfo(rank=3, world_size=8)):
        assert prefix_metrics({"loss": 0.5, "picture": picture}) == {"rank_3/loss": 0.5, "rank_3/picture": picture}


def test_one_process_is_rank_0_as_it_is_for_rank_prefix():
    metrics = {"loss": 0.5}
    assert prefix_metrics(metrics) == {"rank_0/loss": 0.5}
    assert metrics == {"loss": 0.5}


@pytest.mark.parametrize("metrics", [None, 0.5, "loss", [("loss", 0.5)], {1: 0.5}, {None: 0.5}])
def test_metrics_that_are_not_a_mapping_of_text_are_refused(metrics):
    with pytest.raises(ConfigError, match="metrics must be a mapping of text to values, got "):
        prefix_metrics(metrics)
