"""Every code block of the README and of the docs is run, or checked as what it is; drawings and messages are true.

A block is one of these, and there is no other kind:

- it includes a file of `examples/`, which a test of its own runs;
- Python, with the name of its file in the first line: it is run, in one process with those of all pages;
- commands: their programs, options, files, modules, extras and targets are there;
- text: what a Python block or an included program prints, or a message of the library;
- a diff: Python on both sides;
- TOML and YAML: it can be parsed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import include
import pytest
import yaml
from support import jobs, vendors
from wandb_files import read_runs

import flyteplugins_tracking.testing
import flyteplugins_tracking.trackers
from flyteplugins_tracking import (
    DistributedInfo,
    TrackingError,
    plan,
    tracking_init,
)
from flyteplugins_tracking._commands import doctor, run, send
from flyteplugins_tracking._job.identity import from_launcher
from flyteplugins_tracking._rank import launchers, topology
from flyteplugins_tracking.trackers.config import OWN_ARGUMENTS, TrackingConfig

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
README = (ROOT / "README.md").read_text()
REPOSITORY = re.findall(r'^Repository = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
RUNNER = jobs.PROGRAMS / "docs_blocks.py"
# How many runs a block makes, where that is any.
RUNS = {
    "README/train.py": 1,
    "docs/guides/restarts/restarts.py": 1,
    "docs/guides/ranks/gather.py": 1,
}
# What commands may start.
PROGRAMS = re.compile(
    "accelerate|cd|export|git|make|flyteplugins-tracking|mpirun|pgrep|pip|py-spy|python|sbatch|srun|torchrun|unset|wandb"
)

OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
# What raises the errors of the page of failures.
RAISING = {
    "RANK=1 is a node, not a process": lambda: topology.detect(
        {"RANK": "1", "WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "8"}
    ),
    "RANK=0 is set and WORLD_SIZE is not": lambda: topology.detect({"RANK": "0"}),
    "RANK=0 and WORLD_SIZE=4 contradict openmpi": lambda: topology.detect(
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", **OMPI}
    ),
    "rank_scope='worker', but openmpi does not set": lambda: plan(topology.detect(OMPI), "auto", "worker", None),
    "primary_rank=8 is not in this job": lambda: plan(topology.detect(OMPI), "auto", "global", None, primary_rank=8),
    "no run id that all 2 nodes agree on": lambda: from_launcher(
        DistributedInfo(rank=0, world_size=2, num_workers=2, launcher="env"), {}, agreement=True
    ),
    "has no argument 'projct'; did you mean 'project'?": lambda: tracking_init(projct="llm"),
}
# Codes of MLflow's errors, of CPython's bytecode and of sysconf: they look like variables.
NO_VARIABLES = {
    *(
        "ALREADY_EXISTS",
        "BAD_REQUEST",
        "ENDPOINT_NOT_FOUND",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "MALFORMED_REQUEST",
        "NOT_FOUND",
        "PERMISSION_DENIED",
    ),
    *("RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"),
    *("LOAD_ATTR", "LOAD_METHOD", "PUSH_NULL", "SC_CLK_TCK", "SC_PAGE_SIZE"),
}


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: The page's path, without its ending.
        language: What stands behind the fence.
        code: What it says, as the page is written.
        included: The file that it is a copy of, if it is one.
    """

    page: str
    language: str
    code: str
    included: str = ""

    @property
    def file(self) -> str:
        """Where it is run, below a directory for all pages; empty where it is not."""
        is_program = self.language == "python" and not self.included
        name = re.match(r"# (\w+\.py)\n", self.code) if is_program else None
        return f"{self.page}/{name[1]}" if name else ""


def blocks_of(page: str, text: str) -> Iterator[Block]:
    block = r"(?:^ *<!-- include: (\S+) -->\n\n)?^( *)```(\w*)\n(.*?)\n\2```$"
    for included, _, language, code in re.findall(block, text, re.DOTALL | re.MULTILINE):
        yield Block(page, language, textwrap.dedent(code), included)


PAGES = {str(path.relative_to(ROOT).with_suffix("")): path.read_text() for path in (ROOT / "README.md", *DOCS)}
BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(page, text)]
PYTHON = {block.file: block for block in BLOCKS if block.file}
INCLUDED = sorted({block.included for block in BLOCKS if block.included})


def commands() -> Iterator[tuple[str, str]]:
    """Each command with its page: all in blocks, and the library's own commands in the text too."""
    for block in BLOCKS:
        if block.language in ("bash", "console") and not block.included:
            lines = block.code.replace("\\\n", " ").split("\n")
            yield from ((block.page, command) for line in lines if (command := without_extras(line)))
    for page, text in PAGES.items():
        yield from ((page, command) for command in re.findall(r"`((?:make|pip install|python -m) [^`]+)`", text))


def without_extras(line: str) -> str:
    """The command of a line, without its comment and the variables that are set for it alone."""
    return re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line.partition("  #")[0].strip())


COMMANDS = sorted(set(commands()))


def test_every_block_is_of_a_kind_that_is_tested():
    kinds = {"bash", "console", "diff", "text", "toml", "yaml"}
    assert [block for block in BLOCKS if not (block.included or block.file or block.language in kinds)] == []
    assert len(PYTHON) == len([block for block in BLOCKS if block.file]), "two blocks of a page have one name"
    written = sum(text.count("```") for text in PAGES.values())
    assert written == 2 * len(BLOCKS), "a fence is not closed, or not understood here"


# Tables to look something up, most of them made from the code.
NOT_READ = {"docs/about/matrix"}


def test_a_reader_can_finish_the_docs():
    """README and docs are 18 pages with 22,000 words; the README has 90 lines, and an included program 40."""
    words = {page: len(text.split()) for page, text in PAGES.items() if page not in NOT_READ}
    assert len(words) <= 18
    assert sum(words.values()) <= 22_000, words
    assert len(README.splitlines()) <= 90
    assert len((ROOT / "DESIGN.md").read_text().split()) <= 1200
    long = [path for path in INCLUDED if path.endswith(".py") and len((ROOT / path).read_text().splitlines()) > 40]
    assert long == []


def test_a_page_reads_the_same_on_github_and_in_the_site():
    """No syntax that only the site's builder knows: references, tabs, admonitions. Markdown within HTML is marked."""
    signs = re.compile(r"^(:::|===|!!!|\?\?\?)|\{:|\{ ?\w+=|<details>", re.MULTILINE)
    texts = {page: re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL) for page, text in PAGES.items()}
    assert {page: found for page, text in texts.items() if (found := signs.findall(text))} == {}
    known = {"NOTE", "TIP", "IMPORTANT", "WARNING", "CAUTION"}
    assert {kind for text in PAGES.values() for kind in re.findall(r"^> \[!(\w+)\]$", text, re.MULTILINE)} <= known


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Any]]:
    """The directory of all Python blocks that were run, and what the runner says of each."""
    directory = tmp_path_factory.mktemp("blocks")
    for file, block in PYTHON.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text(block.code + "\n")
    results, files = directory / "results.json", [directory / file for file in PYTHON]
    done = jobs.python(directory, RUNNER, results, *files, env={"TRACKIO_DIR": str(directory / "trackio")})
    assert done.returncode == 0, done.output
    return directory, json.loads(results.read_text())


def test_python_blocks_run(ran, subtests):
    directory, results = ran
    for file in PYTHON:
        with subtests.test(file):
            result = results[str(directory / file)]
            assert result["error"] is None, result["output"]
            runs = [run for stored in result["runs"] for run in read_runs(Path(stored))]
            assert [run.exit_code for run in runs] == [0] * RUNS.get(file, 0)
    with closing(sqlite3.connect(directory / "trackio" / "llm.db")) as database:
        assert database.execute("SELECT COUNT(*) FROM metrics").fetchone() == (10,)


def test_text_is_what_the_blocks_print_or_a_message_of_the_library(ran):
    directory, results = ran
    printed = "".join(results[str(directory / file)]["output"] for file in PYTHON)
    printed += "last loss: 0.1\n"  # of the examples of Flyte: test_examples.py
    lines = [line for block in BLOCKS if block.language == "text" for line in block.code.splitlines()]
    assert lines
    assert [line for line in lines if line not in printed and not is_a_message(line)] == []


@functools.cache
def templates_of_messages() -> list[str]:
    """Each string of the package, with NUL for what is put in."""
    found = []
    for path in jobs.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdrg]|%\.\df", "\0", node.value))
    return [text for text in found if len(text.replace("\0", "")) > 8]


def is_a_message(quote: str) -> bool:
    """Whether a string of the package has all parts of the quote, which has `...` between them; or is filled in so."""
    parts = re.compile(".*".join(map(re.escape, quote.split("..."))), re.DOTALL)
    messages = templates_of_messages()
    filled = (re.compile(".+".join(map(re.escape, text.split("\0")))) for text in messages if "\0" in text)
    without_tracker = re.sub(r"^\w+: ", "", quote)  # which the log puts in front of some messages
    return any(parts.search(text) for text in messages) or any(
        pattern.fullmatch(quote) or pattern.match(without_tracker) for pattern in filled
    )


# What the pages quote of W&B, torch, gloo and NCCL.
OF_OTHERS = {
    "You must call wandb.init() before wandb.log()",
    "The hostname of the client socket cannot be retrieved",
    "Gloo connectFullMesh failed",
    "Connection closed by peer",
}


def quotes() -> Iterator[str]:
    """What the sentences of the pages for users quote: three words or more."""
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`]*`|<[^>]+>", "", PAGES[page], flags=re.DOTALL)
        found = (quote.replace("\n", " ") for quote in re.findall(r'"([^"]+)"', text))
        yield from (quote for quote in found if len(quote.split()) > 2)


def test_what_the_pages_quote_are_messages_of_the_library():
    assert [quote for quote in sorted({*quotes()} - OF_OTHERS) if not is_a_message(quote)] == []


@pytest.mark.full
def test_the_first_command_of_the_readme_trains_on_two_ranks(tmp_path):
    (tmp_path / "train.py").write_text(PYTHON["README/train.py"].code)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = jobs.run(["torchrun", "--standalone", "--nproc-per-node=2", "train.py"], tmp_path, {"PATH": path})
    assert ("README", "torchrun --standalone --nproc-per-node=2 train.py") in COMMANDS
    assert [(run.exit_code, len(run.rows)) for run in done.runs] == [(0, 10)], done.output


def test_the_readmes_figures_are_those_of_the_pages_that_measure():
    section = README.partition("| Measured | With |\n")[2].partition("\n\n")[0]
    rows = section.splitlines()[1:]
    assert [re.findall("`make (.+)`", row) for row in rows] == [["soak"], ["reliability"], ["bench"]]
    measured = "".join(PAGES[f"docs/about/{page}"] for page in ("guarantees", "matrix", "how-it-works"))
    figures = {figure for row in rows for figure in re.findall(r"\d[\d,.]*\d", row)}
    assert len(figures) > 5
    assert [figure for figure in figures if not re.search(rf"(?<![\d,.]){figure}(?![\d,.]*\d)", measured)] == []


def test_links_lead_to_headings_wherever_the_repository_lies():
    """They are relative. For the package index, the build makes those of the README absolute."""
    for page in (*ROOT.glob("*.md"), *DOCS):
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\((\S+?)\)", text):
            if not link.startswith("https://"):
                name, _, anchor = link.partition("#")
                target = page.parent / name if name else page
                assert target.is_file(), (page, link)
                assert anchor in anchors_of(target), (page, link)
        assert page.parent != ROOT or REPOSITORY not in text, page


def anchors_of(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE) if page.suffix == ".md" else []
    return {"", *(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)}


def test_included_files_are_run_by_a_test():
    tests = [
        Path(__file__).with_name("test_examples.py"),
        Path(__file__).with_name("test_frameworks.py"),
        *jobs.PROGRAMS.glob("*.py"),
        *ROOT.glob("tests/engines/test_*.py"),
    ]
    text = "\n".join(test.read_text() for test in tests)
    for path in INCLUDED:
        assert (ROOT / path).is_file()
        named = re.compile(rf'"{re.escape(Path(path).name)}"|^ *(?:from|import) {Path(path).stem}\b', re.MULTILINE)
        assert named.search(text), path


def test_the_tests_of_the_table_of_versions_are_there():
    """A version of which one cannot be found would have none that runs."""
    named = sorted({name for names in vendors.TESTS.values() for name in names})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *named]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout + found.stderr


def test_commands_name_what_is_there(subtests):
    for page, command in COMMANDS:
        with subtests.test(command, page=page):
            check_command(command)


def check_command(command: str) -> None:
    words = shlex.split(command)
    files = {Path(word).name for word in words if word.endswith((".py", ".sbatch", ".yaml"))}
    assert PROGRAMS.fullmatch(words[0])
    assert files <= {Path(block.included or block.file).name for block in BLOCKS}
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        variables = [word.partition("=")[0] for word in words[1:] if "=" in word]
        assert all(f"$({name})" in makefile for name in variables)
        assert {word for word in words[1:] if "=" not in word} <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    for name, extras in re.findall(r"(flyteplugins-tracking)\[([\w,]+)\]", command):
        assert set(extras.split(",")) <= extras_of(name)
    for module in re.findall(r"-m (flyteplugins_tracking[\w.]*)", command):
        assert any(importlib.util.find_spec(name) for name in (module, f"{module}.__main__") if "." in name)
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args(words[1:])  # exits where there is no such option


def extras_of(project: str) -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'name = "{project}"' in text
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE))


def test_the_extras_are_those_that_a_reader_is_told():
    """What developers need is in groups, which are not in the package's metadata."""
    (table,) = re.findall(r"\| You use \| Extra \|\n(.*?)\n\n", PAGES["docs/index"], re.DOTALL)
    told = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.rpartition(" | ")[2])}
    assert extras_of("flyteplugins-tracking") == told


def test_copies_and_generated_parts_are_those_of_the_files():
    pages = [ROOT / "README.md", *DOCS]
    assert [path for path in pages if include.with_files(path.read_text()) != path.read_text()] == [], "make includes"
    assert include.LLMS.read_text() == include.llms(), "make includes"


def test_the_signature_and_the_docstring_have_the_arguments_of_the_config():
    code = include.DECORATOR.read_text()
    assert include.with_arguments(code) == code, "make includes"
    names = [argument.name for argument in include.arguments()]
    assert [*names, "options", "given"] == list(TrackingConfig._fields)
    assert len(names) <= 24
    signature = next(one for one in ast.parse(code).body if isinstance(one, ast.FunctionDef) and one.args.kwonlyargs)
    assert [argument.arg for argument in signature.args.kwonlyargs] == names
    described = re.findall(r"^    (\w+): ", inspect.getdoc(tracking_init).partition("Raises:")[0], re.MULTILINE)
    assert described == ["function", *names]


def test_blocks_that_are_not_run_can_be_read():
    """Both sides of a diff are Python. The entry point is that of the example."""
    for block in BLOCKS:
        for side in "-+" if block.language == "diff" else "":
            ast.parse("\n".join(line[1:] for line in block.code.splitlines() if line[0] in (" ", side)))
        if block.language == "yaml" and not block.included:
            assert yaml.safe_load(block.code)
        if block.language == "toml":
            assert block.code in (ROOT / "examples" / "jsonl_tracker" / "pyproject.toml").read_text()


def test_the_drawings_are_those_of_the_plans():
    folder = ROOT / "docs" / "modes"
    drawings = runpy.run_path(str(folder / "draw.py"))["drawings"]()
    assert {path.name: path.read_text() for path in folder.glob("*.svg")} == drawings, "make drawings"
    assert [name for name in drawings if f"modes/{name})" not in "".join(PAGES.values())] == []


def test_the_page_of_launchers_has_each_detector_in_its_order_and_the_table_each_variable():
    rows = re.findall(r"^\| `(\w+)` \| (?!Started)", PAGES["docs/reference/launchers"], re.MULTILINE)
    assert rows == [*launchers.LAUNCHERS]
    told = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", PAGES["docs/about/matrix"]))
    assert jobs.variables_of_launchers() - told == set()


def test_the_page_of_variables_has_each_that_the_package_names_and_no_other():
    names = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9]|RANK|NETRC|PYTHONPATH|PYTHONSAFEPATH")
    trees = [ast.parse(path.read_text()) for path in jobs.PACKAGE.rglob("*.py")]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    named = {text for text in texts if isinstance(text, str) and names.fullmatch(text)} - NO_VARIABLES
    variables = PAGES["docs/about/matrix"].partition("## Variables of the launchers")[2]
    told = re.findall(rf"`({names.pattern})`", PAGES["docs/reference/commands"] + variables)
    assert set(told) == named


def test_the_page_of_the_command_line_has_every_option(capsys, monkeypatch):
    """The options of `run` are the arguments of `tracking_init`, which have a page: this one has those that it adds."""
    page, shown = PAGES["docs/reference/commands"], dict[str, str]()
    for main, arguments in (
        (send.main, ["--help"]),
        (doctor.main, []),
        (run.main, ["--help"]),
    ):
        monkeypatch.setattr(sys, "argv", ["flyteplugins-tracking", "--help"])
        with suppress(SystemExit):
            main(arguments) if arguments else main()
        shown[main.__module__] = capsys.readouterr().out
    options = {module: {*re.findall(r"(--[a-z-]+)", text)} - {"--help"} for module, text in shown.items()}
    of_run = options.pop(run.__name__)
    listed = {*re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)}
    assert set().union(*options.values()) <= listed <= set().union(of_run, *options.values())
    assert {f"--{name.replace('_', '-')}" for name in OWN_ARGUMENTS - {"secret", "download_logs"}} <= of_run
    assert of_run - {f"--{name.replace('_', '-')}" for name in OWN_ARGUMENTS} == {
        "--option",
        "--nproc-per-node",
        "--lr",
    }


def test_where_things_are_names_files_and_what_they_define():
    """A line of a flow is a file of the package, and the functions, classes and tables of it that are crossed."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\d+\. `([\w/]+\.py)`: (.*(?:\n   .*)*)", section, re.MULTILINE)
    assert len(lines) == len(re.findall(r"^\d+\. ", section, re.MULTILINE))
    assert len(lines) > 20
    for path, text in lines:
        code = (jobs.PACKAGE / path).read_text()
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", text):
            assert re.search(rf"^ *(def|class) {name}\b|^{name}\b.*=", code, re.MULTILINE), (path, name)


def test_the_reference_has_every_public_name():
    pages = {
        ("docs/reference/api", "api"): flyteplugins_tracking,
        ("docs/guides/test", "api_testing"): flyteplugins_tracking.testing,
        ("docs/about/matrix", "api_trackers"): flyteplugins_tracking.trackers,
    }
    for (page, part), module in pages.items():
        section = PAGES[page].partition(f"<!-- generated: {part} -->")[2].partition("<!-- end -->")[0]
        assert set(module.__all__) <= {*re.findall(r"^(?:### |- )`(\w+)`", section, re.MULTILINE)}, page
        assert {*re.findall(r"^### `(\w+)`$", section, re.MULTILINE)} <= {*module.__all__}, page


@pytest.mark.parametrize("message", RAISING)
def test_the_errors_of_the_page_are_those_that_are_raised(message):
    with pytest.raises(TrackingError, match=re.escape(message)) as raised:
        RAISING[message]()
    rows = re.findall(r"^### `(\w+Error): (?:\.\.\. )?(.+?)`$", PAGES["docs/guides/failed"], re.MULTILINE)
    assert {text: name for name, text in rows}[message] == type(raised.value).__name__
    assert len(rows) == len(RAISING)
