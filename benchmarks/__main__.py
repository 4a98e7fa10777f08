"""Measure all rows, or those that are named: `python benchmarks [ROW ...]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paired import ROWS

if __name__ == "__main__":
    here = Path(__file__).parent
    failed = [row for row in sys.argv[1:] or ROWS if subprocess.run([sys.executable, here / f"{row}.py"]).returncode]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
