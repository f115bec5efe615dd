"""The settings of a saved model, checked before a library reads the folder.

They may come from a stranger: they must not run code, open or fetch what is elsewhere, or take
memory that the weights in the folder do not show.
"""

import math
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ncl_multi.files import parse_json, read_bytes

_CODE = (
    "auto_map",
    "custom_pipelines",
    "kernel_config",
    "quantization_config",
    "trust_remote_code",
)
# Keys of settings for which a library fetches or opens files outside of the folder.
_ELSEWHERE = (
    "checkpoint_path",
    "gguf_file",
    "tokenizer_name_or_path",
    "use_pretrained_backbone",
)
# How timm writes a model that it fetches from the hub or opens in another folder.
_SCHEME = re.compile(r"\s*(hf|local)[-_](hub|dir):", re.IGNORECASE)
# The settings of a tokenizer may list thousands of added tokens.
_MOST_SETTINGS = 2**22
# peft fetches the model that it names.
_FETCHES = ("adapter_config.json",)
_LAYERS = re.compile("layer|depth|num_blocks|stage|attention_types")
_MOST_LAYERS = 1000
# Settings of pictures: most of their numbers are widths.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_MOST_SIDE = 4096
_MOST_TOKENS = 2**19
_MOST_OF = {
    "image_size": _MOST_SIDE, "size": _MOST_SIDE, "crop_size": _MOST_SIDE,
    "context_length": _MOST_TOKENS, "pad_to_multiple_of": _MOST_TOKENS,
}  # fmt: skip
_MOST_VOCABULARY = 2**26
_loading = threading.Lock()
_loads: list[bool] = []


def check_no_code(folder: str | Path, suffixes: Collection[str]) -> None:
    """Refuse a model folder that could make the library which loads it run code.

    Only files with these suffixes may be there, and no settings file may have a key that names code
    (`auto_map`), allows it (`trust_remote_code`) or fetches it (an attention kernel of the hub), or
    that has weights or vocabularies taken from elsewhere. Call it before any library sees the
    folder.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
        >>> check_no_code(folder, {".json"})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: ...config.json has the key 'auto_map', which runs code; it was not loaded
    """
    for path in sorted(Path(folder).rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        if not path.is_file() or path.suffix not in suffixes or path.name in _FETCHES:
            raise ValueError(
                f"{path} does not belong in a saved model: expected only files that end in "
                f"{', '.join(sorted(suffixes))}. It was not loaded; remove it if you trust the rest"
            )
        if path.name == "tokenizer.json":
            _check_tokenizer(path)
        elif path.suffix == ".json" and path.name != "vocab.json":
            _check_settings(path)
        elif path.suffix != ".safetensors" and path.stat().st_size > _MOST_VOCABULARY:
            raise ValueError(f"{path} is larger than {_MOST_VOCABULARY} bytes; it was not loaded")


@contextmanager
def offline() -> Iterator[None]:
    """Keep libraries offline, in all threads, while a folder is loaded.

    Settings may name models that a library would fetch, in keys that are not checked.
    """
    from huggingface_hub import constants

    with _loading:
        _loads.append(constants.HF_HUB_OFFLINE)
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        with _loading:
            was_offline = _loads.pop()
            # If loads overlap, the last one to end restores the value.
            if not _loads:
                constants.HF_HUB_OFFLINE = was_offline


def nested_values(content: Any) -> Iterator[Any]:
    """A JSON value and all values in it."""
    pending = [content]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value


def _check_settings(path: Path) -> None:
    for value in nested_values(parse_json(read_bytes(path, _MOST_SETTINGS), path)):
        if isinstance(value, str) and _SCHEME.match(value):
            raise ValueError(f"{path} names {value!r:.80}, which is not in its folder")
        for key, setting in value.items() if isinstance(value, dict) else ():
            most = _most_of(path, key, value)
            for number in nested_values(setting) if isinstance(setting, list) else [setting]:
                if isinstance(number, int | float) and number > most:
                    raise ValueError(f"{path} asks for {key} {number}; at most {most}")
            kernel = key.endswith("_implementation") and setting not in (None, "eager", "sdpa")
            if key in _CODE or kernel:
                raise ValueError(f"{path} has the key {key!r}, which runs code; it was not loaded")
            shard = path.name.endswith(".index.json") and isinstance(setting, str)
            if (key in _ELSEWHERE and setting) or (shard and Path(setting).name != setting):
                raise ValueError(
                    f"{path} has the key {key!r}, which names files outside its folder; it was "
                    f"not loaded"
                )


def _most_of(path: Path, key: str, siblings: dict[str, Any]) -> int | float:
    """The largest number for a key: of what takes memory that the weights do not show."""
    if _LAYERS.search(key):
        return _MOST_LAYERS
    # Where both edges are given, the longest is a limit.
    limit = key == "max_pixels" or (key == "longest_edge" and "shortest_edge" in siblings)
    if path.name in _PROCESSORS and not limit:
        return _MOST_SIDE
    return _MOST_OF.get(key, math.inf)


def _check_tokenizer(path: Path) -> None:
    """Refuse a tokenizer that makes a very long text or list of tokens of a short text."""
    settings = parse_json(read_bytes(path, _MOST_VOCABULARY), path)
    if not isinstance(settings, dict):
        return
    parts = [
        value for value in nested_values(settings.get("normalizer")) if isinstance(value, dict)
    ]
    # A text is multiplied by each part of a sequence. The size of the second kind is not known.
    factor = math.prod(max(1, len(str(part.get("content", "")))) for part in parts)
    unknown = sum("precompiled_charsmap" in part for part in parts)
    ends = [
        value for value in nested_values(settings.get("post_processor")) if isinstance(value, dict)
    ]
    tokens = [len(end["ids"]) for end in ends if isinstance(end.get("ids"), list)]
    added = sum("SpecialToken" in end for end in ends) * max(tokens, default=0)
    padding = [n for n in nested_values(settings.get("padding")) if isinstance(n, int)]
    if factor > 64 or unknown > 1 or added > 1000 or max(padding, default=0) > _MOST_TOKENS:
        raise ValueError(f"{path} makes very long texts of short ones; it was not loaded")
