"""All reading and writing of files: written atomically, checked before they are read.

A file may be untrusted. So its size, its names, its dtypes and its shapes are compared with
what is expected before memory is taken for it, and every refusal is a `ValueError` that names the
file.
"""

import ctypes
import glob
import hashlib
import io
import json
import os
import pickletools
import platform
import re
import shutil
import struct
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from ncl_multi.optional import needs

MOST_JSON = 2**20
"""Bytes of a settings file. Python needs up to 22 bytes for one byte of JSON."""
MOST_HEADER = 2**23
"""Bytes of a safetensors header."""
MOST_DEPTH = 32
"""Levels of nesting in JSON."""
MOST_PIXELS = 2**26
"""Pixels of a picture, 67 million. One of a small file has fewer, as each takes memory."""

# Other formats of Pillow start programs (EPS) or are rarely used and rarely tested.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Bytes for each pixel that a decoder takes for itself.
_DECODER = {"TIFF": 4, "WEBP": 12}
DAMAGE = (
    ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError,
    MemoryError, NotImplementedError, OSError, RuntimeError, SyntaxError, TypeError,
    UnpicklingError, ValueError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What readers of other libraries raise for unexpected bytes."""
# What the pickle of a file of tensors names.
_OF_TENSORS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch Size|torch device"
    r"|torch (Float|Double|Half|BFloat16|Long|Int|Short|Char|Byte|Bool|Complex\w+)Storage"
    r"|torch (float|bfloat|int|uint|complex|bool)\d*|_codecs encode|(__builtin__|builtins) set"
)
_MACHINE = re.sub(r"\W", "-", platform.node())
_EXCHANGE = 2
_HERE = -100


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to; it replaces `path` when the block ends without error.

    The old file stays until then, so a full disk or a kill leaves it untouched. Leftovers of killed
    processes of this machine are removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{_MACHINE}.*.part"):
        if not _is_running(leftover.name.split(".")[-2]):
            leftover.unlink(missing_ok=True)
    unfinished = path.with_name(f".{path.name}.{_MACHINE}.{os.getpid()}.part")
    try:
        with _disk_errors(path):
            yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder to write to; it replaces `path` when the block ends without error.

    After a full disk or a kill, `path` is the old folder or the new one. Linux and macOS swap the
    two in one call. Elsewhere, and on file systems without that call, there is a moment between two
    renames in which the old folder is called `.<name>.old`; the next save restores it.

    Files of the old folder that were not written again are kept, such as `.git` or notes of a user.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model"
        >>> with atomic_folder(path) as unfinished:
        ...     _ = (unfinished / "config.json").write_text("{}")
        >>> [file.name for file in path.iterdir()]
        ['config.json']
    """
    path = Path(path).resolve()
    if path.exists() and (not path.is_dir() or path == Path.cwd()):
        raise ValueError(f"{path} must be a folder other than the current one; choose another")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished, old = (path.with_name(f".{path.name}.{end}") for end in ("part", "old"))
    with FileLock(path.with_name(f".{path.name}.lock")):
        # This process has the lock, so these are leftovers of a killed process.
        if old.exists() and not path.exists():
            old.rename(path)
        for leftover in (unfinished, old):
            if leftover.exists():
                shutil.rmtree(leftover)
        unfinished.mkdir()
        try:
            with _disk_errors(path):
                yield unfinished
            if path.exists():
                _link_the_rest(path, unfinished)
            _flush(unfinished)
            if not path.exists():
                unfinished.rename(path)
            elif not _swap(unfinished, path):
                path.rename(old)
                unfinished.rename(path)
            _flush_entry(path.parent)
        finally:
            if old.exists() and not path.exists():
                old.rename(path)
            for leftover in (unfinished, old):
                shutil.rmtree(leftover, ignore_errors=True)


def link_equal_files(folder: str | Path, least_bytes: int = 2**20) -> int:
    """Replace equal files below a folder by hard links; return the number of bytes freed.

    An example is the frozen encoder that a model, its twin and its export each contain. Saves
    replace files and never write into them, so a link is as good as a copy. Without hard links
    nothing changes.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in "ab":
        ...     _ = (folder / name).write_bytes(bytes(2**20))
        >>> link_equal_files(folder)
        1048576
    """
    freed = 0
    first_by_content: dict[tuple[int, bytes], Path] = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_symlink() or not path.is_file() or path.stat().st_size < least_bytes:
            continue
        key = path.stat().st_size, _digest(path)
        first = first_by_content.setdefault(key, path)
        if first.samefile(path):
            continue
        with suppress(OSError):
            link = path.with_name(f".{path.name}.{os.getpid()}.part")
            os.link(first, link)
            link.replace(path)
            freed += key[0]
    return freed


@contextmanager
def lock_folder(path: str | Path) -> Iterator[None]:
    """Lock a folder for this process; a second one is refused at once. A kill releases it.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with lock_folder(folder):
        ...     Path(folder, "train.jsonl").touch()
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another process is writing to {path}; wait until it ends or choose another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def read_json(
    path: str | Path,
    keys: Collection[str] | None = None,
    optional: Collection[str] = (),
    *,
    most_bytes: int = MOST_JSON,
) -> dict[str, Any]:
    """The object in a JSON file, with all `keys`, perhaps `optional` ones, and no others.

    Without `keys` any are accepted.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "config.json"
        >>> _ = path.write_text('{"dims": 8}')
        >>> read_json(path, keys=["dims"], optional=["k"])
        {'dims': 8}
    """
    value = parse_json(read_bytes(path, most_bytes), path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object; got {type(value).__name__}")
    if keys is not None:
        check_keys(value, keys, optional, path)
    return value


def check_keys(
    value: Mapping[str, Any], keys: Collection[str], optional: Collection[str], where: str | Path
) -> None:
    """Refuse an object that lacks one of `keys` or has one that is neither there nor `optional`."""
    missing = [key for key in keys if key not in value]
    unknown = [key for key in value if key not in keys and key not in optional]
    if missing or unknown:
        raise ValueError(
            f"{where} must have the keys {', '.join(keys)}; missing: {missing[:5]}, unknown: "
            f"{[key[:80] for key in unknown[:5]]}. Save it again with this version"
        )


def parse_json(content: bytes | str, where: str | Path) -> Any:
    """A JSON value that is not nested too deeply; `where` names it in errors."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"{where} is nested more than {MOST_DEPTH} levels deep") from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON, or was cut short: {error}") from error
    level, depth = [value], 0
    while level := [
        child
        for parent in level
        if isinstance(parent, dict | list)
        for child in (parent.values() if isinstance(parent, dict) else parent)
    ]:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"{where} is nested more than {MOST_DEPTH} levels deep")
    return value


def read_bytes(path: str | Path, most_bytes: int) -> bytes:
    """The content of a regular file that is not larger than expected."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file")
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path} is larger than {most_bytes} bytes, so it was not read")
    return content


@dataclass(frozen=True)
class Expected:
    """What a tensor in a file must be: its dtypes, as safetensors calls them, and its axes."""

    dtypes: tuple[str, ...]
    ndim: int | tuple[int, ...] = 1
    required: bool = True


def read_safetensors(
    path: str | Path,
    expected: Mapping[str, Expected],
    *,
    framework: str,
    file_format: str | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors and metadata of a safetensors file, after a look at its header.

    With `file_format`, the metadata must name this format. A name of `expected` may have wildcards:
    `*.ids` stands for `0.ids`, `1.ids` and so on. A name that is not expected, another dtype or
    another number of axes is refused before any tensor is made. Tensors take no more memory than
    the file.

    Example:
        >>> import tempfile
        >>> from safetensors.numpy import save_file
        >>> import numpy as np
        >>> path = tempfile.mkdtemp() + "/a.safetensors"
        >>> save_file({"x": np.zeros(3, np.float32)}, path)
        >>> read_safetensors(path, {"x": Expected(("F32",))}, framework="np")[0]
        {'x': array([0., 0., 0.], dtype=float32)}
    """
    header = _header(Path(path))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{path} is damaged: its metadata is {type(metadata).__name__}")
    if file_format is not None and metadata.get("format") != file_format:
        raise ValueError(
            f"{path} has another format: expected {file_format}, got "
            f"{str(metadata.get('format'))[:80]}. Write it again with this version"
        )
    for name, entry in header.items():
        rules = [rule for pattern, rule in expected.items() if fnmatchcase(name, pattern)]
        if not rules or not isinstance(entry, dict):
            raise ValueError(
                f"{path} contains {name[:80]!r}; expected only {', '.join(expected)}. "
                f"Write it again with this version"
            )
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if dtype not in rules[0].dtypes:
            raise ValueError(
                f"{path} is damaged: {name} must be {' or '.join(rules[0].dtypes)}; got {dtype}"
            )
        axes = (rules[0].ndim,) if isinstance(rules[0].ndim, int) else rules[0].ndim
        if not isinstance(shape, list) or len(shape) not in axes:
            allowed = " or ".join(map(str, axes))
            raise ValueError(f"{path} is damaged: {name} must have {allowed} axes; got {shape}")
    missing = [n for n, rule in expected.items() if rule.required and "*" not in n]
    missing = [name for name in missing if name not in header]
    if missing:
        raise ValueError(f"{path} is damaged: it has no {', '.join(missing)}. Write it again")
    try:
        # It refuses tensors that overlap, leave gaps or do not end with the file.
        with safe_open(path, framework=framework) as file:
            return {name: file.get_tensor(name) for name in header}, metadata
    except (SafetensorError, OSError, OverflowError) as error:
        raise ValueError(f"{path} is damaged, or was cut short: {error}") from error


def read_torch(path: str | Path, classes: Sequence[type] = ()) -> Any:
    """What `torch.save` wrote: tensors, plain values and these classes, on the CPU.

    It runs no code, and the content takes no more memory than the file: tensors that are stored
    whole, in an archive without compressed parts.

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/state.pt"
        >>> torch.save({"step": 3}, path)
        >>> read_torch(path)
        {'step': 3}
    """
    import torch

    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is not a file")
    try:
        check_tensors(Path(path), classes)
        with torch.serialization.safe_globals(list(classes)):
            content = torch.load(path, map_location="cpu", weights_only=True)
        _check_whole(content)
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} was not written by torch.save, was cut short, or contains more than tensors, "
            f"so it was not read: {first}"
        ) from error
    return content


def check_tensors(file: Path | bytes, classes: Sequence[type] = ()) -> None:
    """Refuse what `torch.save` does not write for tensors, before torch reads it.
    Torch runs no code from a file, but it makes calls that take memory for a number, such as
    `bytearray` and `FloatTensor`.
    """
    import torch

    check_zip(file, compressed=False)
    # Torch's own reader: another might find another file of this name in the archive.
    opened: Any = io.BytesIO(file) if isinstance(file, bytes) else str(file)
    content = torch._C.PyTorchFileReader(opened).get_record("data.pkl")
    known = {f"{one.__module__} {one.__name__}" for one in classes}
    for opcode, name, _ in pickletools.genops(content):
        if opcode.name == "GLOBAL" and name not in known and not _OF_TENSORS.fullmatch(str(name)):
            raise ValueError(f"it names {str(name)[:80]}")


def check_zip(file: Path | bytes, *, compressed: bool = True) -> None:
    """Refuse a zip file whose parts would take more memory than `most_memory` of it.

    Without `compressed`, parts may not be compressed, so they take no more than the file.
    """
    with zipfile.ZipFile(io.BytesIO(file) if isinstance(file, bytes) else file) as archive:
        members = archive.infolist()
    size = len(file) if isinstance(file, bytes) else file.stat().st_size
    total = sum(member.file_size for member in members)
    plain = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    if total > (most_memory(size) if compressed else size) or not (compressed or plain):
        raise ValueError(f"its parts are larger than the file: {total} bytes in {size}")


def most_memory(file_size: int) -> int:
    """Bytes that the content of a file of this size may take: 10 times as many, and 100 MB."""
    return 10 * file_size + 100_000_000


def read_picture(file: str | Path | bytes, name: str | Path | None = None) -> Any:
    """A decoded Pillow image of a common format that takes no more than `most_memory` of its file.

    `file` is a path or the encoded bytes; `name` names it in errors.

    Example:
        >>> import io
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (3, 2)).save(file, "PNG")
        >>> read_picture(file.getvalue()).size
        (3, 2)
    """
    with needs("ncl-multi[train]"):
        from PIL import Image, UnidentifiedImageError
    name = name or ("the file" if isinstance(file, bytes) else file)
    if not isinstance(file, bytes) and Path(file).exists() and not Path(file).is_file():
        raise ValueError(f"{name} is not a file")
    size = len(file) if isinstance(file, bytes) else Path(file).stat().st_size
    opened = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        with Image.open(opened, formats=_FORMATS) as picture:
            most = min(MOST_PIXELS, most_memory(size) // _bytes_per_pixel(picture))
            if picture.width * picture.height > most:
                raise ValueError(
                    f"it has {picture.width} x {picture.height} pixels in {size} bytes; at most "
                    f"{most} are read from so many. Scale it down"
                )
            picture.load()
            return picture
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} is not a picture ({', '.join(_FORMATS)})") from error
    except (*DAMAGE, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        if getattr(error, "errno", None) is not None:
            raise  # The file may not be read, or has gone.
        raise ValueError(f"{name} cannot be read as a picture: {error}") from error


def _bytes_per_pixel(picture: Any) -> int:
    """Memory for decoding, or for the conversion to RGB after it, whichever is larger."""
    decoder = 2 * len(picture.getbands()) if picture.info.get("progressive") else 0
    decoder = _DECODER.get(picture.format, decoder)
    return 4 + max(decoder, 4 * (picture.mode != "RGB"))


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Make what safetensors raises for a full disk an `OSError`, as others do."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def _check_whole(content: Any) -> None:
    """Refuse tensors that store fewer numbers than their shape says."""
    import torch

    pending, seen = [content], set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.device.type != "cpu":
                raise ValueError(f"a tensor has the layout {value.layout} on {value.device}")
            if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                raise ValueError(
                    f"a tensor of shape {tuple(value.shape)} is not stored whole; save its clone()"
                )
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list | tuple | set):
            pending += value
        elif hasattr(value, "to_dict"):
            pending.append(value.to_dict())


def _is_running(process: str) -> bool:
    """Whether a process of this number may be running; on Windows always true."""
    if os.name != "posix" or not process.isdecimal():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.digest()


def _header(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a folder; expected a safetensors file")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        available = path.stat().st_size - 8
        if not 2 <= size <= available:
            raise ValueError(f"{path} is not a safetensors file, or was cut short")
        if size > MOST_HEADER:
            raise ValueError(f"{path} has a header of {size} bytes; at most {MOST_HEADER} are read")
        content = file.read(size)
    header = parse_json(content, f"the header of {path}")
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file, or was cut short")
    return header


def _link_the_rest(old: Path, new: Path) -> None:
    """Link entries that only the old folder has into the new one."""
    for entry in old.iterdir():
        target = new / entry.name
        if os.path.lexists(target):
            continue
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir():
            shutil.copytree(entry, target, symlinks=True, copy_function=_link)
        elif entry.is_file():
            _link(entry, target)


def _link(source: str | Path, target: str | Path) -> str | Path:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _swap(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; False if the system cannot."""
    c = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    names = (os.fsencode(one), os.fsencode(other))
    if c is not None and sys.platform == "darwin" and hasattr(c, "renamex_np"):
        return c.renamex_np(*names, _EXCHANGE) == 0
    if c is not None and hasattr(c, "renameat2"):
        return c.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0
    return False


def _flush(folder: Path) -> None:
    """Wait until a folder and all in it are on the disk."""
    for directory, _, names in os.walk(folder):
        for name in names:
            if (path := Path(directory, name)).is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        _flush_entry(Path(directory))


def _flush_entry(folder: Path) -> None:
    """Wait until the names in a folder are on the disk; Windows cannot open folders."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
