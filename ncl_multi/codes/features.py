"""The Features file: codes, labels, item names and where they came from."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from scipy.sparse import csr_array, issparse
from torch import Tensor

from ncl_multi.files import Expected, atomic, parse_json, read_safetensors

FORMAT = "ncl_multi.features/1"
MOST_COLUMNS = 2**22
"""Width of codes. A file need not be large to claim a large width, so it has a limit."""
MOST_ABOUT = 2**22
"""Bytes of provenance in a file."""

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
    """Codes of a set of items, with what is needed to judge and to show them.

    `z` is a tensor or a `scipy.sparse.csr_array`, one row an item; it is stored sparse when that
    is smaller. `y` are class labels, `items` what a person reads of an item (a caption, a sentence,
    a file name), `thumbnails` its picture as encoded PNG, JPEG or WebP. `about` is the provenance:
    model, data, split, seed, activation, `output` ("encoder" or "head"), `normalised`, and
    `classes`, the names of the labels. It travels in the file and is never guessed from its name.

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
        if not values.isfinite().all():
            raise ValueError("z holds NaN or infinity; look for a training run that diverged")
        if self.y is not None:
            object.__setattr__(self, "y", torch.as_tensor(self.y))
        for name in ("y", "items", "thumbnails"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self):
                raise ValueError(
                    f"{name} must have one entry a row of z; got {len(given)} for {len(self)} rows"
                )

    def __len__(self) -> int:
        return int(self.z.shape[0])

    @property
    def dims(self) -> int:
        """Width of the codes."""
        return int(self.z.shape[1])

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


def to_metadata(file_format: str, about: dict[str, Any]) -> dict[str, str]:
    """The metadata of a file in one of our formats, if it is short enough to be read again."""
    text = json.dumps(about, default=str)
    if len(json.dumps(text)) > MOST_ABOUT:
        raise ValueError(
            f"what a file says about itself may take {MOST_ABOUT} bytes; got {len(text)}. "
            f"Put long lists into items"
        )
    return {"format": file_format, "about": text}


def from_metadata(metadata: dict[str, str]) -> dict[str, Any]:
    """What a file says about itself."""
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
    """Codes as models return them: unit rows, sparse, exact zeros left out.

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
    parts = {
        "data": z.data, "indices": z.indices.astype(width), "indptr": z.indptr.astype(width),
    }  # fmt: skip
    tensors = {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}
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
