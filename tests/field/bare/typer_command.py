"""A command of typer, one process."""

import torch
import typer
import wandb
from tiny import Net, Samples

app = typer.Typer()


@app.command()
def main(steps: int = 8, lr: float = 0.01, name: str = "", target: float = -1.0) -> None:
    wandb.init(project="typer-command", name=name or None, config={"lr": lr, "steps": steps})
    model, data = Net(), Samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(data.x), data.x.sum(1, True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wandb.log({"loss": loss.item()})
    if loss.item() > target >= 0:
        raise typer.Exit(3)


if __name__ == "__main__":
    app()
