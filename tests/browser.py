"""A real browser for the tests of pages."""

import base64
import fcntl
import json
import os
import shutil
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium")


class Browser:
    """Headless Chromium over DevTools' own pipe: no port, no driver, no package."""

    def __init__(self, profile: Path):
        command, ours = os.pipe()
        theirs, answer = os.pipe()
        # The child wants its ends as 3 and 4; high numbers cannot be overwritten on the way.
        command, answer = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (command, answer))
        self.pid = os.posix_spawn(
            CHROMIUM,
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--disable-background-networking", "--disable-component-update", "--no-first-run",
             "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, command, 3),
                (os.POSIX_SPAWN_DUP2, answer, 4),
                (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
            ],
        )  # fmt: skip
        os.close(command)
        os.close(answer)
        self.ours, self.theirs = os.fdopen(ours, "wb", 0), os.fdopen(theirs, "rb", 0)
        self.events, self.session, self.number, self.rest = [], None, 0, b""

    def send(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.ours.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                got = self.theirs.read(1 << 20)
                if not got:
                    raise RuntimeError("the browser went away")
                self.rest += got
            line, self.rest = self.rest.split(b"\0", 1)
            reply = json.loads(line)
            if reply.get("id") == self.number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
            self.events.append(reply)

    def open(self, page: Path, *, width=1280, height=900, dark=False):
        self.session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self.events.clear()
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=page.resolve().as_uri())
        self.until("document.readyState === 'complete' && document.querySelector('.card') !== null")

    def run(self, expression):
        reply = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in reply:
            raise RuntimeError(reply["exceptionDetails"])
        return reply["result"].get("value")

    def until(self, expression):
        end = time.monotonic() + 30
        while not self.run(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}; {self.faults()}")
            time.sleep(0.05)

    def press(self, key, text=None):
        codes = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}
        extra = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        if key == "Enter":
            text = "\r"
        if text:
            extra["text"] = text
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **extra)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, **extra)

    def faults(self):
        """Script errors, broken rules of the page's own policy, and requests to anywhere."""
        self.run("1")
        bad = ("Runtime.exceptionThrown", "Log.entryAdded")
        asked = [
            event["params"]["request"]["url"][:200]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
            and not event["params"]["request"]["url"].startswith(("file:", "data:image/"))
        ]
        return asked + [event["params"] for event in self.events if event.get("method") in bad]

    def screenshot(self, path: Path) -> bytes:
        picture = base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(picture)
        return picture

    def close(self):
        self.session = None
        self.send("Browser.close")
        os.waitpid(self.pid, 0)
        self.ours.close()
        self.theirs.close()
