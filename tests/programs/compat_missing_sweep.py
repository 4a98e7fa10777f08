"""Asks for the files of sweeps that are not there, with the existing plugin's function. Prints the errors."""

from flyteplugins_tracking.compat.wandb import download_wandb_sweep_dirs, wandb_config

with wandb_config(project="p", entity="e"):
    for sweep_id in (None, "nobody"):
        try:
            download_wandb_sweep_dirs(sweep_id)
        except RuntimeError as error:
            print("REFUSED", error, "BY", type(error.__cause__).__name__)
