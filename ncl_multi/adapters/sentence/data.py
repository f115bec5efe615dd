"""What sentence recipes read: examples with pairs, texts without, and their cached features."""

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import Dataset

from ncl_multi import data
from ncl_multi.adapters.sentence.encoder import fingerprint
from ncl_multi.adapters.sentence.model import NonNegEncoder
from ncl_multi.data.fetch import cache, say
from ncl_multi.files import atomic

_COLUMNS = ("anchor", "positive", "negative")


@dataclass(frozen=True)
class Corpus:
    """Sentences, each once; examples and pairs are rows of them, with what people say of pairs."""

    sentences: list[str]
    examples: Tensor
    pairs: Tensor
    scores: Tensor

    @classmethod
    def read(
        cls,
        source: str,
        limit: int | None,
        texts: str = "none",
        most: int | None = None,
    ) -> "Corpus":
        """Read examples and texts, less every sentence that STS-B judges in its dev or test split.

        Sentences are the same if they differ in case and punctuation only. `stsb` are the pairs of
        its training split with their scores. The first `limit` examples are read, and of
        everything at most the first `most`.
        """
        held = {
            plain(s) for split in ("dev", "test") for side in data.stsb(split)[:2] for s in side
        }
        examples = read_examples(source)[:limit][:most]
        pairs: list[tuple[str, ...]] = []
        scores: list[float] = []
        if texts == "stsb":
            first, second, scores = data.stsb("train")
            pairs += list(zip(first, second, strict=True))[:most]
            scores = scores[:most]

        def new(row: tuple[str, ...]) -> bool:
            return not held & set(map(plain, row))

        kept = [row for row in examples if new(row)]
        scored = [(row, score) for row, score in zip(pairs, scores, strict=True) if new(row)]
        dropped = len(examples) + len(pairs) - len(kept) - len(scored)
        if dropped:
            say(f"left out {dropped} examples whose sentences are in the STS-B dev or test split")
        if not kept:
            raise ValueError(
                f"{source} holds no example that is not in the STS-B dev or test split"
            )
        number: dict[str, int] = {}
        numbered = [
            torch.tensor([[number.setdefault(s, len(number)) for s in row] for row in rows])
            for rows in (kept, [row for row, _ in scored])
        ]
        return cls(
            list(number),
            numbered[0],
            numbered[1].view(-1, 2).long(),
            torch.tensor([score for _, score in scored]),
        )

    def draw_pairs(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the two sides of random pairs, and their scores; none if there are none."""
        drawn = torch.randint(max(1, len(self.pairs)), (count if len(self.pairs) else 0,))
        return self.pairs[drawn, 0], self.pairs[drawn, 1], self.scores[drawn]


def nearest(h: Tensor, count: int) -> Tensor:
    """Rows of each row's `count` nearest others by cosine, the nearest first.

    Example:
        >>> nearest(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), 1)[:, 0]
        tensor([1, 0, 1])
    """
    unit = normalize(h, dim=1)
    found = []
    for start in range(0, len(unit), 1024):
        cosines = unit[start : start + 1024] @ unit.T
        cosines[torch.arange(len(cosines)), start + torch.arange(len(cosines))] = -2
        found.append(cosines.topk(min(count, len(h) - 1), dim=1).indices)
    return torch.cat(found)


class Neighbours:
    """All rows of the features, each with its nearest others."""

    def __init__(self, h: Tensor, count: int):
        self.nearest = nearest(h, count)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Random rows and for each one of its neighbours, the nearer, the likelier."""
        drawn = torch.randint(len(self.nearest), (count,))
        rank = self.nearest.shape[1] ** torch.rand(count)
        return drawn, self.nearest[drawn, rank.long() - 1]


def cached_features(model: NonNegEncoder, sentences: Sequence[str]) -> Tensor:
    """The encoder's features of sentences, computed once and kept in the user's cache folder.

    They are found again by the encoder's weights, not by its name. Of several runs that want the
    same ones at the same time, one computes them.
    """
    told = json.dumps([fingerprint(model.encoder), model.encoder.pooling, *sentences]).encode()
    path = cache() / "sentence" / f"{hashlib.sha256(told).hexdigest()[:32]}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        try:
            return load_file(path)["h"]
        except (FileNotFoundError, SafetensorError, KeyError):
            h = model.embed(sentences)
        with atomic(path) as unfinished:
            save_file({"h": h.contiguous()}, unfinished)
    return h


class Rows(Dataset):
    """Row numbers of the sentences of an example, a whole batch at a time."""

    def __init__(self, rows: Tensor):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self.rows[indices]

    @staticmethod
    def together(batch: Any) -> Any:
        """For `collate_fn`: the batch is one already."""
        return batch


def read_examples(source: str | Path) -> list[tuple[str, ...]]:
    """Sentences, pairs or triplets from a csv or jsonl file, or `hf:<name>` on the hub.

    Documents, of `cranfield` or the lines of a txt file, give pairs of a passage and its document.

    The columns are `anchor`, `positive`, `negative` if there are any of that name, else the first
    one to three that hold text. A row with something missing is refused with its number.
    """
    source = str(source)
    if source == "snli":
        return list(data.snli())
    if source == "cranfield":
        return passages_and_documents(data.cranfield().documents)
    if source.startswith("hf:"):
        from datasets import load_dataset

        rows: Iterable[dict[str, Any]] = load_dataset(source[3:], split="train")
    elif not Path(source).is_file():
        raise ValueError(
            f"data must be snli, cranfield, a csv, jsonl or txt file, or hf:<name>; got {source}"
        )
    elif source.endswith(".csv"):
        try:
            with Path(source).open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{source} is no csv file: {error}") from error
    elif source.endswith(".jsonl"):
        rows = [_json_row(line, number, source) for number, line in enumerate(_lines(source))]
    elif source.endswith(".txt"):
        return passages_and_documents(_lines(source))
    else:
        raise ValueError(f"data files must end in .csv, .jsonl or .txt; got {source}")
    examples: list[tuple[str, ...]] = []
    columns: list[str] = []
    for number, row in enumerate(rows):
        # A csv line longer than the first one leaves the rest under the column None.
        if not isinstance(row, dict) or None in row:
            raise ValueError(
                f"row {number} of {source} does not fit the columns; got {str(row)[:80]}"
            )
        columns = columns or _text_columns(row, source)
        example = tuple(row.get(column) for column in columns)
        if not all(isinstance(sentence, str) and sentence for sentence in example):
            raise ValueError(f"row {number} of {source} lacks one of {', '.join(columns)}; drop it")
        examples.append(example)  # type: ignore[arg-type]
    if not examples:
        raise ValueError(f"{source} holds no rows")
    return examples


def passages_and_documents(documents: Sequence[str]) -> list[tuple[str, ...]]:
    """Sentences of documents, which stand for what may be asked, each with its document."""
    pairs: list[tuple[str, ...]] = [(p, text) for text in documents for p in passages_of(text)]
    if not pairs:
        raise ValueError("no document has a sentence of five words or more")
    return pairs


def passages_of(document: str, most: int = 4) -> list[str]:
    """The first sentence of a text and others spread over it, of five words or more.

    Example:
        >>> passages_of("A wing in a slipstream. Yes. It was tested in a tunnel.")
        ['A wing in a slipstream.', 'It was tested in a tunnel.']
    """
    parts = re.split(r"(?<=[.?!])\s+", document)
    parts = [part for part in parts if len(part.split()) >= 5]
    return parts[:: max(1, -(-len(parts) // most))]


def plain(sentence: str) -> str:
    """A sentence without case and punctuation: what tells whether two are the same."""
    letters = (letter if letter.isalnum() else " " for letter in sentence.lower())
    return " ".join("".join(letters).split())


def _lines(source: str) -> list[str]:
    """The lines of a text file that are not empty."""
    try:
        lines = Path(source).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no text in UTF-8: {error}") from error
    return [line for line in lines if line.strip()]


def _json_row(line: str, number: int, source: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"row {number} of {source} is no JSON: {error}") from error


def _text_columns(row: dict[str, Any], source: str) -> list[str]:
    named = [column for column in _COLUMNS if column in row]
    found = named or [name for name, value in row.items() if isinstance(value, str)][:3]
    if not found:
        raise ValueError(f"{source} has no column of text; got {', '.join(map(str, row))}")
    return found
