"""Pictures of every page, light and dark, desktop and phone, into docs/images.

    python tests/browser/screenshots.py [FOLDER-WITH-A-DEMO] [PAGE ...]

The folder is what the dashboard is served from; `make demo` in it gives the pages something to
show. Needs Chromium (Debian: apt-get install chromium), and Pillow to make the files small.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness import DESKTOP, PHONE, ROOT, opened_browser, served, settle
from PIL import Image
from playwright.sync_api import Browser

PAGES = {
    "what-if": "",
    "plan": "plan?max_requests=300&policies=plain,chain-3,tree-8x4x2,async-tree-8x4x2",
    "timeline": "timeline?round=9",
    "validate": "validate",
    "profiles": "profiles",
}
IMAGES = ROOT / "docs" / "images"
COLOURS = 256  # of the palette


def picture(browser: Browser, url: str, name: str, *, scheme: str, is_phone: bool = False) -> Path:
    """Save one page as a whole."""
    size = PHONE if is_phone else DESKTOP
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.goto(url)
    settle(page)
    if name == "plan" and not page.get_by_role("button", name="Download plan").count():
        page.get_by_role("button", name="Search").click()
        page.get_by_role("button", name="Download plan").wait_for(timeout=120_000)
        settle(page)
    main = page.locator("[data-testid=stMain]")
    height = int(main.evaluate("e => Math.max(...[...e.children].map(c => c.scrollHeight))"))
    page.set_viewport_size({"width": size["width"], "height": min(height + 80, 4000)})
    settle(page)
    page.wait_for_timeout(800)
    path = IMAGES / f"dashboard-{name}-{'phone' if is_phone else scheme}.png"
    page.screenshot(path=path)
    page.close()
    image = Image.open(path).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def main(folder: Path, names: list[str]) -> None:
    """Save all pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with served(folder) as address, opened_browser() as browser:
        for name in names or PAGES:
            url = f"{address}/{PAGES[name]}"
            for scheme, is_phone in (("light", False), ("dark", False), ("light", True)):
                path = picture(browser, url, name, scheme=scheme, is_phone=is_phone)
                sys.stderr.write(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} KiB\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), sys.argv[2:])
