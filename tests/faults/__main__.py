"""`make reliability`: run the matrix, and write it into the page given as the argument, between the two markers."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from support.harness import Outcome

from faults.matrix import CASES, Case

BEGIN, END = "<!-- the matrix begins -->", "<!-- the matrix ends -->"
HEADER = """\
| fault | rows logged | at the server | in the local file | exit codes | state | job's end after | slowest `log` |
|---|---:|---:|---:|---|---|---:|---:|
"""


def main(page: Path) -> int:
    lines, failed = [], 0
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            found = case.run(Path(directory))
        failed += bool(case.wrong(found))
        lines.append(line(case, found))
        print(lines[-1], flush=True)
    joined = "".join(f"{one}\n" for one in lines)
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{HEADER}{joined}{END}{after}")
    print(f"{len(CASES)} faults, {failed} of them not as they must be, {time.strftime('%F')}")
    return int(failed > 0)


def line(case: Case, found: Outcome) -> str:
    cells = [
        f"**{case.fault}**: {'; '.join(case.wrong(found))}" if case.wrong(found) else case.fault,
        len(found.logged),
        len(found.logged & found.arrived),
        len(found.logged & found.local),
        ", ".join(map(str, found.exit_codes)) or "-",
        found.state or "no run",
        "-" if found.seconds is None else f"{found.seconds:.1f} s",
        f"{found.slowest_log_s * 1000:.0f} ms" if found.logged else "-",
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
