"""Topics of a corpus, several for each document: names, a page, and findings about a label.

Usage:
    python recipes/one_line/topics_of_a_corpus.py
"""

import tempfile
from pathlib import Path

from sklearn.datasets import load_digits

import ncl_multi as ncl

WORDS = "zero one two three four five six seven eight nine".split()  # noqa: SIM905


def main() -> None:
    # Any embeddings with something to read for each row; here 8x8 pictures of digits.
    digits = load_digits()
    x, labels = digits.data[:600], digits.target[:600]
    items = [f"a {WORDS[label]}" for label in labels]

    coder = ncl.SparseCoder(dims=64, k=4, steps=60, random_state=0).fit(x)  # <- the line

    coder.name(items)
    topics = coder.transform(x[:3])
    names = coder.get_feature_names_out()
    for row in range(3):
        topic_row = topics[[row]]
        parts = sorted(zip(topic_row.data, names[topic_row.indices], strict=True), reverse=True)
        print(items[row], [f"{name} {weight:.2f}" for weight, name in parts])
    for finding in coder.findings(x, items)[:3]:
        print(f"{finding.name}: {finding.effect:+.0%} {finding.value}, p = {finding.p_value:.1g}")
    page = coder.atlas(x, items, labels, out=Path(tempfile.mkdtemp()) / "topics")
    print(f"what each topic means: {page}")


if __name__ == "__main__":
    main()
