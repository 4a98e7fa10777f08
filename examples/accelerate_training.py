# torchrun --nproc-per-node=2 accelerate_training.py
import torch
from accelerate import Accelerator

from flyteplugins_tracking import should_stop, tracking_init


@tracking_init(project="examples", name="accelerate", config={"data": "y = 2x"})
def train(steps: int) -> None:
    cpu = not torch.cuda.is_available()  # else each process is a world of 1
    accelerator = Accelerator(log_with="wandb", cpu=cpu)
    accelerator.init_trackers("ignored", config={"lr": 0.1})
    layer = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(layer, sgd)
    for step in range(steps):
        x = torch.rand(16, 1, device=accelerator.device)
        loss = torch.nn.functional.mse_loss(model(x), 2 * x)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"loss": loss.item()}, step=step)
        if should_stop():  # True on all ranks at the same step
            accelerator.save_state("checkpoint")  # on all ranks
            break
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()  # ends the process group, and not the run


if __name__ == "__main__":
    train(steps=4)
