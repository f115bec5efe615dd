"""The Features file: codes, labels, item names and where they came from."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from scipy.sparse import csr_array, issparse, vstack
from torch import Tensor

from ncl_multi.files import Expected, atomic, parse_json, read_safetensors

FORMAT = "ncl_multi.features/1"
MOST_COLUMNS = 2**22
"""Largest width of codes: a small file could claim any width."""
MOST_ABOUT = 2**22
"""Bytes of provenance in a file."""
MOST_SHOWN = 10_000
"""Items of all splits of a run that are written together, as `all`, to be shown."""

_TEXTS = ("activation", "output", "side", "split")
_NUMBERS = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
_PARTS = {
    "z": Expected(_NUMBERS, 2, required=False),
    "data": Expected(("F64", "F32"), required=False),
    "indices": Expected(("I64", "I32"), required=False),
    "indptr": Expected(("I64", "I32"), required=False),
    "shape": Expected(("I64",), required=False),
    "y": Expected(_NUMBERS, (1, 2), required=False),
    "items": Expected(("U8",), required=False),
    "items.ends": Expected(("I64",), required=False),
    "thumbnails": Expected(("U8",), required=False),
    "thumbnails.ends": Expected(("I64",), required=False),
}


@dataclass(frozen=True)
class Features:
    """Codes of a set of items, with labels, texts, thumbnails and provenance.

    `z` is a tensor or a `scipy.sparse.csr_array`, one row per item; it is stored sparse when
    that is smaller. `y` are class labels, `items` a text for each item (a caption, a sentence, a
    file name), `thumbnails` its picture as encoded PNG, JPEG or WebP. `about` is the provenance:
    model, data, split, seed, activation, `output` ("encoder" or "head"), `normalised`, and
    `classes`, the names of the labels. Rows of several splits follow each other, and `splits` says
    how many there are of each. It travels in the file and is never guessed from its name.

    Example:
        >>> import tempfile
        >>> features = Features(torch.eye(3), y=torch.arange(3), about={"split": "test"})
        >>> path = features.save(tempfile.mkdtemp() + "/test.safetensors")
        >>> Features.load(path).about["split"]
        'test'
    """

    z: Any
    y: Tensor | None = None
    items: Sequence[str] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    thumbnails: Sequence[bytes] | None = None

    def __post_init__(self) -> None:
        if issparse(self.z):
            object.__setattr__(self, "z", csr_array(self.z))
            values = torch.from_numpy(self.z.data)
        else:
            object.__setattr__(self, "z", torch.as_tensor(self.z))
            values = self.z
        if self.z.ndim != 2:
            raise ValueError(f"z must have shape (n, d); got {tuple(self.z.shape)}")
        if not 1 <= self.z.shape[1] <= MOST_COLUMNS:
            raise ValueError(f"z must have 1 to {MOST_COLUMNS} columns; got {self.z.shape[1]}")
        for name in _TEXTS:
            if not isinstance(self.about.get(name), str | None):
                raise ValueError(f"{name} must be a text; got {self.about[name]!r:.80}")
        if not values.isfinite().all():
            raise ValueError("z contains NaN or infinity; look for a training run that diverged")
        if self.y is not None:
            object.__setattr__(self, "y", torch.as_tensor(self.y))
        for name in ("y", "items", "thumbnails"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != len(self):
                raise ValueError(
                    f"{name} must have one entry per row of z, {len(self)}; got {len(entries)}"
                )

    def __len__(self) -> int:
        return int(self.z.shape[0])

    def __repr__(self) -> str:
        kind = "csr_array" if issparse(self.z) else str(self.z.dtype)
        parts = [f"{len(self)} x {self.dims} {kind}"]
        parts += [n for n in ("y", "items", "thumbnails") if getattr(self, n) is not None]
        keys = ("data", "split", "side", "output")
        parts += [f"{name}={str(self.about[name])[:40]!r}" for name in keys if name in self.about]
        return f"Features({', '.join(parts)})"

    def split_of(self) -> list[str]:
        """The split of each row; an empty text if it is unknown.

        Example:
            >>> about = {"split": "all", "splits": {"train": 2, "test": 1}}
            >>> Features(torch.eye(3), about=about).split_of()
            ['train', 'train', 'test']
        """
        counts = self.about.get("splits") or {self.about.get("split", ""): len(self)}
        if not isinstance(counts, dict) or set(map(type, counts.values())) - {int}:
            raise ValueError(f"splits must be the number of rows of each split; got {counts!r:.80}")
        if any(count < 0 for count in counts.values()) or sum(counts.values()) != len(self):
            raise ValueError(f"splits must add up to {len(self)} rows; got {counts!r:.80}")
        return [str(split) for split, count in counts.items() for _ in range(count)]

    @property
    def dims(self) -> int:
        """Width of the codes."""
        return int(self.z.shape[1])

    @property
    def provenance(self) -> dict[str, Any]:
        """`about` without long lists: the names of classes and of dimensions."""
        return {key: entry for key, entry in self.about.items() if key not in ("classes", "names")}

    def take(self, rows: Sequence[int]) -> "Features":
        """These rows only, in rising order."""

        def pick(entries: Sequence[Any] | None) -> list[Any] | None:
            return None if entries is None else [entries[row] for row in rows]

        about = self.about
        if about.get("splits"):
            splits = self.split_of()
            about = about | {"splits": Counter(splits[row] for row in rows)}
        y = None if self.y is None else self.y[list(rows)]
        return Features(self.z[list(rows)], y, pick(self.items), about, pick(self.thumbnails))

    def dense(self) -> Tensor:
        """The codes as a tensor."""
        return torch.from_numpy(self.z.toarray()) if issparse(self.z) else self.z

    def sparse(self) -> csr_array:
        """The codes as a `csr_array`."""
        return self.z if issparse(self.z) else _csr(self.z)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, whole or not at all."""
        tensors = _codes(self.z)
        if self.y is not None:
            tensors["y"] = self.y.cpu().contiguous()
        if self.items is not None:
            tensors |= _pack("items", [str(item).encode() for item in self.items])
        if self.thumbnails is not None:
            tensors |= _pack("thumbnails", self.thumbnails)
        metadata = to_metadata(FORMAT, self.about)
        with atomic(path) as unfinished:
            save_file(tensors, unfinished, metadata)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Features":
        """Read a file written by `save`; the codes stay on disk until they are used."""
        try:
            tensors, metadata = read_safetensors(path, _PARTS, framework="pt", file_format=FORMAT)
        except FileNotFoundError:
            raise FileNotFoundError(f"no features file at {path}; recipes write one") from None
        try:
            items = _unpack(tensors, "items")
            thumbnails = _unpack(tensors, "thumbnails")
            return cls(
                z=_read_codes(tensors),
                y=tensors.get("y"),
                items=None if items is None else [item.decode() for item in items],
                about=from_metadata(metadata),
                thumbnails=None if thumbnails is None else list(thumbnails),
            )
        except (KeyError, IndexError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error


def join(parts: Mapping[str, Features]) -> Features:
    """Features of several splits as one, in this order; each split must be named once.

    Fields that not all splits have, such as labels, are left out.

    Example:
        >>> parts = {"train": Features(torch.eye(3)), "test": Features(torch.zeros(1, 3))}
        >>> join(parts).split_of()
        ['train', 'train', 'train', 'test']
    """
    features = list(parts.values())

    def one_after_another(name: str) -> list[Any] | None:
        columns = [getattr(part, name) for part in features]
        if any(entries is None for entries in columns):
            return None
        return [entry for entries in columns for entry in entries]

    labels = [part.y for part in features if part.y is not None]
    splits = {split: len(part) for split, part in parts.items()}
    return Features(
        vstack([part.sparse() for part in features], format="csr"),
        torch.cat(labels) if len(labels) == len(features) else None,
        one_after_another("items"),
        features[0].about | {"split": "all", "splits": splits},
        one_after_another("thumbnails"),
    )


def spread(rows: int, most: int) -> list[int]:
    """Numbers of all rows, or of `most` evenly spaced ones.

    Example:
        >>> spread(9, 3), spread(2, 3)
        ([0, 4, 8], [0, 1])
    """
    return np.unique(np.linspace(0, rows - 1, min(rows, most)).astype(int)).tolist()


def to_metadata(file_format: str, about: dict[str, Any]) -> dict[str, str]:
    """The metadata of a file in one of our formats; refused if it is too long to be read again."""
    text = json.dumps(about, default=str)
    if len(json.dumps(text)) > MOST_ABOUT:
        raise ValueError(
            f"the metadata of a file may take {MOST_ABOUT} bytes; got {len(text)}. "
            f"Put long lists into items"
        )
    return {"format": file_format, "about": text}


def from_metadata(metadata: dict[str, str]) -> dict[str, Any]:
    """The provenance in the metadata of a file."""
    about = parse_json(metadata["about"], "its provenance")
    if not isinstance(about, dict):
        raise ValueError(f"its provenance must be a JSON object; got {type(about).__name__}")
    return about


def normalise_rows(z: csr_array) -> csr_array:
    """Give every row length one, in place; a row of zeros stays zero."""
    per_row = np.diff(z.indptr)
    row = np.repeat(np.arange(z.shape[0]), per_row)
    length = np.sqrt(np.bincount(row, z.data.astype(np.float64) ** 2, z.shape[0]))
    z.data /= np.repeat(np.where(length > 0, length, 1), per_row).astype(z.dtype)
    return z


def to_csr(z: Tensor) -> csr_array:
    """Sparse codes as models return them: unit rows, without stored zeros.

    Example:
        >>> to_csr(torch.tensor([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]])).toarray()
        array([[0.6, 0. , 0.8],
               [0. , 0. , 0. ]], dtype=float32)
    """
    z = torch.nn.functional.normalize(z.detach().float(), dim=1)
    return csr_array(z.cpu().numpy())


def _codes(z: Any) -> dict[str, Tensor]:
    if not issparse(z):
        # A stored entry costs its value and its column: sparse pays below one half.
        if torch.count_nonzero(z) * 2 >= z.numel():
            return {"z": z.detach().cpu().contiguous()}
        z = _csr(z)
    elif z.dtype not in (np.float32, np.float64):
        z = z.astype(np.float32)
    # One width for both, or scipy would copy them when they are read.
    width = np.int32 if max(z.nnz, z.shape[1]) < 2**31 else np.int64
    arrays = {
        "data": z.data, "indices": z.indices.astype(width), "indptr": z.indptr.astype(width),
    }  # fmt: skip
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()
    }
    return tensors | {"shape": torch.tensor(z.shape)}


def _csr(z: Tensor) -> csr_array:
    z = z.detach().cpu()
    return csr_array((z if z.dtype == torch.float64 else z.float()).numpy())


def _read_codes(tensors: dict[str, Tensor]) -> Tensor | csr_array:
    if "z" in tensors:
        return tensors["z"]
    data, indices, indptr = (tensors[name].numpy() for name in ("data", "indices", "indptr"))
    shape = tensors["shape"].tolist()
    if len(shape) != 2 or shape[0] != len(indptr) - 1 or not 0 < shape[1] <= MOST_COLUMNS:
        raise ValueError(
            f"shape must be {len(indptr) - 1} rows and 1 to {MOST_COLUMNS} columns; got {shape[:5]}"
        )
    z = csr_array((data, indices, indptr), shape=tuple(shape))
    z.check_format(full_check=True)
    return z


def _pack(name: str, entries: Sequence[bytes]) -> dict[str, Tensor]:
    """Byte strings of any length as two tensors."""
    ends = torch.tensor([len(entry) for entry in entries], dtype=torch.int64).cumsum(0)
    joined = np.frombuffer(b"".join(entries), dtype=np.uint8).copy()
    return {name: torch.from_numpy(joined), f"{name}.ends": ends}


def _unpack(tensors: dict[str, Tensor], name: str) -> Iterator[bytes] | None:
    if name not in tensors:
        return None
    joined, ends = tensors[name].numpy().tobytes(), tensors[f"{name}.ends"]
    starts = torch.cat([ends.new_zeros(1), ends])
    if (starts.diff() < 0).any() or starts[-1] != len(joined):
        raise ValueError(f"the {name} must follow each other and end at {len(joined)} bytes")
    return (joined[start:end] for start, end in pairwise(starts.tolist()))
