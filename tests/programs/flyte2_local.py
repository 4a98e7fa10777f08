"""`flyte.run` in local mode: `flyte2_local.py ARGUMENTS`, a JSON object as `flyte2_pods.local` makes it."""

import importlib
import json
import sys
from pathlib import Path


def main(module: str, task: str, name: str, directory: str, context: dict[str, str]) -> None:
    import flyte

    sys.path.insert(0, ".")
    flyte.init()
    runner = flyte.with_runcontext(
        mode="local", name=name, custom_context=context, raw_data_path=str(Path(directory, "raw"))
    )
    runner._metadata_path = str(Path(directory, "metadata"))  # elsewhere it is shared by all runs of a name
    run = runner.run(getattr(importlib.import_module(module), task), n=1)
    Path(directory, "outputs.json").write_text(json.dumps(list(run.outputs()), default=str))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
