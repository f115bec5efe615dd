"""A name for every dimension, from the words or classes of the items that fire it most."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from ncl_multi.codes.explain import unit_csr
from ncl_multi.codes.features import Features

MIXED = "mixed"
"""The name of a dimension whose strongest items have nothing in common that a name could say."""

_TOP_ITEMS = 20
_LIFT = 1.5
"""A term must be this much more frequent among the strongest items than among all."""
_COVERED = 0.4
"""A name must fit this share of the strongest items, weighed by how strongly they fire."""
_ADDS = 0.15
"""Share of the items not yet covered that a further term must cover."""
_JOINS = 3.0
"""How much more frequent than among all items a further term must be; "man" is not added."""
_COHESION = 3.0
"""Two words make a term if they are adjacent this much more often than by chance."""
_PAIR = 1.25
"""Bonus for a term of two words."""
_CLEARER = 0.2
"""A class is the name if it fits this share of the strongest items more than the words do."""

_WORD = re.compile(r"[^\W\d_]{2,}(?:'[^\W\d_]+)?")
_PAUSE = re.compile(r"[,;:.!?()/|]")
"""Where the words before and after do not belong together: "rock, scale" is not a term."""
_VOWEL = re.compile("[aeiouy]")
# fmt: off
_STOP_WORDS = frozenset("""
    a about above across after again against all almost along also although always am among an and
    another any anyone anything are around as at away back be became because become been before
    behind being below beside between both but by came can cannot come could did do does doing
    done down during each either else enough etc even ever every everyone everything few first for
    from further gave get gets getting give given gives go goes going gone got had has have having
    he her here hers herself him himself his how however if in indeed instead into is it its
    itself just keep kind last least less let like likely made make makes making many may maybe me
    might mine more most much must my myself near need neither never next no nobody none nor not
    nothing now of off often on once one only onto or other others our ours out over own part per
    perhaps put puts quite rather really same say says see seem seems seen several shall she
    should since so some someone something sometimes soon still such take takes taken than that
    the their theirs them themselves then there these they thing things this those though three
    through thus to together too toward towards two under until up upon us use used uses using
    very via was way we well went were what when where whether which while who whole whom whose
    why will with within without would yes yet you your yours yourself ain't aren't can't couldn't
    didn't doesn't don't hadn't hasn't haven't he's i'd i'll i'm i've isn't it's let's she's
    shouldn't that's there's they're they've wasn't we're we've weren't what's who's won't
    wouldn't you'd you'll you're you've
""".split())  # noqa: SIM905
# fmt: on
_IRREGULAR = {
    "women": "woman",
    "men": "man",
    "children": "child",
    "people": "person",
    "feet": "foot",
    "teeth": "tooth",
    "mice": "mouse",
    "geese": "goose",
    "leaves": "leaf",
    "wolves": "wolf",
}  # fmt: skip


class _Terms(NamedTuple):
    """Which item contains which term, and the usual spelling of each term."""

    held: csr_array
    spellings: Sequence[str]


class _Name(NamedTuple):
    """A name, empty if there is none, and the share of a dimension's strongest items it fits."""

    text: str
    fit: float


class _Choice(NamedTuple):
    """Terms that could name a dimension, best first.

    `held` marks which of its strongest items contain them, `weights` how strongly each item fires,
    `usual` which share of all items contains a term, and `related` which terms occur together and
    have no word in common.
    """

    terms: np.ndarray
    held: np.ndarray
    weights: np.ndarray
    usual: np.ndarray
    related: np.ndarray


def name_sides(sides: Sequence[Features]) -> list[str]:
    """Names for the dimensions that several sides of a run have in common.

    Names in `about["names"]` are used as they are. Otherwise names come from words, first those of
    CLIP's texts; dimensions without a name are then named by the items of the other sides.
    """

    def least_wordy(side: Features) -> tuple[bool, bool]:
        return side.about.get("side") != "text", not side.items

    by_words = sorted(sides, key=least_wordy)
    stored = by_words[0].about.get("names")
    if stored:
        dims = by_words[0].dims
        if not isinstance(stored, list) or set(map(type, stored)) != {str} or len(stored) != dims:
            raise ValueError(
                f"the names of dimensions must be a list of {dims} texts; got {stored!r:.80}"
            )
        return stored
    names = name_dimensions(by_words[0])
    for side in by_words[1:]:
        if any(name in ("", MIXED) for name in names):
            pairs = zip(names, name_dimensions(side), strict=True)
            names = [(new or old) if old in ("", MIXED) else old for old, new in pairs]
    return names


def name_dimensions(features: Features, codes: Any | None = None, words: int = 3) -> list[str]:
    """A name for every dimension, from the words or classes of the items that fire it most.

    A term is a word, or two words that belong together, as "ice cream". Terms are weighed like
    c-TF-IDF: by their share of a dimension's strongest items, times the logarithm of how much
    larger that is than their share of all items and of what other dimensions fire for; so words
    that occur everywhere are not used. A name is the best term. Further terms are added if it does
    not fit enough of the items, or if another dimension has the same name. A class is the name if
    there is no name by words, or if the class fits clearly more of the items. Names that are still
    equal get a word of their strongest items: "mammals", "mammals: camel". A dimension whose
    strongest items have nothing in common is called "mixed". One that never fires has the empty
    name, as have all if there are neither words nor classes.

    Args:
        features: Items with text, or labels with `about["classes"]`.
        codes: Name the dimensions of these codes of the same items instead of `features.z`.
        words: Most words of a name, without the one that tells it from an equal name; 1 leaves
            equal names as they are.

    Example:
        >>> import torch
        >>> items = ["a black dog", "a brown dog", "a red car", "a fast car"]
        >>> z = torch.tensor([[1.0, 0.0], [0.9, 0.0], [0.0, 1.0], [0.0, 0.9]])
        >>> name_dimensions(Features(z, items=items), words=1)
        ['dog', 'car']
    """
    strongest = _strongest(unit_csr(features.z if codes is None else codes, signed=True))
    by_words, by_class = _words(features.items or [], pairs=words > 1), _classes(features)
    names = [
        of_class if not of_words.text or of_class.fit >= of_words.fit + _CLEARER else of_words
        for of_words, of_class in zip(
            _names(strongest, by_words, words), _names(strongest, by_class, None), strict=True
        )
    ]
    texts = _named_by_an_item(names, strongest, by_words) if words > 1 else [n.text for n in names]
    fires = np.diff(strongest.indptr) > 0
    nameless = MIXED if by_words.spellings or by_class.spellings else ""
    return [(text or nameless) if alive else "" for text, alive in zip(texts, fires, strict=True)]


def belongs(name: str, features: Features, row: int) -> bool:
    """Whether an item contains one of the terms of a name, or is of a class of that name.

    Example:
        >>> import torch
        >>> belongs("ice cream, dogs", Features(torch.ones(1, 1), items=["my dog"]), 0)
        True
    """
    terms = [name, *re.split(", |: ", name), *name.split(": ")]
    if any(label in terms for label in _labels(features, row)):
        return True
    text = "" if features.items is None else _key(features.items[row])
    return any(f" {_key(term)} " in f" {text} " for term in terms if _key(term))


def without_endings(name: str) -> str:
    """The words of a name without their endings: equal for names that say the same.

    Example:
        >>> without_endings("Buildings") == without_endings("building")
        True
        >>> without_endings("class 1") == without_endings("class 2")
        False
    """
    return " ".join(map(_stem, re.findall(r"[^\W_]+", name.lower()))) or name


def _names(strongest: csr_array, terms: _Terms, words: int | None) -> list[_Name]:
    """The best terms of each dimension, and more terms for dimensions with the same name.

    Without a limit of `words` a name is one term, however long.
    """
    if not terms.spellings:
        return [_Name("", 0.0)] * strongest.shape[0]
    choices = _choices(strongest, terms)
    lengths = np.array(
        [1 if words is None else len(spelling.split()) for spelling in terms.spellings]
    )
    chosen = [_cover(choice, lengths, words or 1) for choice in choices]
    _tell_apart(chosen, choices, lengths, words or 1)
    return [
        _Name(", ".join(terms.spellings[term] for term in name), _fit(choice, name))
        for name, choice in zip(chosen, choices, strict=True)
    ]


def _named_by_an_item(names: Sequence[_Name], strongest: csr_array, terms: _Terms) -> list[str]:
    """Names; of equal ones, all but the best fitting get a word of their own items.

    Equal are also a class and its word, as "buildings" and "building".
    """
    texts = [name.text for name in names]
    if not terms.spellings:
        return texts
    taken, usual = Counter(map(without_endings, texts)), terms.held.mean(axis=0)
    shares = csr_array(strongest @ terms.held)
    for dim in sorted(range(len(names)), key=lambda dim: names[dim].fit):
        text = texts[dim]
        if not text or taken[without_endings(text)] < 2:
            continue
        entries = slice(*shares.indptr[dim : dim + 2])
        term, share = shares.indices[entries], shares.data[entries]
        lift = share / usual[term]
        score = np.where(lift >= _LIFT, share * np.log(lift), 0)
        inside = set(_key(text).split())
        longer = (
            f"{text}: {terms.spellings[n]}"
            for n in term[np.lexsort((term, -score))[: np.count_nonzero(score)]]
            if inside.isdisjoint(_key(terms.spellings[n]).split())
        )
        new = next((name for name in longer if without_endings(name) not in taken), None)
        if new is not None:
            taken[without_endings(text)] -= 1
            taken[without_endings(new)] += 1
            texts[dim] = new
    return texts


def _choices(strongest: csr_array, terms: _Terms, most: int = 24) -> list[_Choice]:
    shares = csr_array(strongest @ terms.held)
    counts = csr_array((strongest > 0).astype(np.float32) @ terms.held)
    shares.sort_indices()
    counts.sort_indices()
    usual = terms.held.mean(axis=0)
    alive = max(1, np.count_nonzero(np.diff(strongest.indptr)))
    elsewhere = np.maximum(usual, shares.sum(axis=0) / alive)
    together = csr_array(terms.held.T @ terms.held)
    parts = [set(_key(spelling).split()) for spelling in terms.spellings]
    pairs = np.array([" " in spelling for spelling in terms.spellings])
    place = np.full(len(terms.spellings), -1)
    choices = []
    for dim in range(strongest.shape[0]):
        strong_entries = slice(*strongest.indptr[dim : dim + 2])
        term_entries = slice(*shares.indptr[dim : dim + 2])
        term, share = shares.indices[term_entries], shares.data[term_entries]
        # A term of a single item describes that item, not the dimension.
        fits = counts.data[term_entries] >= min(2, strong_entries.stop - strong_entries.start)
        fits &= share >= _LIFT * usual[term]
        term, share = term[fits], share[fits]
        score = share * np.log(share / elsewhere[term]) * np.where(pairs[term], _PAIR, 1)
        term = term[np.lexsort((term, -score))][:most]
        held = _submatrix(terms.held, strongest.indices[strong_entries], term, place) > 0
        by_accident = np.outer(usual[term], usual[term]) * terms.held.shape[0]
        related = _submatrix(together, term, term, place) >= _LIFT * by_accident
        for pair in np.flatnonzero(pairs[term]):
            inside = parts[term[pair]]
            repeated = [not inside.isdisjoint(parts[other]) for other in term]
            related[pair, repeated] = related[repeated, pair] = False
        choices.append(_Choice(term, held, strongest.data[strong_entries], usual[term], related))
    return choices


def _submatrix(
    matrix: csr_array, rows: np.ndarray, columns: np.ndarray, place: np.ndarray
) -> np.ndarray:
    """`matrix[rows][:, columns]`, dense; scipy takes ten times as long for a few rows.

    `place` has an entry of -1 for each column of the matrix, and has them again afterwards.
    """
    block = np.zeros((len(rows), len(columns)))
    place[columns] = np.arange(len(columns))
    for at, row in enumerate(rows):
        entries = slice(matrix.indptr[row], matrix.indptr[row + 1])
        column = place[matrix.indices[entries]]
        block[at, column[column >= 0]] = matrix.data[entries][column >= 0]
    place[columns] = -1
    return block


def _cover(choice: _Choice, lengths: np.ndarray, words: int) -> list[int]:
    """The best term, or the fewest that together fit enough of the items; else none."""
    chosen: list[int] = []
    covered, shares = np.zeros(len(choice.weights), bool), choice.weights @ choice.held
    for _ in range(words):
        room = words - int(lengths[choice.terms[chosen]].sum())
        gains = choice.weights @ (choice.held & ~covered[:, None]) - choice.usual
        adds = (lengths[choice.terms] <= room) & (gains >= _ADDS)
        if chosen:
            adds &= shares >= _JOINS * choice.usual
        # Words that never occur together are two things: such a dimension is mixed.
        adds &= choice.related[chosen].all(axis=0)
        if not adds.any():
            break
        # Terms are sorted by score: the first is the best single term.
        best = int(np.where(adds, gains, 0).argmax()) if chosen else int(adds.argmax())
        chosen.append(best)
        covered |= choice.held[:, best]
        # Subtract the share of items that contain these terms by chance.
        usual = choice.usual[chosen].sum()
        if choice.weights @ covered - usual >= _COVERED * (1 - usual):
            return [int(choice.terms[n]) for n in sorted(chosen, key=lambda n: -shares[n])]
    return []


def _tell_apart(
    chosen: list[list[int]], choices: list[_Choice], lengths: np.ndarray, words: int
) -> None:
    """Add a distinguishing term to dimensions with the same name, except the best fitting one."""
    same = defaultdict(list)
    for dim, term_ids in enumerate(chosen):
        if term_ids:
            same[tuple(term_ids)].append(dim)
    taken = set(same)
    for name, dims in same.items():
        room = words - int(lengths[list(name)].sum())
        for dim in sorted(dims, key=lambda dim: -_fit(choices[dim], name))[1:]:
            choice = choices[dim]
            shares = choice.weights @ choice.held
            adds = (shares - choice.usual >= _ADDS / 2) & (shares >= _JOINS * choice.usual)
            adds &= (lengths[choice.terms] <= room) & ~np.isin(choice.terms, name)
            adds &= choice.related[np.isin(choice.terms, name)].all(axis=0)
            longer = ((*name, int(term)) for term in choice.terms[adds])
            new = next((terms for terms in longer if terms not in taken), None)
            if new is not None:
                taken.add(new)
                chosen[dim] = list(new)


def _fit(choice: _Choice, name: Sequence[int]) -> float:
    inside = (choice.terms[:, None] == np.array(name, int)).any(axis=1)
    return float(choice.weights @ choice.held[:, inside].any(axis=1))


def _strongest(z: csr_array) -> csr_array:
    """Row d: the items that fire dimension d most, with their shares of its weight."""
    columns = csr_array(z.T)
    columns.data[columns.data < 0] = 0
    columns.eliminate_zeros()
    for dim in np.flatnonzero(np.diff(columns.indptr) > _TOP_ITEMS):
        entries = columns.data[columns.indptr[dim] : columns.indptr[dim + 1]]
        entries[np.argsort(-entries, kind="stable")[_TOP_ITEMS:]] = 0
    columns.eliminate_zeros()
    total = np.repeat(columns.sum(axis=1), np.diff(columns.indptr))
    columns.data = columns.data / total
    return columns


def _words(items: Sequence[str], *, pairs: bool) -> _Terms:
    """Words and pairs of words, without stop words and terms of one item only."""
    spellings: dict[str, Counter[str]] = defaultdict(Counter)
    terms_by_item = []
    for item in items:
        tokens = _tokens(item)
        singles = [token for token in tokens if token not in _STOP_WORDS]
        together = [
            f"{a} {b}"
            for phrase in (_PAUSE.split(item) if pairs else ())
            for a, b in pairwise(_tokens(phrase))
            if a not in _STOP_WORDS and b not in _STOP_WORDS
        ]
        for term in (*singles, *together):
            spellings[_key(term)][term] += 1
        terms_by_item.append({_key(term) for term in (*singles, *together)})
    count = Counter(term for item_terms in terms_by_item for term in item_terms)

    def fits(term: str) -> bool:
        parts = term.split()
        if count[term] < min(2, len(items)) or len(parts) == 1:
            return count[term] >= min(2, len(items))
        return count[term] * len(items) >= _COHESION * count[parts[0]] * count[parts[1]]

    frequent = {term for term in count if fits(term)}
    bag, vocabulary = _bag([sorted(item_terms & frequent) for item_terms in terms_by_item])
    return _Terms(bag, [spellings[term].most_common(1)[0][0] for term in vocabulary])


def _classes(features: Features) -> _Terms:
    if features.y is None:
        return _Terms(csr_array((len(features), 0)), [])
    return _Terms(*_bag([_labels(features, row) for row in range(len(features))]))


def class_names(features: Features) -> list[str]:
    """The name of each item's class; those that `about["classes"]` leaves out get their number."""
    if features.y is None or features.y.ndim != 1:
        raise ValueError("features need one label per row to name its class")
    names = features.about.get("classes") or []
    if not isinstance(names, list):
        raise ValueError(f"classes must be a list of names; got {type(names).__name__}")
    return [
        str(names[int(y)]) if 0 <= y < len(names) else f"class {y}" for y in features.y.tolist()
    ]


def _labels(features: Features, row: int) -> list[str]:
    """The class of an item, or its attributes where labels are a table of them."""
    if features.y is None or features.y.is_floating_point():
        return []
    label = features.y[row].tolist()
    if isinstance(label, list):
        names = features.about.get("factors") or [f"factor {n}" for n in range(len(label))]
        return [f"{name} {value}" for name, value in zip(names, label, strict=True)]
    names = features.about.get("classes") or ()
    if label < 0:
        return []
    return [str(names[label]) if label < len(names) else f"class {label}"]


def _bag(tags: Sequence[Sequence[str]]) -> tuple[csr_array, list[str]]:
    vocabulary = sorted({tag for item_tags in tags for tag in item_tags})
    place = {tag: column for column, tag in enumerate(vocabulary)}
    columns = [place[tag] for item_tags in tags for tag in item_tags]
    rows = np.repeat(np.arange(len(tags)), [len(item_tags) for item_tags in tags])
    shape = (len(tags), len(vocabulary))
    return csr_array((np.ones(len(columns), np.float32), (rows, columns)), shape=shape), vocabulary


def _tokens(text: str) -> list[str]:
    return [word.removesuffix("'s") for word in _WORD.findall(text.lower())]


@lru_cache(maxsize=1 << 16)
def _key(text: str) -> str:
    """Words without their endings: "dogs" and "dog" are one term, "surfing" and "surf" too."""
    return " ".join(map(_stem, _tokens(text)))


def _stem(word: str) -> str:
    word = _IRREGULAR.get(word, word)
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    for ending in ("ing", "ed"):
        stem = word.removesuffix(ending)
        if stem != word and len(stem) > 2 and _VOWEL.search(stem) and not word.endswith("eed"):
            word = stem[:-1] if stem[-1] == stem[-2] and stem[-1] not in "lsz" else stem
            break
    return word.removesuffix("e") if len(word) > 3 else word
