"""Writes what pages take from other files, so that a page has its text wherever it is read: `make includes`.

A code block that follows a comment `<!-- include: PATH -->` has the content of that file. Between the comments
`<!-- generated: NAME -->` and `<!-- end -->` stands what the function of that name in `GENERATED` makes. From
`TrackingConfig` it writes the signature and the docstring of `tracking_init` too.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DECORATOR = ROOT / "flyteplugins_tracking" / "decorator.py"
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
    "MLflow": "mlflow",
    "Trackio": "trackio",
    "Flyte 1": "flytekit",
    "Flyte 2": "flyte",
    "HF Transformers": "transformers",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
}


def main() -> None:
    """Write each page anew, and the arguments of `tracking_init`."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(with_files(page.read_text()))
    DECORATOR.write_text(with_arguments(DECORATOR.read_text()))


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


class Argument(NamedTuple):
    """An argument of `tracking_init`. Its type and default are code."""

    name: str
    type: str
    default: str
    text: str


def arguments() -> Iterator[Argument]:
    """Yield the arguments of `tracking_init`: the fields of `TrackingConfig` before `options`, with their texts."""
    code = (ROOT / "flyteplugins_tracking" / "trackers" / "config.py").read_text()
    (body,) = [
        one.body for one in ast.parse(code).body if isinstance(one, ast.ClassDef) and one.name == "TrackingConfig"
    ]
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text, ast.Expr), f"{field.target.id} of TrackingConfig has no text"
            if field.target.id == "options":
                return
            assert field.value is not None
            default, kind = (str(ast.get_source_segment(code, node)) for node in (field.value, field.annotation))
            kind = "str | Tracker" if field.target.id == "tracker" else kind
            yield Argument(field.target.id, kind, default, " ".join(ast.literal_eval(text.value).split()))


def with_arguments(code: str) -> str:
    """Return the code of the decorator's module with the present arguments in its signature and its docstring."""
    signature = "".join(f"    {name}: {kind} = {default},\n" for name, kind, default, _ in arguments())
    texts = [f"        {argument.name}: {argument.text}" for argument in arguments()]
    lines = [textwrap.fill(text, 120, subsequent_indent=" " * 12, break_on_hyphens=False) for text in texts]
    code = re.sub(
        r"(?<=\n    \*,\n).*?(?=    \*\*options: Any,\n)", lambda _: signature, code, count=1, flags=re.DOTALL
    )
    docstring = r"(?<=is used without arguments\.\n).*?(?=\n        \*\*options: )"
    return re.sub(docstring, lambda _: "\n".join(lines), code, count=1, flags=re.DOTALL)


def _arguments() -> str:
    """The table of the decorator's arguments."""
    rows = [f"| `{name}` | `{default}` | {text} |" for name, _, default, text in arguments()]
    return "\n".join(["| Argument | Default | What it is |", "|---|---|---|", *rows])


GENERATED: dict[str, Callable[[], str]] = {"ten_rows": _ten_rows, "versions": _versions, "arguments": _arguments}

if __name__ == "__main__":
    main()
