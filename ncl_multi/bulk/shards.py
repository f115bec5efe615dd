"""The output folder of bulk encoding: a manifest, shards of codes, and the rows that were refused.

    manifest.json            model, input and options: must be the same for a run to resume
    codes-00000.parquet      one line per row: row, id, indices, values
    rejects-00000.jsonl      rows of that shard without a code: row, where, reason

`row` (int64) counts the rows of the input from 0. `id` (string) is the row's id, or the path of a
picture; it may be null. `indices` (list of int32) are the active dimensions in ascending order,
`values` (list of float32) their values; a row has unit length. The schema's metadata has the key
`ncl_multi`: a JSON object with the format, the width of the codes and the model's fingerprint.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from ncl_multi.bulk.inputs import Refused, arrow
from ncl_multi.data.parquet import read_parquet, whole_parquet
from ncl_multi.files import DAMAGE, atomic, parse_json, read_json

FORMAT = "ncl_multi.bulk/1"
_KEYS = ("format", "model", "input", "options")
_MANIFEST = "manifest.json"
_METADATA = b"ncl_multi"


@dataclass(frozen=True)
class Codes:
    """The codes of one shard: row i of `z` belongs to row `rows[i]` of the input."""

    rows: np.ndarray
    ids: list[str | None]
    z: csr_array


def claim(folder: Path, manifest: dict[str, Any]) -> None:
    """Claim the folder for this run, or refuse it if it belongs to another one.

    Call it while the folder is locked. Unfinished files of killed processes are removed.
    """
    manifest = {"format": FORMAT, **manifest}
    path = folder / _MANIFEST
    if not path.exists():
        others = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
        if others:
            raise ValueError(
                f"{folder} contains {others[0]} and no {_MANIFEST}: choose an empty folder. "
                f"Nothing was written"
            )
        with atomic(path) as unfinished:
            unfinished.write_text(json.dumps(manifest, indent=2))
    stored = read_json(path, keys=_KEYS)
    for key in _KEYS:
        if stored[key] != manifest[key]:
            raise ValueError(
                f"{folder} belongs to another run: its {key} is {json.dumps(stored[key])}, this "
                f"one's is {json.dumps(manifest[key])}. Nothing was written. Choose another "
                f"folder, or run with the same {key} to resume"
            )
    for leftover in folder.glob(".*.part"):
        leftover.unlink()


def shard(folder: Path, number: int) -> Path:
    """Path of a shard."""
    return folder / f"codes-{number:05d}.parquet"


def rejects(folder: Path, number: int) -> Path:
    """Path of the rows that a shard has no code for."""
    return folder / f"rejects-{number:05d}.jsonl"


def write_shard(
    folder: Path, number: int, codes: Codes, refused: Sequence[Refused], model: str
) -> None:
    """Write the rows without a code, then the shard: if the shard exists, both are complete."""
    pa, parquet = arrow()
    if refused:
        with atomic(rejects(folder, number)) as unfinished:
            lines = [json.dumps(row._asdict()) for row in sorted(refused)]
            unfinished.write_text("\n".join([*lines, ""]))
    about = {"format": FORMAT, "dims": codes.z.shape[1], "model": model, "rejects": len(refused)}
    lists = [
        pa.ListArray.from_arrays(pa.array(codes.z.indptr.astype(np.int32)), pa.array(values))
        for values in (codes.z.indices.astype(np.int32), codes.z.data.astype(np.float32))
    ]
    columns = {
        "row": pa.array(codes.rows.astype(np.int64)),
        "id": pa.array(codes.ids, pa.string()),
        "indices": lists[0],
        "values": lists[1],
    }
    table = pa.table(columns).replace_schema_metadata({_METADATA: json.dumps(about)})
    with atomic(shard(folder, number)) as unfinished:
        # A dictionary of the dimensions saves room; one of the values only takes time.
        dictionary = ["indices.list.element"]
        parquet.write_table(table, unfinished, compression="zstd", use_dictionary=dictionary)


def count(folder: Path, number: int) -> tuple[int, int]:
    """Rows of a shard with a code, and without one."""
    _, parquet = arrow()
    path = shard(folder, number)
    with whole_parquet(path):
        schema = parquet.read_metadata(path)
    return schema.num_rows, _about(schema.metadata, path)["rejects"]


def read_codes(folder: str | Path) -> Iterator[Codes]:
    """The shards of a finished run, one at a time.

    Example:
        for codes in read_codes("out"):
            index.add(codes.rows, codes.z)
    """
    folder = Path(folder)
    manifest = read_json(folder / _MANIFEST, keys=_KEYS)
    shards = manifest["input"].get("shards") if isinstance(manifest["input"], dict) else None
    if not isinstance(shards, int):
        raise ValueError(f"{folder / _MANIFEST} must give the number of shards; got {shards!r:.80}")
    present = {path.name for path in folder.glob("codes-*.parquet")}
    first = next((n for n in range(shards) if shard(folder, n).name not in present), None)
    if first is not None:
        raise ValueError(
            f"{folder} is unfinished: {shard(folder, first).name} is missing, "
            f"{shards - len(present)} of {shards} in all. Run ncl-encode again with the same input "
            f"to resume"
        )
    for number in range(shards):
        path = shard(folder, number)
        try:
            codes = _read(path)
        except DAMAGE as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        yield codes


def _read(path: Path) -> Codes:
    pa, parquet = arrow()
    lists = pa.list_(pa.int32()), pa.list_(pa.float32())
    names = {"row": pa.int64(), "id": pa.string(), "indices": lists[0], "values": lists[1]}
    schema = parquet.read_schema(path)
    if [schema.field(name).type for name in names] != list(names.values()):
        raise ValueError(f"its columns must be {names}")
    about = _about(schema.metadata, path)
    table = read_parquet(path, list(names)).combine_chunks()
    parts = []
    for name, dtype in (("indices", np.int32), ("values", np.float32)):
        # Without rows there are no chunks.
        chunk = next(iter(table[name].chunks), pa.array([], names[name]))
        parts.append((chunk.offsets.to_numpy(), chunk.values.to_numpy().astype(dtype, copy=False)))
    (starts, indices), (_, values) = parts
    z = csr_array((values, indices, starts), shape=(table.num_rows, about["dims"]))
    z.check_format(full_check=True)
    return Codes(table["row"].to_numpy(), table["id"].to_pylist(), z)


def _about(metadata: Any, path: Path) -> dict[str, Any]:
    about = parse_json((metadata or {}).get(_METADATA, b"null"), path)
    numbers = ("dims", "rejects")
    if not (
        isinstance(about, dict)
        and about.get("format") == FORMAT
        and all(isinstance(about.get(name), int) for name in numbers)
    ):
        raise ValueError(
            f"{path} was not written by ncl-encode; remove it, or choose another folder"
        )
    return about
