"""Writes what pages take from other files, so that a page has its text wherever it is read: `make includes`.

A code block that follows a comment `<!-- include: PATH -->` has the content of that file. Between the comments
`<!-- generated: NAME -->` and `<!-- end -->` stands what the function of that name in `GENERATED` makes. From
`TrackingConfig` it writes the signature and the docstring of `tracking_init` too.
"""

from __future__ import annotations

import ast
import csv
import itertools
import re
import runpy
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import api
import figures

from flyteplugins_tracking.trackers import vendor_parts
from flyteplugins_tracking.trackers.registry import find_tracker

ROOT = Path(__file__).parents[1]
LLMS = ROOT / "docs" / "llms.txt"
DECORATOR = ROOT / "flyteplugins_tracking" / "decorator.py"
_BLOCK = re.compile(r"^( *)<!-- include: (\S+) -->\n\n?\1```(\w*)\n(?:.*?\n)??\1```$", re.DOTALL | re.MULTILINE)
_GENERATED = re.compile(r"^<!-- generated: (\w+) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)

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
    """Write what is copied and made in each page, and the arguments of `tracking_init`."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        page.write_text(with_files(page.read_text()))
    DECORATOR.write_text(with_arguments(DECORATOR.read_text()))
    LLMS.write_text(llms())


def with_files(text: str) -> str:
    """Return a page with the present content of the files that it takes something from."""
    return _GENERATED.sub(_made, _BLOCK.sub(_filled, text))


def llms() -> str:
    """The site's list of pages for language models: each page with its headings."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    (name,), (told,) = (
        re.findall(rf"^{key}: (.+)$", navigation, re.MULTILINE) for key in ("site_name", "site_description")
    )
    lines = [f"# {name}", "", f"> {told}", ""]
    for title, page in re.findall(r"^ *- (.+): (.+\.md)$", navigation, re.MULTILINE):
        text = re.sub(r"```.*?```", "", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
        headings = "; ".join(re.findall(r"^## (.+)$", text, re.MULTILINE))
        lines.append(f"- [{title}]({page.removesuffix('.md')}.html): {headings}")
    return "\n".join([*lines, ""])


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


def _packages() -> Iterator[tuple[str, str, str, str]]:
    """Each package that the library is used with: how a reader knows it, its name, what is allowed, what is tested."""
    project = (ROOT / "pyproject.toml").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    minors = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    yield "Python", "", f"{minors[0]} to {minors[-1]}", "3.11"
    for title, name in _TESTED.items():
        (allowed,) = {*re.findall(rf'"{name}([<>=][^"]*)"', project)}
        (tested,) = re.findall(rf"^{name}==([\w.]+)", constraints, re.MULTILINE)
        yield title, name, f"`{allowed}`", tested


def _versions() -> str:
    """The versions that pyproject.toml allows and constraints.txt has."""
    rows = [(f"{title} (`{name}`)" if name else title, *versions) for title, name, *versions in _packages()]
    return _table(["", "allowed", "all tests run with"], rows)


def _clients() -> str:
    """What `make vendors` has found, and the versions with a known fault."""
    _, *outcomes = csv.reader((ROOT / "docs" / "versions.csv").read_text().splitlines())
    told = [(client, version, works if works.startswith("not") else lost) for client, version, works, lost in outcomes]
    # One row for neighbours with the same outcome.
    same = itertools.groupby(told, lambda one: (one[0], one[2]))
    clients = [(client, ", ".join(version for _, version, _ in group), lost) for (client, lost), group in same]
    faults = [
        (distribution, fault.first, fault.fixed, fault.text)
        for distribution, of_client in vendor_parts.FAULTS.items()
        for fault in of_client
    ]
    tables = (
        _table(["client", "versions", "what is lost"], clients),
        _table(["client", "from", "fixed in", "fault"], faults),
    )
    return "\n\n".join(tables)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" if row else f"|{'---|' * len(head)}" for row in (head, [], *rows))


# The page that explains an argument, from docs/reference. An argument that is not here has no link.
_PAGES = {
    ("Which ranks log", "../guides/ranks.md"): ("run_mode", "roles"),
    ("Restarts", "../guides/restarts.md"): ("run_file", "stop_before_s"),
    ("Offline", "../guides/offline.md"): ("if_unavailable",),
    ("How it works", "../about/how-it-works.md"): ("kill_after_s",),
    ("What failed", "../guides/failed.md"): ("hang_timeout_s", "pulse_s"),
}


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
    """The decorator's arguments, each below a heading of its own: so it can be linked, and read on a phone."""
    return "\n\n".join(f"### `{one.name}`\n\n{_told(one)}" for one in arguments())


def _told(one: Argument) -> str:
    """What the argument is, its default, and the page that explains it; if there is one."""
    linked = next((f" See [{title}]({page})." for (title, page), names in _PAGES.items() if one.name in names), "")
    return f"Default: `{one.default}`. {one.text}{linked}"


def _unsupported() -> str:
    """What each tracker lacks, and why."""
    trackers = [find_tracker(name) for name in ("wandb", "pluto", "mlflow", "trackio")]
    rows = [(one.title, feature, reason) for one in trackers for feature, reason in one.unsupported.items()]
    return _table(["tracker", "lacks", "because"], rows)


def _differences() -> str:
    """The differences from the vendors' own clients: the list that the programs of `tests/parity` refer to."""
    table: Callable[[], str] = runpy.run_path(str(ROOT / "tests" / "parity" / "differences.py"))["table"]
    return table()


# The rooms whose code names variables of launchers, and what only looks like a variable there.
_OF_LAUNCHERS = ("_rank", "_job", "_runs", "_flyte", "testing")
_NO_VARIABLES = {"ALREADY_EXISTS", "NOT_FOUND"}


def _variables() -> str:
    """The variables of launchers that the package reads, by their names."""
    package = ROOT / "flyteplugins_tracking"
    trees = [ast.parse(path.read_text()) for room in _OF_LAUNCHERS for path in sorted((package / room).rglob("*.py"))]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {str(text) for text in texts if re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9]|RANK", str(text))}
    own = {name for name in names if name.startswith("FLYTE_TRACKING_")}
    return textwrap.fill(", ".join(f"`{name}`" for name in sorted(names - own - _NO_VARIABLES)), 120)


GENERATED: dict[str, Callable[[], str]] = {
    "api": api.of_package,
    "api_testing": api.of_testing,
    "api_trackers": api.of_trackers,
    "arguments": _arguments,
    "clients": _clients,
    "differences": _differences,
    "performance": figures.table,
    "unsupported": _unsupported,
    "variables": _variables,
    "versions": _versions,
}

if __name__ == "__main__":
    main()
