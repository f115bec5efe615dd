"""`ncl-encode`: codes of all rows of a file or folder, as parquet shards.

The input is divided into parts of `shard_rows` rows, and each becomes one shard. A shard depends on
its rows only, so a resumed run writes the missing ones, and the files are the same bytes.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import csr_array, vstack
from tqdm.auto import tqdm

from ncl_multi.bulk.inputs import Input, Part, Refused, Row, open_input
from ncl_multi.bulk.shards import Codes, claim, count, shard, write_shard
from ncl_multi.files import lock_folder
from ncl_multi.model import SparseModel, fingerprint, load
from ncl_multi.optional import needs
from ncl_multi.pretrained_heads import pretrained, pretrained_names

# Largest number of rows and size of a chunk in memory, in addition to the codes of one shard.
_CHUNK = {"text": (2**14, 2**24), "pictures": (64, 2**26)}


def encode_files(
    model: str | Path,
    input: str | Path,
    output: str | Path,
    *,
    k: int | None = None,
    column: str | None = None,
    id_column: str | None = None,
    shard_rows: int = 50_000,
    batch_size: int | None = None,
    device: str | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int = 2,
    progress: bool = True,
) -> dict[str, int]:
    """Write the codes of all rows of a file or folder as parquet shards; resume where it stopped.

    Unreadable rows go to `rejects-*.jsonl` in the output folder, with the reason. The output folder
    belongs to one model, one input and one set of options; a run with others is refused.

    Args:
        model: The model: a run folder, its `model/` folder, a name of `ncl.pretrained` or on the
            hub.
        input: The input: a parquet, jsonl, txt, csv or tsv file; a folder of such files; a folder
            of pictures. Only csv and tsv files are read whole.
        output: The output: a folder for the shards; see `ncl_multi.bulk.shards` for their columns.
        k: Keep the k largest entries of a row; None keeps what the model serves.
        column: Column of the text; None takes the one with a known name, or the only one with text.
        id_column: Column of the ids; None takes `id` or `_id` where there is one.
        shard_rows: Rows per shard.
        batch_size: Rows per forward pass; None is the model's own default.
        device: Where the model runs; None takes the GPU if there is one.
        engine: `ray` spreads the shards over the workers of a Ray cluster that sees the same files.
        workers: Processes of the `ray` engine, each with a copy of the model.
        progress: Show a bar.

    Returns:
        `rows` with a code, `rejects` without, `shards` and how many of them are `new`.
    """
    if shard_rows < 1:
        raise ValueError(f"shard_rows must be at least 1; got {shard_rows}")
    source = str(Path(model).resolve() if Path(model).exists() else model)
    encoder = _on_device(source, device)
    inputs = open_input(input, shard_rows, column, id_column)
    _check_reads(encoder, inputs)
    folder = Path(output)
    identity = _identity(encoder)
    manifest = {
        "model": {"fingerprint": identity, "kind": encoder.kind, "dims": encoder.dims},
        "input": {"fingerprint": inputs.digest, "rows": inputs.rows, "shards": len(inputs.parts)},
        "options": {
            "k": k, "column": column, "id_column": id_column, "shard_rows": shard_rows,
            "batch_size": batch_size,
        },
    }  # fmt: skip
    with lock_folder(folder):
        claim(folder, manifest)
        missing = [part for part in inputs.parts if not shard(folder, part.number).exists()]
        finished = inputs.rows - sum(part.rows for part in missing)
        settings = {"k": k, "batch_size": batch_size, "model": identity}
        worker = _Worker(encoder, inputs, folder.resolve(), settings)
        run: Iterator[Part] = map(worker.make, missing)
        if engine == "ray":
            run = _on_ray(source, device, worker, missing, workers)
        with tqdm(total=inputs.rows, initial=finished, unit="row", disable=not progress) as bar:
            try:
                for part in run:
                    bar.update(part.rows)
            except OSError as error:
                done = sum(shard(folder, part.number).exists() for part in inputs.parts)
                raise OSError(
                    f"stopped after {done} of {len(inputs.parts)} shards, which are whole: {error}"
                    f". Make room if the disk is full, then run the same command: it resumes"
                ) from error
        counts = np.array([count(folder, part.number) for part in inputs.parts]).sum(axis=0)
    rows, refused = map(int, counts)
    return {"rows": rows, "rejects": refused, "shards": len(inputs.parts), "new": len(missing)}


@dataclass
class _Worker:
    """Makes shards, one at a time, of the parts of an input."""

    model: Any
    inputs: Input
    folder: Path
    settings: dict[str, Any]

    def make(self, part: Part) -> Part:
        """Encode the rows of a part and write its shard."""
        rows: list[int] = []
        ids: list[str | None] = []
        refused: list[Refused] = []
        parts = [csr_array((0, self.model.dims), dtype=np.float32)]
        for chunk in _chunks(self.inputs, part, refused):
            for encoded_rows, z in _encoded(self.model, chunk, self.settings, refused):
                rows += [row.row for row in encoded_rows]
                ids += [row.id for row in encoded_rows]
                parts.append(z)
        codes = csr_array(vstack(parts, format="csr"))
        codes.sort_indices()
        shard_codes = Codes(np.array(rows, dtype=np.int64), ids, codes)
        write_shard(self.folder, part.number, shard_codes, refused, self.settings["model"])
        return part


class _RayWorker:
    """Started once per process by Ray Data: a worker with a copy of the model."""

    def __init__(self, source: str, device: str | None, worker: _Worker):
        self.worker = replace(worker, model=_on_device(source, device))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for number in batch["number"].tolist():
            self.worker.make(self.worker.inputs.parts[number])
        return batch


def _on_ray(
    source: str, device: str | None, worker: _Worker, parts: list[Part], workers: int
) -> Iterator[Part]:
    """Shards made by the workers of Ray Data, which restarts a lost worker and its shard."""
    # Ray sends usage statistics unless this is set.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with needs("ncl-multi[ray]"):
        import ray
        import ray.data
    if not parts:
        return
    started = not ray.is_initialized()
    if started:
        cpus = None if os.environ.get("RAY_ADDRESS") else workers
        ray.init(log_to_driver=False, include_dashboard=False, num_cpus=cpus)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        kwargs = {"source": source, "device": device, "worker": replace(worker, model=None)}
        numbers = [{"number": part.number} for part in parts]
        shards = ray.data.from_items(numbers, override_num_blocks=len(parts)).map_batches(
            _RayWorker, fn_constructor_kwargs=kwargs, batch_size=1, concurrency=workers, num_cpus=1
        )
        for made in shards.iter_rows():
            yield worker.inputs.parts[made["number"]]
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray stopped: {str(error).strip().splitlines()[-1]}") from error
    finally:
        if started:
            ray.shutdown()


def _chunks(inputs: Input, part: Part, refused: list[Refused]) -> Iterator[list[Row]]:
    """Readable rows of a part in chunks of limited size; the others are added to `refused`."""
    most_rows, most_size = _CHUNK[inputs.sources[part.file].holds]
    chunk: list[Row] = []
    size = 0
    for row in inputs.read(part):
        if isinstance(row, Refused):
            refused.append(row)
            continue
        chunk.append(row)
        size += len(row.item) if isinstance(row.item, str) else row.item.width * row.item.height
        if len(chunk) == most_rows or size >= most_size:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encoded(
    model: SparseModel, rows: list[Row], settings: dict[str, Any], refused: list[Refused]
) -> Iterator[tuple[list[Row], csr_array]]:
    """Codes of rows. If the model refuses them, halves are tried, down to the bad row."""
    items = [row.item for row in rows]
    try:
        z = model.encode(items, k=settings["k"], batch_size=settings["batch_size"])
        yield rows, z
    except ValueError as error:
        if len(rows) == 1:
            refused.append(Refused(rows[0].row, rows[0].where, f"the model refuses it: {error}"))
            return
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            yield from _encoded(model, half, settings, refused)


def _on_device(source: str, device: str | None) -> Any:
    best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    model = pretrained(source) if source in pretrained_names() else load(source)
    return model.to(device or best or "cpu")


def _check_reads(model: Any, inputs: Input) -> None:
    """Refuse texts for a model of images, and the other way round."""
    if not isinstance(model, SparseModel) or model.kind == "graph":
        raise ValueError(
            "a graph is encoded whole, its nodes need each other: use ncl.load(...).encode(data)"
        )
    tower = getattr(model.encoder, "tower", None) if model.kind == "sentence" else None
    reads = {"sentence": {"text" if tower == "text" else "pictures"}, "clip": {"text", "pictures"}}
    for source in inputs.sources:
        if source.holds not in reads.get(model.kind, {"pictures"}):
            raise ValueError(
                f"the input has {source.holds}, which this model of kind {model.kind} does not "
                f"read: give it {'pictures' if source.holds == 'text' else 'texts'}"
            )


def _identity(model: SparseModel) -> str:
    """A hash of weights and options."""
    description = json.dumps([model.kind, model.options(), fingerprint(model)], default=str)
    return hashlib.sha256(description.encode()).hexdigest()
