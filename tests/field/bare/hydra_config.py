"""In the style of a Hydra project: structured configs with lists, interpolations and a value that has to be given."""

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import hydra
import torch
import torch.distributed as dist
import wandb
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from tiny import Net, Samples
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger(__name__)


@dataclass
class AdamConfig:
    _target_: str = "torch.optim.Adam"
    lr: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])


@dataclass
class ModelConfig:
    name: str = "gpt"
    layers: list[int] = field(default_factory=lambda: [8, 16, 8])
    n_layer: int | None = None


@dataclass
class Config:
    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"model": "gpt"}, {"optimizer": "adam"}])
    model: Any = MISSING
    optimizer: Any = MISSING
    steps: int = 8
    task: str = "train"
    tags: list[str] = field(default_factory=lambda: ["dev", "${model.name}"])
    run_name: str = "${task}-${model.name}-lr${optimizer.lr}"
    output_dir: str = "${hydra:runtime.output_dir}"
    checkpoint: str = MISSING


store = ConfigStore.instance()
store.store(name="config", node=Config)
store.store(group="model", name="gpt", node=ModelConfig)
store.store(group="optimizer", name="adam", node=AdamConfig)


@hydra.main(version_base=None, config_name="config")
def main(cfg: DictConfig) -> None:
    rank = int(os.environ["RANK"])
    if rank == 0:
        wandb.init(
            project="hydra-config",
            name=cfg.run_name,
            tags=list(cfg.tags),
            config=OmegaConf.to_container(cfg, resolve=True),
        )
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net())
    optimizer = hydra.utils.instantiate(cfg.optimizer, params=model.parameters())
    data = Samples()
    for step in range(cfg.steps):
        loss = torch.nn.functional.mse_loss(model(data.x), data.x.sum(1, True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.info("step %d: %.3f", step, loss.item())
        if rank == 0:
            wandb.log({"train/loss": loss.item(), "trainer": {"step": step}})
    dist.destroy_process_group()
    if rank == 0:
        wandb.finish()


if __name__ == "__main__":
    main()
