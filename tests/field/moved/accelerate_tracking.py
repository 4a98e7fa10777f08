"""In the style of Accelerate's example with trackers."""

import argparse
import os

import torch
from accelerate import Accelerator
from tiny import Net, Samples

from flyteplugins_tracking import tracking_init


@tracking_init(project="accelerate-tracking")
def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, log_with="wandb", project_dir=args.project_dir)
    if args.with_tracking:
        run = os.path.split(__file__)[-1].split(".")[0].replace("_", "-")
        accelerator.init_trackers(run, config, init_kwargs={"wandb": {"tags": ["example"]}})
    loader = torch.utils.data.DataLoader(Samples(), batch_size=config["batch_size"], shuffle=True)
    model = Net()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    overall_step = 0
    for epoch in range(config["num_epochs"]):
        model.train()
        total_loss = 0.0
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()}, step=overall_step)
            overall_step += 1
        model.eval()
        gathered = accelerator.gather_for_metrics(total_loss.reshape(1))
        accelerator.print(f"epoch {epoch}: {gathered.mean().item():.4f}")
        mean = gathered.mean().item() / len(loader)
        accelerator.log({"train_loss": mean, "epoch": epoch}, step=overall_step)
        overall_step += 1
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--project_dir", default="logs")
    parser.add_argument("--num_epochs", type=int, default=1)
    args = parser.parse_args()
    training_function({"lr": 2e-3, "num_epochs": args.num_epochs, "seed": 42, "batch_size": 4}, args)


if __name__ == "__main__":
    main()
