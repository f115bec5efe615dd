"""Embeddings that an API sent you: sparse codes, search, and why two texts match.

Usage:
    python recipes/one_line/array_from_an_api.py
"""

import re

from sklearn import datasets
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline

import ncl_multi as ncl


def read_texts() -> list[str]:
    """Sentences of the descriptions that come with scikit-learn's data sets."""
    sets = (datasets.load_iris, datasets.load_wine, datasets.load_breast_cancer,
            datasets.load_diabetes, datasets.load_digits, datasets.load_linnerud)  # fmt: skip
    whole = " ".join(load().DESCR for load in sets)
    sentences = re.split(r"(?<=[.:])\s+", re.sub(r"\s+", " ", whole))
    return [sentence for sentence in dict.fromkeys(sentences) if len(sentence.split()) >= 6]


def main() -> None:
    texts = read_texts()
    # In place of the API: any model that turns a text into a row of numbers.
    embed = make_pipeline(TfidfVectorizer(), TruncatedSVD(48, random_state=0)).fit(texts)
    x = embed.transform(texts)

    coder = ncl.SparseCoder(dims=128, k=8, steps=60, random_state=0).fit(x)  # <- the line

    coder.name(texts)
    index = ncl.SparseIndex(coder.dims, coder.get_feature_names_out().tolist())
    index.add(range(len(texts)), coder.transform(x))
    query = coder.transform(embed.transform(["the classes of iris plants"]), query=True)
    for match in ncl.why(query, index, k=3):
        reasons = ", ".join(f"{part.name} {part.share:.2f}" for part in match.parts[:3])
        print(f"{match.score:.2f} {texts[match.id][:60]} ({reasons})")


if __name__ == "__main__":
    main()
