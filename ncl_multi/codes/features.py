"""The Features file: codes, labels, item names and where they came from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from scipy.sparse import csr_array, issparse
from torch import Tensor

from ncl_multi.files import atomic

FORMAT = "ncl_multi.features/1"


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
        metadata = {"format": FORMAT, "about": json.dumps(self.about, default=str)}
        with atomic(path) as unfinished:
            save_file(tensors, unfinished, metadata)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Features":
        """Read a file written by `save`; the codes stay on disk until they are used."""
        tensors, about = read_safetensors(
            path, FORMAT, "features file", "recipes write one", framework="pt"
        )
        try:
            items, thumbnails = _unpack(tensors, "items"), _unpack(tensors, "thumbnails")
            return cls(
                z=_read_codes(tensors),
                y=tensors.get("y"),
                items=None if items is None else [item.decode() for item in items],
                about=about,
                thumbnails=thumbnails,
            )
        except (KeyError, IndexError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error


def read_safetensors(
    path: str | Path, expected: str, what: str, written_by: str, *, framework: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of a file in one of our formats, and what it says about them; or why it is none."""
    try:
        with safe_open(path, framework=framework) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise FileNotFoundError(f"no {what} at {path}; {written_by}") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no {what}, or was cut short: {error}") from error
    if metadata.get("format") != expected:
        raise ValueError(
            f"{path} is no {what} of this version: expected format {expected}, "
            f"got {metadata.get('format')}. Write it again"
        )
    try:
        return tensors, dict(json.loads(metadata["about"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


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
    whole = (torch.int32, torch.int64)
    kinds = {"data": (torch.float32, torch.float64)} | dict.fromkeys(("indices", "indptr"), whole)
    for name, allowed in kinds.items():
        if tensors[name].dtype not in allowed or tensors[name].ndim != 1:
            raise ValueError(f"{name} is {tensors[name].dtype} {tuple(tensors[name].shape)}")
    data, indices, indptr = (tensors[name].numpy() for name in kinds)
    z = csr_array((data, indices, indptr), shape=tuple(tensors["shape"].tolist()))
    z.check_format(full_check=True)
    return z


def _pack(name: str, entries: Sequence[bytes]) -> dict[str, Tensor]:
    """Byte strings of any length as two tensors."""
    ends = torch.tensor([len(entry) for entry in entries], dtype=torch.int64).cumsum(0)
    joined = np.frombuffer(b"".join(entries), dtype=np.uint8).copy()
    return {name: torch.from_numpy(joined), f"{name}.ends": ends}


def _unpack(tensors: dict[str, Tensor], name: str) -> list[bytes] | None:
    if name not in tensors:
        return None
    joined, ends = tensors[name].numpy().tobytes(), tensors[f"{name}.ends"].tolist()
    return [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]
