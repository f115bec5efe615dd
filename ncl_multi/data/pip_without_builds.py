"""pip that must not start other programs: `python pip_without_builds.py <folder> download ...`.

To learn the metadata of a source archive pip runs its build script. Here that moment is the end:
the archive, which pip has checked against its hash by then, is copied to the folder as it is.
"""

import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

_STARTS = {
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system",
    "pty.spawn", "subprocess.Popen", "_winapi.CreateProcess",
}  # fmt: skip
_ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".zip")


def main(folder: Path) -> None:
    opened: list[str] = []

    def watch(event: str, details: tuple[Any, ...]) -> None:
        if event == "open":
            if str(details[0]).endswith(_ARCHIVES):
                opened.append(os.fspath(details[0]))
        elif event in _STARTS:
            if not opened:
                # pip also calls lsb_release or rustc for its user agent; it works without them.
                raise PermissionError("no program may be started while data is fetched")
            shutil.copy(opened[-1], folder)
            sys.stderr.flush()
            os._exit(0)

    sys.addaudithook(watch)
    runpy.run_module("pip", run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)))
