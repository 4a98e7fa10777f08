"""A job of parity: `python -m parity TRACKER HOW KIND [NAME]`. HOW is "bare" or "decorated".

It runs the programs of a kind one after another, and writes what each has returned or raised to `NAME.json` in its
working directory. With a NAME it runs this one, and ends as it does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from parity.openings import BARE, decorated
from parity.table import Program, table_of


def main(tracker: str, how: str, kind: str, name: str = "") -> None:
    table = table_of(tracker)
    opening = BARE[tracker] if how == "bare" else decorated(tracker)
    if name:
        opening(table.programs[name], table.programs[name].body, ends_itself=True)
        return
    for program in table.of(kind):
        answers: list[Any] = []
        try:
            opening(program, lambda run, program=program, answers=answers: answers.append(_answer(program, run)))
        except Exception as error:
            answers.append({"not opened": type(error).__name__})
        Path(f"{program.name}{os.environ.get('RANK', '')}.json").write_text(json.dumps(answers, default=str))


def _answer(program: Program, run: Any) -> Any:
    """What the body returns, or what it raises: the run goes on, since this is not about its end."""
    try:
        return {"returned": program.body(run)}
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
