"""In the style of CleanRL on several GPUs: TensorBoard's writer, synced to W&B, and gradients summed by hand."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import wandb
from tiny import Net, Samples
from torch.utils.tensorboard import SummaryWriter

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--exp-name", default="ppo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wandb-project-name", default="tensorboard-sync")
    parser.add_argument("--wandb-entity", default=None)
    parser.add_argument("--capture-video", action="store_true")
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--num-updates", type=int, default=8)
    parser.add_argument("--num-envs", type=int, default=8)
    args = parser.parse_args()
    args.local_rank = int(os.getenv("LOCAL_RANK", "0"))
    args.world_size = int(os.getenv("WORLD_SIZE", "1"))
    args.device_ids = []
    args.backend = "gloo"
    run_name = f"{args.exp_name}__{args.seed}__{int(time.time())}"
    if args.world_size > 1:
        dist.init_process_group(args.backend)
    writer = None
    if args.local_rank == 0:
        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            sync_tensorboard=True,
            config=vars(args),
            name=run_name,
            save_code=True,
        )
        writer = SummaryWriter(f"runs/{run_name}")
        rows = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
    agent, envs = Net(), Samples()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    global_step, start_time = 0, time.time()
    for _ in range(args.num_updates):
        global_step += args.num_envs * args.world_size
        seen = torch.randint(len(envs), (args.num_envs,))
        loss = torch.nn.functional.mse_loss(agent(envs.x[seen]), envs.x[seen].sum(1, True))
        optimizer.zero_grad()
        loss.backward()
        if args.world_size > 1:
            for parameter in agent.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= args.world_size
        optimizer.step()
        if writer is not None:
            writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
            writer.add_scalar("losses/value_loss", loss.item(), global_step)
            writer.add_scalar("charts/SPS", int(global_step / (time.time() - start_time)), global_step)
    if args.world_size > 1:
        dist.destroy_process_group()
    if writer is not None:
        writer.close()
        wandb.finish()
