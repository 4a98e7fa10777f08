"""Files that are written as a whole: a reader, and a kill, finds the old text or the new one."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the text of a file, or make the file. Threads and processes may do so at the same time.

    Raises:
        OSError: The file cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    unfinished.write_text(text)
    unfinished.replace(path)
