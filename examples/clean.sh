# Sends all runs below wandb/. Then removes each run that was not written for a
# day, if all of it was sent, and old logs of W&B's client. A run to which a
# job still writes stays.
flyteplugins-tracking send wandb
find wandb -maxdepth 2 -name 'run-*.wandb' -mtime +0 -printf '%h\0' |
    xargs -0 -r -n 1 sh -c 'flyteplugins-tracking send "$0" && rm -rf "$0"'
find "${WANDB_CACHE_DIR:-$HOME/.cache}/wandb/logs" -type f -mtime +0 -delete
