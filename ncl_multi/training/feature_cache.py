"""Features of frozen encoders, computed once and cached on disk.

A cache is a folder of shards, written atomically, so an interrupted run resumes with the next
shard. Every shard records the weights, data and transform it was made with, and is refused for
others.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ncl_multi.files import Expected, atomic, read_safetensors
from ncl_multi.optional import needs

with needs("ncl-multi[train]"):
    from filelock import FileLock
    from tqdm.auto import tqdm

_ROWS = 4096
_PARTS = {"h": Expected(("F16", "F32", "F64"), 2), "kept": Expected(("I64",))}
Shard = tuple[Tensor, list[int]]
"""Features and their row numbers."""
Compute = Callable[[Sequence[int], Callable[[int], object]], Shard]
"""Takes row numbers and a progress callback; rows without features are left out."""


@torch.no_grad()
def cached_shards(
    cache: Path, name: str, rows: int, about: Mapping[str, str], compute: Compute
) -> Shard:
    """All features of one kind, read or computed; with several processes, one computes.

    Args:
        cache: Folder of all caches.
        name: Short description of the features.
        rows: Number of rows.
        about: Everything they depend on: weights, data and so on.
        compute: Computes the features of given rows.
    """
    key = hashlib.sha256(json.dumps(dict(about)).encode()).hexdigest()[:16]
    folder = cache / f"{name}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    spans = [range(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS)]
    paths = [folder / f"{span.start:09d}.safetensors" for span in spans]
    bar = tqdm(total=rows, desc=name, unit="row", disable=all(path.exists() for path in paths))
    parts, present_rows = [], []
    with FileLock(folder / ".lock"), bar:
        for span, path in zip(spans, paths, strict=True):
            if path.exists():
                h, present = _read(path, about, span)
                bar.update(len(span))
            else:
                h, present = compute(span, bar.update)
                if not h.isfinite().all():
                    raise ValueError(f"the encoder gives NaN or infinity for {name}, {span}")
                content = {"h": h.contiguous(), "kept": torch.tensor(present, dtype=torch.long)}
                with atomic(path) as unfinished:
                    save_file(content, unfinished, dict(about))
            parts.append(h)
            present_rows += present
    return torch.cat(parts), present_rows


def _read(path: Path, about: Mapping[str, str], rows: range) -> Shard:
    try:
        tensors, made_with = read_safetensors(path, _PARTS, framework="pt")
    except ValueError as error:
        raise ValueError(f"{error}. Delete it to have it computed again") from error
    differ = [name for name in about if made_with.get(name) != about[name]]
    if differ:
        raise ValueError(
            f"{path} was made with another {', '.join(differ)} (by {made_with.get('model')}, not "
            f"by these weights of {about['model']}). Delete the folder {path.parent}, or choose "
            f"another --cache"
        )
    h, present = tensors["h"], tensors["kept"].tolist()
    if len(h) != len(present) or not set(present) <= set(rows):
        raise ValueError(f"{path} has other rows than {rows}. Delete it to have it computed again")
    return h, present
