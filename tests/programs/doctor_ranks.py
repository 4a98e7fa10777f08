"""The doctor under torchrun, where rank 1 has no API key. Arguments: the doctor's."""

import os
import sys

from flyteplugins_tracking._commands.doctor import main

if os.environ["RANK"] == "1":
    del os.environ["WANDB_API_KEY"]
sys.exit(main(sys.argv[1:]))
