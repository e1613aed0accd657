"""A headless Chromium driven over its own pipe.

No driver program, no port, no package beside the browser.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

EXECUTABLE = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ),
    *(
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        "--disable-component-update",
    ),
    # Nothing but files of this machine can be reached, so a page that needs a network
    # fails here.
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe"),
)


class Chromium:
    """One browser with one tab.

    `messages` has what its console says, and every uncaught error.
    """

    def __init__(self, profile):
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        # The browser expects the pipe at 3 and 4; numbers well above keep the two from
        # being each other's target.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (to_child, from_child)]
        self._process = subprocess.Popen(
            [str(EXECUTABLE), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: [
                os.dup2(end, place) for place, end in zip((3, 4), ends, strict=True)
            ],
        )
        for end in (to_child, from_child, *ends):
            os.close(end)
        self._buffer, self._number, self._session = b"", 0, ""
        self.messages = []
        self._attach()

    def _attach(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method, **parameters):
        """One command of the DevTools protocol and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(
            self._write,
            json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode()
            + b"\0",
        )
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _receive(self, seconds=120.0):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], seconds)
            assert ready, f"Chromium said nothing for {seconds:g} s"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium ended"
            self._buffer += part
        whole, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(whole)

    def _note(self, event):
        facts = event.get("params", {})
        if event.get("method") == "Runtime.consoleAPICalled":
            self.messages.append(
                " ".join(str(part.get("value", part.get("description"))) for part in facts["args"])
            )
        elif event.get("method") == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.messages.append(
                str(details.get("exception", {}).get("description") or details["text"])
            )
        elif event.get("method") == "Log.entryAdded":
            self.messages.append(facts["entry"]["text"])

    def screen(self, *, width, height=900, dark=False):
        """The screen and the theme that pages see from now on."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def open(self, address):
        """Go to a page afresh and wait until its charts are drawn."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait(
            "location.href !== 'about:blank' && document.documentElement?.dataset.charts === "
            "'drawn'"
        )

    def wait(self, condition, seconds=120.0):
        """Until an expression is true in the page."""
        end = time.monotonic() + seconds
        while not self.evaluate(condition):
            assert time.monotonic() < end, (
                f"still not: {condition}; the console says {self.messages}"
            )
            time.sleep(0.05)

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind, x, y, clicks=1):
        """Send `mouseMoved`, `mousePressed` or `mouseReleased` at a place of the window.

        The button is the left one.
        """
        button = (
            {"button": "left", "buttons": 1, "clickCount": clicks} if kind != "mouseMoved" else {}
        )
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def screenshot(self):
        """The whole page as a PNG, as high as it is."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return base64.b64decode(
            self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        )
