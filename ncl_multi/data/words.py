"""WordNet: what words mean, in one sentence each, and how they are used."""

import re
from dataclasses import dataclass

from ncl_multi.data.fetch import fetch, pinned
from ncl_multi.data.members import tar_files

PACKAGE = pinned("wordnet")
CATEGORIES = [
    "adj.all", "adj.pert", "adv.all", "noun.Tops", "noun.act", "noun.animal", "noun.artifact",
    "noun.attribute", "noun.body", "noun.cognition", "noun.communication", "noun.event",
    "noun.feeling", "noun.food", "noun.group", "noun.location", "noun.motive", "noun.object",
    "noun.person", "noun.phenomenon", "noun.plant", "noun.possession", "noun.process",
    "noun.quantity", "noun.relation", "noun.shape", "noun.state", "noun.substance", "noun.time",
    "verb.body", "verb.change", "verb.cognition", "verb.communication", "verb.competition",
    "verb.consumption", "verb.contact", "verb.creation", "verb.emotion", "verb.motion",
    "verb.perception", "verb.possession", "verb.social", "verb.stative", "verb.weather",
    "adj.ppl",
]  # fmt: skip
"""WordNet's lexicographer files."""
_FILES = tuple(f"dict/data.{kind}" for kind in ("noun", "verb", "adj", "adv"))


@dataclass(frozen=True)
class Synset:
    """Words with one meaning, the sentence that explains it, and examples of their use."""

    words: tuple[str, ...]
    gloss: str
    examples: tuple[str, ...]
    category: int
    """Its place in `CATEGORIES`."""

    @property
    def entry(self) -> str:
        """As a dictionary prints it: the words, a colon, the gloss."""
        return f"{', '.join(self.words)}: {self.gloss}"


def wordnet() -> list[Synset]:
    """The 117,791 meanings of WordNet 3.1: nouns, verbs, adjectives, adverbs, in file order."""
    files = dict(tar_files(fetch(PACKAGE), lambda name: name.endswith(_FILES)))
    if len(files) != len(_FILES):
        raise ValueError(f"{PACKAGE.archive} should contain {len(_FILES)} files; got {len(files)}")
    lines = [
        line for name in sorted(files, key=_order) for line in files[name].decode().split("\n")
    ]
    # Lines of the licence start with two spaces.
    return [parse_synset(line) for line in lines if line and not line.startswith("  ")]


def parse_synset(line: str) -> Synset:
    """One line of WordNet's data files.

    Example:
        >>> walk = parse_synset('00 38 v 02 walk 0 go_on_foot 0 000 | move; "we walked home"')
        >>> walk.entry, walk.examples, CATEGORIES[walk.category]
        ('walk, go on foot: move', ('we walked home',), 'verb.motion')
    """
    fields, _, explained = line.partition(" | ")
    columns = fields.split()
    # The number of words is hexadecimal; an adjective may end in its place, as in galore(ip).
    words = [columns[4 + 2 * word].partition("(")[0] for word in range(int(columns[3], 16))]
    gloss = re.split(r'[;:]?\s*"', explained)[0].strip()
    return Synset(
        tuple(word.replace("_", " ") for word in words),
        gloss,
        tuple(example.strip() for example in re.findall(r'"([^"]+)"', explained)),
        int(columns[1]),
    )


def _order(name: str) -> int:
    return next(place for place, file in enumerate(_FILES) if name.endswith(file))
