"""Writes what pages take from other files, so that a page has its text wherever it is read: `make includes`.

A code block that follows a comment `<!-- include: PATH -->` has the content of that file. Between the comments
`<!-- generated: NAME -->` and `<!-- end -->` stands what the function of that name in `GENERATED` makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^( *)<!-- include: (\S+) -->\n\n?\1```(\w*)\n(?:.*?\n)??\1```$", re.DOTALL | re.MULTILINE)
_GENERATED = re.compile(r"^<!-- generated: (\w+) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)

# The goals of docs/performance.md that a reader of one table should see, by how their rows begin.
_TEN_ROWS = (
    "a rank that logs nothing, a plain function, torch imported, over undecorated",
    "`from flyteplugins_tracking import tracking_init, get_run`, torch imported",
    "the primary's start, one process",
    "`log` every 10 ms, against wandb.Run.log",
    "`log` as fast as it goes, against wandb.Run.log",
    "a training step that logs 5 keys, ours, auto",
    "8 ranks, shared: memory of the helpers",
    "8 ranks, shared: rows a second",
    "the end of a training after 10,000 rows",
    "SIGTERM to the end of the process",
)
# The packages of the table of versions: how a reader knows them, and their name in pyproject.toml.
_TESTED = {
    "torch": "torch",
    "W&B": "wandb",
    "Pluto": "pluto-ml",
    "MLflow": "mlflow-skinny",
    "Trackio": "trackio",
    "Flyte 1": "flytekit",
    "Flyte 2": "flyte",
    "HF Transformers": "transformers",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
}


def main() -> None:
    """Write each page anew."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(with_files(page.read_text()))


def with_files(text: str) -> str:
    """Return a page with the present content of the files that it takes something from."""
    return _GENERATED.sub(_made, _BLOCK.sub(_filled, text))


def _filled(block: re.Match[str]) -> str:
    indent, path, language = block.groups()
    lines = [
        f"<!-- include: {path} -->",
        "",
        f"```{language}",
        *(ROOT / path).read_text().rstrip("\n").split("\n"),
        "```",
    ]
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def _made(block: re.Match[str]) -> str:
    name = block[1]
    return f"<!-- generated: {name} -->\n{GENERATED[name]()}\n<!-- end -->"


def _ten_rows() -> str:
    """The rows of the table of goals that a reader of one table should see."""
    text = (ROOT / "docs" / "performance.md").read_text()
    goals = text.partition("<!-- goals begin -->\n")[2].partition("\n<!-- goals end -->")[0].splitlines()
    rows = [next(goal for goal in goals if goal.startswith(f"| {row}")) for row in _TEN_ROWS]
    return "\n".join([*goals[:2], *rows])


def _versions() -> str:
    """The versions that pyproject.toml allows and constraints.txt has."""
    project = (ROOT / "pyproject.toml").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    minors = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    rows = [f"| Python | {minors[0]} to {minors[-1]} | 3.11 |"]
    for title, name in _TESTED.items():
        (allowed,) = {*re.findall(rf'"{name}([<>=][^"]*)"', project)}
        (tested,) = re.findall(rf"^{name}==([\w.]+)", constraints, re.MULTILINE)
        rows.append(f"| {title} (`{name}`) | `{allowed}` | {tested} |")
    return "\n".join(["| | allowed | tested |", "|---|---|---|", *rows])


GENERATED: dict[str, Callable[[], str]] = {"ten_rows": _ten_rows, "versions": _versions}

if __name__ == "__main__":
    main()
