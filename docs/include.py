"""Copies files into the docs, so that a page has its text wherever it is read: `make includes`.

A code block that follows a comment `<!-- include: PATH -->` has the content of that file.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^( *)<!-- include: (\S+) -->\n\n?\1```(\w*)\n(?:.*?\n)??\1```$", re.DOTALL | re.MULTILINE)


def main() -> None:
    """Write each page anew."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(with_files(page.read_text()))


def with_files(text: str) -> str:
    """Return a page with the present content of the files that it includes."""
    return _BLOCK.sub(_filled, text)


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


if __name__ == "__main__":
    main()
