"""Topics of a corpus, several for each document: names, a page, and findings about a label.

Usage:
    python recipes/one_line/topics_of_a_corpus.py
"""

import inspect
import tempfile
from importlib import import_module
from pathlib import Path

from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline

import ncl_multi as ncl

MODULES = ("cluster", "fft", "interpolate", "linalg", "ndimage", "signal", "sparse", "stats")


def read_corpus() -> tuple[list[str], list[str]]:
    """Documents, and a label of each: what SciPy's functions do, and the module they are in."""
    label_of: dict[str, str] = {}
    for name in MODULES:
        for member in vars(import_module(f"scipy.{name}")).values():
            about = " ".join((inspect.getdoc(member) or "").split()[:60])
            if inspect.isfunction(member) and len(about.split()) == 60:
                label_of.setdefault(about, name)
    return list(label_of), list(label_of.values())


def main() -> None:
    texts, labels = read_corpus()
    # In place of a sentence encoder, whose embeddings know more: any row of numbers per text.
    embed = make_pipeline(TfidfVectorizer(stop_words="english"), TruncatedSVD(64, random_state=0))
    x = embed.fit_transform(texts)

    coder = ncl.SparseCoder(dims=128, k=6, steps=60, random_state=0).fit(x)  # <- the line

    coder.name(texts)
    for text, topics in zip(texts[:300:100], coder.topics(x[:300:100]), strict=True):
        print(text[:60], [f"{topic.name} {topic.share:.0%}" for topic in topics])
    for finding in coder.findings(x, labels)[:3]:
        print(f"{finding.name}: {finding.effect:+.0%} {finding.value}, p = {finding.p_value:.1g}")
    page = coder.atlas(x, texts, labels, out=Path(tempfile.mkdtemp()) / "topics")
    print(f"what each topic means: {page}")


if __name__ == "__main__":
    main()
