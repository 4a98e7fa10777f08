"""Pictures of web pages, by a headless Chromium, as small PNG files."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from playwright.sync_api import Page, sync_playwright

Scheme = Literal["light", "dark"]
# The colours of a picture: enough for text and lines, at a third of the size.
_COLOURS = 128


def picture(
    address: str, path: Path, size: tuple[int, int], scheme: Scheme, prepare: Callable[[Page], Any], scale: float = 2
) -> None:
    """Write a picture of a page.

    Args:
        address: The page's address.
        path: The PNG file.
        size: The width and the height of the window, in CSS pixels.
        scheme: Whether the reader's system is light or dark.
        prepare: Waits until the page shows what it should; returns an element to show alone, or None.
        scale: How many pixels of the picture are one CSS pixel.
    """
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, device_scale_factor=scale
        )
        page = context.new_page()
        page.goto(address)
        element = prepare(page)
        data = (element or page).screenshot(animations="disabled")
        browser.close()
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
