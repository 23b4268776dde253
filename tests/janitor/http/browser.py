"""A real browser, controlled through a pipe by Chromium's DevTools protocol, without a port or a package.

    with Browser.start(tmp_path) as browser:
        page = browser.open(server.url)
        page.until("document.title !== ''")
        assert page.text("h1") == "Healthy."

What the page asked for and what its console said is noted from before its first byte, so that "nothing else was
loaded" and "no error was thrown" are facts and not hopes. Waiting is done in the page, by watching it change.
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

#: How long the page is watched for what a test waits for, in milliseconds, before that is a failure.
GRACE_MS = 20_000

#: Chromium reads commands from file 3 and answers on file 4; no shell moves any two files there for sure.
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


#: What the browser says of a script whose page was left.
_LEFT = "Inspected target navigated or closed"


class PageError(AssertionError):
    """A script that was run in the page threw, or the browser refused a command."""


class PageLeft(PageError):
    """The page was left while a script of it ran."""


@dataclass
class Page:
    """A tab.

    Attributes:
        requests: the addresses it asked for, in order.
        console: what its console said, and what the browser said of it: errors, and everything a policy forbade.
    """

    browser: Browser
    session: str
    context: str
    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        return self.browser.call(method, self.session, **params)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise PageError(f"{script}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Return when a JavaScript expression holds, which is asked each time the page changes.

        A page that is left meanwhile, by a link that was clicked before, is followed once.
        """
        script = _UNTIL % {"condition": condition, "patience": GRACE_MS}
        try:
            self.run(script)
        except PageLeft:
            self.run(script)

    def text(self, selector: str) -> str:
        """What a person reads in the first element found."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        """What a person reads in each element found."""
        return list(self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.innerText)"))

    def shape(self, width: int, height: int) -> None:
        """Give it the size of a window or a phone, in CSS pixels."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def prefer(self, **features: str) -> None:
        """Preferences of its reader, as ``prefers_color_scheme="dark"``."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def type_into(self, selector: str, text: str) -> None:
        """Replace what stands in a field, as a keyboard does."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def go(self, url: str) -> None:
        """Load a page; returns when the browser has begun to."""
        self.call("Page.navigate", url=url)

    def before(self, script: str) -> None:
        """Run a script in every page before its own do."""
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def loaded(self) -> None:
        """Return when the page that :meth:`go` asked for is there."""
        while "load" not in self.events:
            self.browser.wait()

    def close(self) -> None:
        self.browser.close(self)

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Keep what an event says that tests ask for."""
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
    """Chromium without a window, with a profile of its own."""

    def __init__(self, process: subprocess.Popen[bytes], commands: BinaryIO, answers: BinaryIO) -> None:
        self._process = process
        self._commands = commands
        self._answers = answers
        self._last_id = 0
        self._unread = b""
        self._pages: dict[str, Page] = {}

    @classmethod
    def start(cls, profile: Path) -> Self:
        """Start it.

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
        """A tab of its own, with nothing remembered from others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as if it were the tab in front
        page.shape(1280, 900)
        page.prefer(prefers_color_scheme="light")
        if url != "about:blank":
            page.go(url)
        return page

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """One command of the protocol, and what is answered; events on the way are noted."""
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
        """The next message; an event is noted by the page it is about."""
        message = self._read()
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.note(message["method"], message["params"])
        return message

    def close(self, page: Page) -> None:
        self._pages.pop(page.session)
        self.call("Target.disposeBrowserContext", browserContextId=page.context)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = self._answers.read(1 << 16)
            assert more, "the browser has ended"
            self._unread += more
        message, self._unread = self._unread.split(b"\0", 1)
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def stop(self) -> None:
        """End it, and all its processes with it: they end when the pipe does."""
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
