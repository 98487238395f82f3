"""A browser that a test steers: Chromium, by the WebDriver protocol of its driver, with no package but Python."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""How the protocol names a reference to an element."""

KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Home": "\ue011", "ArrowLeft": "\ue012", "ArrowRight": "\ue014"}


class Browser:
    """A window of Chromium.

    Args:
        address: of a session of the driver.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, method: str = "GET", **sent: Any) -> Any:
        """The answer to a command of the protocol."""
        data = json.dumps(sent).encode() if method == "POST" else None
        request = Request(f"{self._address}{path}", data, {"Content-Type": "application/json"}, method=method)
        with urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path, width: int = 1200, is_dark: bool = False) -> None:
        """Shows a file in a window of that width, in light or dark."""
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("/url", "POST", url=page.as_uri())

    def tell(self, command: str, **params: Any) -> Any:
        """Runs a command of Chromium's own protocol."""
        return self.ask("/goog/cdp/execute", "POST", cmd=command, params=params)

    def run(self, script: str, *args: Any) -> Any:
        """What the body of a function returns in the page."""
        return self.ask("/execute/sync", "POST", script=script, args=list(args))

    def press(self, key: str) -> None:
        """Presses and lets go of a key: a name of KEYS, or a letter."""
        value = KEYS.get(key, key)
        actions = [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self.ask("/actions", "POST", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def heard(self, element: Any) -> tuple[str, str]:
        """The role and the name that a screen reader is told of an element that :meth:`run` has returned."""
        place = f"/element/{element[ELEMENT]}"
        return self.ask(f"{place}/computedrole"), self.ask(f"{place}/computedlabel")

    def complaints(self) -> list[str]:
        """What the page has written to the console since the last call."""
        return [entry["message"] for entry in self.ask("/se/log", "POST", type="browser")]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Starts a browser without a window, whose files are in a folder, and ends it."""
    assert BROWSER is not None and DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        try:
            started = (re.search(r"started successfully on port (\d+)", line) for line in driver.stdout)
            address = f"http://127.0.0.1:{next(filter(None, started))[1]}/session"
            arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
            options = {
                "goog:chromeOptions": {"binary": BROWSER, "args": arguments},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            session = Browser(address).ask("", "POST", capabilities={"alwaysMatch": options})["sessionId"]
            window = Browser(f"{address}/{session}")
            try:
                yield window
            finally:
                window.ask("", "DELETE")
        finally:
            driver.terminate()
