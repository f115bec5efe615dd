"""Weights, gradients and optimizer state split over processes, for models that do not fit a device.

FSDP2: each process keeps its share of every weight, and gathers whole weights when they are used.
All processes write their shares of a checkpoint, which any number of processes can read.
"""

import copy
import io
import pickle
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ncl_multi.distributed import all_reduce_sum, barrier, world_size
from ncl_multi.files import DAMAGE, check_tensors, read_bytes
from ncl_multi.training.run_folder import ADVICE, RunFolder

Objective = TypeVar("Objective", bound=nn.Module)

# Layers with fewer weights are gathered together with the surrounding ones.
_LEAST_WEIGHTS = 1_000_000
_MOST_METADATA = 2**26
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def shard(
    objective: Objective, device: torch.device, least_weights: int = _LEAST_WEIGHTS
) -> Objective:
    """A copy whose weights are split over all processes, on their devices.

    It starts with the weights of the first process. Layers in a `ModuleList` or
    `Sequential` are gathered one at a time; everything else for a whole step. With one process
    there is nothing to split.
    """
    objective = copy.deepcopy(objective)
    if world_size() == 1:
        return objective.to(device)
    for value in (*objective.parameters(), *objective.buffers()):
        local = value.detach().to(device)
        dist.broadcast(local, 0)
        value.detach().copy_(local)
    mesh = init_device_mesh(device.type, (world_size(),))
    for layer in _layers(objective, least_weights):
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


@torch.no_grad()
def copy_whole_weights(sharded: nn.Module, objective: nn.Module) -> None:
    """Give an objective the weights of its sharded copy, one at a time, on all processes."""
    targets = dict(objective.named_parameters()) | dict(objective.named_buffers())
    for name, value in (*sharded.named_parameters(), *sharded.named_buffers()):
        targets[name].copy_(value.full_tensor() if isinstance(value, DTensor) else value)


class ShardedRunFolder(RunFolder):
    """A run folder with one folder per checkpoint, `checkpoints/<step>`; only the last stays."""

    @property
    def checkpoint(self) -> Path:
        whole = self._whole_checkpoints()
        return whole[-1] if whole else self._folder / "0"

    def _read(self, parts: dict[str, Any]) -> tuple[dict[str, Any], int]:
        state, reader = _tensors(parts), _Reader(self.checkpoint)
        try:
            # Read the metadata first: here its errors are not wrapped by torch.
            reader.read_metadata()
            with _one_process_is_meant():
                dcp.load(state, storage_reader=reader)
        except DAMAGE as error:
            raise ValueError(f"{self.checkpoint} cannot be read: {error}. {ADVICE}") from error
        except dcp.api.CheckpointException as error:
            raise ValueError(
                f"{self.checkpoint} does not fit this model: {_reasons(error)}. {ADVICE}"
            ) from error
        return state, int(self.checkpoint.name)

    def _apply(self, parts: dict[str, Any], state: dict[str, Any]) -> None:
        model, optimizer = _named(parts)
        set_state_dict(
            parts["model"],
            parts["optimizer"],
            model_state_dict=model | state["model"],
            optim_state_dict=optimizer | state["optimizer"],
            options=_FLAT,
        )

    def _broken(self, weights: Mapping[str, Tensor]) -> list[str]:
        local = [x.to_local() if isinstance(x, DTensor) else x for x in weights.values()]
        flags = torch.stack([(~x.isfinite()).any().float() for x in local])
        return [name for name, n in zip(weights, all_reduce_sum(flags), strict=True) if n]

    def _write(self, parts: dict[str, Any], done: int) -> None:
        try:
            with _one_process_is_meant():
                dcp.save(_tensors(parts), checkpoint_id=self._folder / str(done))
        except dcp.api.CheckpointException as error:
            raise OSError(_reasons(error)) from error
        barrier()
        if self.main:
            for old in self._whole_checkpoints()[:-1]:
                shutil.rmtree(old)

    def _forget(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        if self.out is None:
            raise ValueError("a run in memory has no checkpoint")
        return self.out / "checkpoints"

    def _whole_checkpoints(self) -> list[Path]:
        """Complete checkpoints, by step: the metadata is written last."""
        metadata_files = [p for p in self._folder.glob("*/.metadata") if p.parent.name.isdecimal()]
        return sorted((p.parent for p in metadata_files), key=lambda folder: int(folder.name))


def _reasons(error: Any) -> str:
    """Why a checkpoint was not read or written, of each process that failed."""
    return "; ".join(str(failure[0]) for failure in error.failures.values())


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Torch warns that there are no other processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        yield


class _Reader(dcp.FileSystemReader):
    """Reads tensors only. Torch's reader would run any code that the metadata names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # From memory, where no more can be read than there is.
        content = read_bytes(Path(self.path) / ".metadata", _MOST_METADATA)
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata) or not (
            isinstance(metadata.state_dict_metadata, dict)
            and isinstance(metadata.storage_data, dict)
        ):
            raise ValueError("it is not the metadata of a checkpoint")
        if any(isinstance(m, BytesStorageMetadata) for m in metadata.state_dict_metadata.values()):
            raise ValueError("it contains something other than tensors")
        files = {item.relative_path for item in metadata.storage_data.values()}
        if any(Path(file).name != file for file in files):
            raise ValueError("it names files outside its folder")
        if any(item.transform_descriptors for item in metadata.storage_data.values()):
            raise ValueError("its tensors are packed")
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        # In memory: torch's view of a part of a file cannot be read from its end, as a zip is.
        content = super()._slice_file(file, sinfo).read(sinfo.length)
        check_tensors(content)
        return io.BytesIO(content)


# The unpickler that is written in Python: what sets attributes can be looked at there.
_Python: Any = pickle._Unpickler


class _MetadataUnpickler(_Python):
    dispatch: ClassVar[dict[int, Any]] = dict(_Python.dispatch)

    def load_build(self) -> None:
        # Attributes of a class are those of all its objects in this process.
        if callable(self.stack[-2]):
            raise ValueError("its metadata changes a class")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
    # It takes as much memory as its length says.
    del dispatch[pickle.BYTEARRAY8[0]]

    def find_class(self, module: str, name: str) -> Any:
        value = super().find_class(module, name) if module in _KNOWN else None
        if name in _KNOWN.get(module, ()) or (module == "torch" and isinstance(value, torch.dtype)):
            return value
        raise ValueError(f"its metadata names {module}.{name}")


_KNOWN = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip


def _tensors(parts: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint contains: weights, buffers and the optimizer's moments, by name.

    Settings of the optimizer come from the config, which is compared when a run resumes.
    """
    model, optimizer = _named(parts)
    moments = {name: value for name, value in optimizer.items() if name.startswith("state.")}
    return {"model": model, "optimizer": moments}


def _named(parts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights, and the whole optimizer state, by the names of the weights."""
    return get_state_dict(parts["model"], parts["optimizer"], options=_FLAT)


def _layers(model: nn.Module, least_weights: int) -> list[nn.Module]:
    """Layers to gather one at a time, inner ones first, without those that share a weight."""
    owners = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    parents = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    layers = dict.fromkeys(layer for parent in parents for layer in parent)
    return [
        layer
        for layer in reversed(layers)
        if sum(weight.numel() for weight in layer.parameters()) >= least_weights
        and all(owners[weight] == 1 for weight in layer.parameters())
    ]
