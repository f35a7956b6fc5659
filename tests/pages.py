"""A browser and promtool for tests: real ones, or a reason to skip; where CI=true their absence is a failure."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def program(name: str) -> str:
    """The path of a program that `make tools` installs."""
    found = shutil.which(name)
    if found is None:
        why = f"{name} is not installed; `make tools` does that on Debian and Ubuntu"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(why)
        pytest.skip(why)
    return found


class Browser:
    """Headless Chromium; what it says on its console is kept."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file as a window of that size shows it."""
        mode = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": mode})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(path.as_uri())

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.driver.execute_script(f"return {script}")

    def console(self) -> list[str]:
        """What the console said since it was asked last; refusals by the policy of the page are said there."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]

    def shot(self, path: Path) -> bytes:
        """The page as PNG, the first 6000 pixels of it."""
        size = {"x": 0, "y": 0, "scale": 1, "width": self.ask("document.documentElement.clientWidth"),
                "height": min(6000, self.ask("document.documentElement.scrollHeight"))}  # fmt: skip
        asked = {"format": "png", "captureBeyondViewport": True, "clip": size}
        png = base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])
        path.write_bytes(png)
        return png

    def hover(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, which asks nobody for anything."""
    chromium, chromedriver = program("chromium"), program("chromedriver")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = chromium
    for flag in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "disable-dev-shm-usage", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync", "no-proxy-server",
        "host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE localhost", "hide-scrollbars", f"user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
