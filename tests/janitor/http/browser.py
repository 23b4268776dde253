"""A real browser, controlled through a pipe by Chromium's DevTools protocol, without a port or a package.

    with Browser.start(tmp_path) as browser:
        page = browser.open(server.url)
        page.until("document.title !== ''")
        assert page.text("h1") == "Healthy."

Requests and console messages are recorded from the first byte of a page, so that tests can check that a page loads
nothing else and throws no error. Waits run in the page, which observes its changes.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from tests.support import require_tool

#: The time after which a wait in the page fails, in milliseconds.
GRACE_MS = 20_000

#: Move the pipes to the file descriptors from which Chromium reads commands (3) and to which it writes responses (4).
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)

_UNTIL = """new Promise((done, fail) => {
  const holds = () => { try { return %(condition)s; } catch { return false; } };
  if (holds()) return done(true);
  const watch = new MutationObserver(() => { if (holds()) { watch.disconnect(); clearTimeout(limit); done(true); } });
  watch.observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
  const limit = setTimeout(() => fail(new Error("never came true")), %(patience)d);
})"""


#: The browser's error for a script whose page was left.
_LEFT = "Inspected target navigated or closed"


class PageError(AssertionError):
    """A script in the page threw an error, or the browser rejected a command."""


class PageLeft(PageError):
    """The page was left while its script ran."""


@dataclass
class Page:
    """A browser tab.

    Attributes:
        requests: the requested addresses, in order.
        console: console messages, and the browser's errors and policy violations.
    """

    browser: Browser
    session: str
    context: str
    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol; return its result."""
        return self.browser.call(method, self.session, **params)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page; wait for promises."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise PageError(f"{script}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true; evaluate it at each change of the page.

        If a clicked link leaves the page, continue once on the next page.
        """
        script = _UNTIL % {"condition": condition, "patience": GRACE_MS}
        try:
            self.run(script)
        except PageLeft:
            self.run(script)

    def text(self, selector: str) -> str:
        """Return the visible text of the first matching element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        """Return the visible text of each matching element."""
        return list(self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.innerText)"))

    def resize(self, width: int, height: int) -> None:
        """Set the size of the viewport, in CSS pixels."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def prefer(self, **features: str) -> None:
        """Set media features, such as ``prefers_color_scheme="dark"``."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def type_into(self, selector: str, text: str) -> None:
        """Replace the text of a field by typing."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def go(self, url: str) -> None:
        """Start to load a page."""
        self.call("Page.navigate", url=url)

    def run_before_pages(self, script: str) -> None:
        """Run a script in every page before the page's scripts."""
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def wait_for_load(self) -> None:
        """Wait until the page of :meth:`go` is loaded."""
        while "load" not in self.events:
            self.browser.wait()

    def close(self) -> None:
        self.browser.close(self)

    def record(self, method: str, params: dict[str, Any]) -> None:
        """Record an event that tests use."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.console.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif method == "Page.loadEventFired":
            self.events.append("load")
        elif method == "Log.entryAdded":
            self.console.append(params["entry"]["text"])


class Browser:
    """Chromium without a window, with an empty profile."""

    def __init__(self, process: subprocess.Popen[bytes], commands: BinaryIO, answers: BinaryIO) -> None:
        self._process = process
        self._commands = commands
        self._answers = answers
        self._last_id = 0
        self._unread = b""
        self._pages: dict[str, Page] = {}

    @classmethod
    def start(cls, profile: Path) -> Self:
        """Start the browser.

        Args:
            profile: an empty folder.
        """
        chromium = require_tool("chromium", "apt-get install chromium, or make system-deps")
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        launch = [sys.executable, "-c", _LAUNCH, str(command_read), str(answer_write), chromium]
        environment = {**os.environ, "HOME": str(profile)}
        process = subprocess.Popen(
            [*launch, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        os.close(command_read)
        os.close(answer_write)
        return cls(process, os.fdopen(command_write, "wb", buffering=0), os.fdopen(answer_read, "rb", buffering=0))

    def open(self, url: str = "about:blank") -> Page:
        """Open a tab that shares no data with other tabs."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)  # like the tab in front
        page.resize(1280, 900)
        page.prefer(prefers_color_scheme="light")
        if url != "about:blank":
            page.go(url)
        return page

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Send a command of the protocol; return its result, and record events until then."""
        self._last_id += 1
        command: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        self._commands.write(json.dumps(command).encode() + b"\0")
        while True:
            message = self.wait()
            if message.get("id") == self._last_id:
                if (error := message.get("error")) is not None:
                    raise (PageLeft if error["message"] == _LEFT else PageError)(f"{method}: {error}")
                result: dict[str, Any] = message["result"]
                return result

    def wait(self) -> dict[str, Any]:
        """Return the next message; record an event in its page."""
        message = self._read()
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.record(message["method"], message["params"])
        return message

    def close(self, page: Page) -> None:
        self._pages.pop(page.session)
        self.call("Target.disposeBrowserContext", browserContextId=page.context)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = self._answers.read(1 << 16)
            assert more, "the browser has exited"
            self._unread += more
        message, self._unread = self._unread.split(b"\0", 1)
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def stop(self) -> None:
        """Stop the browser and its processes, which exit when the pipe closes."""
        self._commands.close()
        self._answers.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
