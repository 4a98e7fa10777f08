"""Rows on a rank without a run."""

from __future__ import annotations

import os

import pytest

from flyteplugins_tracking import DistributedInfo, override_distributed_info, tracking_init


def test_a_lost_row_is_told_once_also_behind_the_function_and_costs_a_forked_child_nothing(caplog):
    wandb = pytest.importorskip("wandb")
    train = tracking_init(rank_scope="worker", primary_rank=1)(lambda: wandb.init(project="p"))
    info = DistributedInfo(rank=2, world_size=4, local_rank=0, local_world_size=2, worker_index=1, num_workers=2)
    with override_distributed_info(info):
        run = train()
    child = os.fork()
    if child == 0:
        try:
            run.log({"x": 1})
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(2):
        run.log({"x": 1})
    (text,) = [record.getMessage() for record in caplog.records if "does nothing" in record.getMessage()]
    assert "rank 2 logs to a run that does nothing" in text
    assert "local rank 1 has the run" in text
    assert "primary_rank=0 to tracking_init" in text


def test_a_run_that_does_nothing_has_no_address_which_mlflow_would_ask_the_server_for():
    mlflow = pytest.importorskip("mlflow")

    @tracking_init(tracker="mlflow", primary_rank=1)
    def train():
        return mlflow.start_run().info.run_name, mlflow.get_artifact_uri()

    with override_distributed_info(DistributedInfo(rank=0, world_size=2, local_rank=0, local_world_size=2)):
        assert train() == ("no-run", "")
