"""A process that ends just after a collective, in whose group there was a model."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flyteplugins_tracking import process_group

with process_group():
    DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.all_reduce(torch.ones(3))
