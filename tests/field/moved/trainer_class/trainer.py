import torch
from evaluation import evaluate
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import get_run


class Trainer:
    def __init__(self, config, model, data):
        self.config, self.data = config, data
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
        self.run = get_run()
        self.iteration = 0

    def train(self):
        while self.iteration < self.config.max_steps:
            self._step()
            self.iteration += 1
            if self.iteration % self.config.eval_every == 0:
                evaluate(self.model, self.data)

    def _step(self):
        loss = torch.nn.functional.mse_loss(self.model(self.data.x), self.data.x.sum(1, True))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.run is not None:
            self.run.log({"train/loss": loss.item(), "iteration": self.iteration}, commit=not self._is_evaluated())

    def _is_evaluated(self):
        return (self.iteration + 1) % self.config.eval_every == 0
