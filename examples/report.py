"""Show runs read back from W&B's files: a table in the terminal, and the loss curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wandb_files import StoredRun


def in_rank_order(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Sort runs that are in the order of their start: groups and single runs keep it, a group's runs go by rank."""
    order = list(dict.fromkeys(run.group or run.id for run in runs))
    return sorted(runs, key=lambda run: (order.index(run.group or run.id), _ranks(run)))


def print_table(runs: Sequence[StoredRun]) -> None:
    """One line per run: id, state, the ranks that wrote rows, rows, last loss."""
    lines = [("run", "state", "ranks", "rows", "last loss")] + [_line(run) for run in runs]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def plot(runs: Sequence[StoredRun], path: Path) -> Path:
    """Draw the loss of each run over its steps."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for run in runs:
        losses = [row["loss"] for row in run.rows if "loss" in row]
        axes.plot(losses, label=run.id, linewidth=2.2 if not run.group else 1.0, alpha=1.0 if not run.group else 0.6)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="Training loss, as stored by W&B")
    axes.legend(fontsize="small", title="run")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _line(run: StoredRun) -> tuple[str, str, str, str, str]:
    state = {None: "running", 0: "finished"}.get(run.exit_code, f"failed ({run.exit_code})")
    ranks = ",".join(map(str, _ranks(run)))
    losses = [row["loss"] for row in run.rows if "loss" in row]
    return run.id, state, ranks or "-", str(len(run.rows)), f"{losses[-1]:.4f}" if losses else "-"


def _ranks(run: StoredRun) -> list[int]:
    return sorted({row["rank"] for row in run.rows if "rank" in row})
