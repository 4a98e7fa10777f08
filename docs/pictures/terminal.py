"""Runs a program in a terminal, and draws what it shows as an SVG: text stays text, lines and charts are shapes.

A font need not have the characters of charts and frames, nor have them as wide as the others: they are drawn.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte

# A character, in units of the drawing, and the margin around all of them.
WIDTH, HEIGHT, MARGIN = 8, 17, 12
# How long each screen of a recording stays; the last one stays twice as long.
SCREEN_S = 4
# The answer to a program that asks for the colour of the background: it chooses its own by it.
_ASKED = b"\x1b]11;?"
# Where a line of a frame goes from the middle of its character: left, right, up, down.
_DIRECTIONS = ("lr", "ud", "rd", "ld", "ru", "lu", "rd", "ld", "ru", "lu", "udr", "udl", "lrd", "lru", "lrud", "lr")
_LINES = dict(zip("─│┌┐└┘╭╮╰╯├┤┬┴┼—", _DIRECTIONS, strict=True))
_BRAILLE = 0x2800


@dataclass(frozen=True)
class Theme:
    """The colours of a terminal.

    Attributes:
        name: "light" or "dark".
        paper: The background.
        ink: The text.
        answer: What the terminal answers to a program that asks for its background.
        named: The colours that have names, in the order of `_NAMES`.
    """

    name: str
    paper: str
    ink: str
    answer: bytes
    named: tuple[str, ...]


# As pyte calls the first eight colours of a terminal.
_NAMES = ("black", "red", "green", "brown", "blue", "magenta", "cyan", "white")
LIGHT = Theme(
    "light",
    "#ffffff",
    "#1f2430",
    b"\x1b]11;rgb:ffff/ffff/ffff\x1b\\",
    ("#1f2430", "#b3261e", "#1b6e3c", "#8a5a00", "#2d4fb8", "#8e24aa", "#00696f", "#667085"),
)
DARK = Theme(
    "dark",
    "#14181f",
    "#dfe3ea",
    b"\x1b]11;rgb:1414/1818/1f1f\x1b\\",
    ("#4a5263", "#ff8a80", "#7ddc9b", "#ffd180", "#8c9eff", "#ea80fc", "#80deea", "#dfe3ea"),
)


def record(
    command: Sequence[str | Path],
    directory: Path,
    env: Mapping[str, str],
    size: tuple[int, int],
    theme: Theme,
    is_done: Callable[[str], bool],
    keys: str = "",
    timeout_s: float = 90,
) -> pyte.Screen:
    """Run a command in a terminal of this many columns and rows until `is_done` of its text, and return the screen."""
    columns, rows = size
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=directory,
        env={**env, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    screen = pyte.Screen(columns, rows)
    try:
        _read(ours, pyte.ByteStream(screen), screen, theme, is_done, keys, time.monotonic() + timeout_s)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
        os.close(ours)
    return screen


def _read(
    ours: int,
    stream: pyte.ByteStream,
    screen: pyte.Screen,
    theme: Theme,
    is_done: Callable[[str], bool],
    keys: str,
    deadline: float,
) -> None:
    quiet = 0
    while quiet < 8:  # what is drawn last comes 0.2 s after the last change, for long enough
        text = "\n".join(screen.display)
        if time.monotonic() > deadline:
            raise SystemExit(f"the terminal does not show what was expected, but:\n{text}")
        if not select.select([ours], [], [], 0.2)[0]:
            quiet = quiet + 1 if is_done(text) else 0
            if quiet == 4 and keys:
                os.write(ours, keys.encode())
                keys, quiet = "", 0
            continue
        try:
            data = os.read(ours, 65536)
        except OSError:  # the program has ended
            if not is_done(text):
                raise SystemExit(f"the program has ended, and has shown:\n{text}") from None
            return
        if _ASKED in data:
            os.write(ours, theme.answer)
        stream.feed(data)


def svg(title: str, screens: Mapping[str, tuple[pyte.Screen, Theme]], begin: str = "", prompt: str = "") -> str:
    """Return one drawing of the screens: that of the light or the dark theme, as the reader's system is.

    Args:
        title: What it shows, for who does not see it.
        screens: Each theme's screen.
        begin: How the first line begins that is shown.
        prompt: How a line with a command begins. The drawing is then a recording: the commands appear one by one.
    """
    screen, _ = next(iter(screens.values()))
    first = min(_rows_with_text(screen, begin)[0] for screen, _ in screens.values())
    rows = max(_rows_with_text(screen)[-1] for screen, _ in screens.values()) + 1 - first
    commands = _rows_with_text(screen, prompt)[1:] if prompt else []
    width, height = screen.columns * WIDTH + 2 * MARGIN, rows * HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13">',
        f"<title>{escape(title)}</title>",
        "<style>.dark { display: none } @media (prefers-color-scheme: dark) { .dark { display: inline } "
        ".light { display: none } } text { white-space: pre } .b { font-weight: 600 }"
        f"{_appearing(len(commands))}</style>",
    ]
    for screen, theme in screens.values():
        parts.append(f'<g class="{theme.name}" fill="{theme.ink}">')
        parts.append(
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="{theme.paper}" '
            'stroke="#8a93a5" stroke-opacity=".6"/>'
        )
        parts.append(f'<g transform="translate({MARGIN} {MARGIN})">')
        for row in range(rows):
            if first + row in commands:
                parts.append(f'<g class="c{commands.index(first + row) + 1}">')
            cells = [screen.buffer[first + row][column] for column in range(screen.columns)]
            parts += _row(cells, row * HEIGHT, theme)
        parts.append("</g></g>" + "</g>" * len(commands))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _appearing(commands: int) -> str:
    """The style by which each command appears after the one before, for readers who have not asked for less motion."""
    rules = ""
    for number in range(1, commands + 1):
        share = f"{100 * number / (commands + 2):.1f}%"
        rules += f" @keyframes c{number} {{ from {{ visibility: hidden }} {share} {{ visibility: visible }} }}"
        rules += f" .c{number} {{ animation: c{number} {SCREEN_S * (commands + 2)}s step-end infinite }}"
    return f" @media (prefers-reduced-motion: no-preference) {{{rules} }}" if rules else ""


def _rows_with_text(screen: pyte.Screen, begin: str = "") -> list[int]:
    return [row for row, text in enumerate(screen.display) if text.strip() and text.startswith(begin)]


def _row(cells: Sequence[Any], y: int, theme: Theme) -> Iterator[str]:
    column = 0
    for (kind, ink, paper, is_bold), group in groupby(cells, key=lambda cell: _style(cell, theme)):
        text = "".join(cell.data for cell in group)
        x, width = column * WIDTH, len(text) * WIDTH
        column += len(text)
        if paper != theme.paper:
            place = f'x="{x}" y="{y}" width="{width}" height="{HEIGHT}"'
            yield f'<rect {place} fill="{paper}" shape-rendering="crispEdges"/>'
        if not text.strip():
            continue
        if kind == "shape":
            yield from _shapes(text, x, y, ink)
            continue
        left = len(text) - len(text.lstrip())
        words = text.strip()
        look = ("" if ink == theme.ink else f' fill="{ink}"') + (' class="b"' if is_bold else "")
        yield (
            f'<text x="{x + left * WIDTH}" y="{y + 13}" textLength="{len(words) * WIDTH}"{look}>{escape(words)}</text>'
        )


def _style(cell: Any, theme: Theme) -> tuple[str, str, str, bool]:
    ink, paper = _colour(cell.fg, theme.ink, theme), _colour(cell.bg, theme.paper, theme)
    if cell.reverse:
        ink, paper = paper, ink
    return "shape" if _is_shape(cell.data) else "text", ink, paper, cell.bold


def _colour(name: str, default: str, theme: Theme) -> str:
    if name == "default":
        return default
    plain = name.removeprefix("bright")
    if plain in _NAMES:
        return theme.named[_NAMES.index(plain)]
    return f"#{name}" if len(name) == 6 else default


def _is_shape(character: str) -> bool:
    return character in _LINES or _BRAILLE < ord(character) < _BRAILLE + 256


def _shapes(text: str, x: int, y: int, ink: str) -> Iterator[str]:
    lines, dots = [], []
    for number, character in enumerate(text):
        left = x + number * WIDTH
        if character in _LINES:
            lines += [_stroke(direction, left + WIDTH / 2, y + HEIGHT / 2) for direction in _LINES[character]]
        else:
            dots += _dots(ord(character) - _BRAILLE, left, y)
    if lines:
        yield f'<path d="{"".join(lines)}" stroke="{ink}" fill="none"/>'
    if dots:
        yield f'<path d="{"".join(dots)}" fill="{ink}"/>'


def _stroke(direction: str, x: float, y: float) -> str:
    ends = {"l": f"h-{WIDTH / 2:g}", "r": f"h{WIDTH / 2:g}", "u": f"v-{HEIGHT / 2:g}", "d": f"v{HEIGHT / 2:g}"}
    return f"M{x:g} {y:g}{ends[direction]}"


def _dots(pattern: int, x: int, y: int) -> Iterator[str]:
    """The dots of a Braille character, two in four rows: https://www.unicode.org/charts/PDF/U2800.pdf."""
    for bit, (column, row) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]):
        if pattern >> bit & 1:
            yield f"M{x + column * WIDTH / 2 + 1:g} {y + row * HEIGHT / 4 + 1:g}h2.6v2.6h-2.6z"
