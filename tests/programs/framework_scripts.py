"""A script that builds a framework's trainer, and knows nothing of runs. Argument: "trainer" or "lightning"."""

import sys


def main() -> None:
    if sys.argv[1] == "trainer":
        import hf_trainer

        hf_trainer.make_trainer(run_name="theirs").train()
    else:
        import lightning_ddp
        from lightning.pytorch.loggers import WandbLogger

        lightning_ddp.fit(WandbLogger(project="lightning", name="theirs", save_dir="elsewhere"))


if __name__ == "__main__":
    main()
