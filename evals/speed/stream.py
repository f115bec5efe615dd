"""How much memory does encoding a stream of texts take, and how fast is it?

Usage:
    python evals/speed/stream.py
"""

import random
import time
from pathlib import Path

import tyro
from measure import apart, forget_peak, resident_mb

from ncl_multi import data, wrap
from ncl_multi.log import show_messages
from ncl_multi.report import table, write_json


def stream(
    texts: int = 1_000_000,
    dims: int = 4096,
    k: int = 32,
    out: Path = Path("runs/speed/stream.json"),
) -> None:
    """Memory and speed of encoding a stream of short texts with a static encoder and a fresh head.

    Args:
        texts: How many to encode, each drawn from words of STS-B.
        dims: Width of the codes.
        k: Active entries of a code.
        out: File for the figures.
    """
    row = apart(_stream_cost, texts, dims, k)
    table(f"{texts:,} texts through a static encoder", {"ours": row})
    write_json(out, row)


def _stream_cost(texts: int, dims: int, k: int) -> dict[str, float]:

    model = wrap(data.wordllama(), dims)
    words = " ".join(data.stsb("train")[0]).split()
    draw = random.Random(0)  # noqa: S311
    drawn = (" ".join(draw.choices(words, k=8)) for _ in range(texts))
    # A first call, so that one-time loading is not measured.
    model.encode(words[:5000], k=k)
    rows, baseline_mb, start = 0, resident_mb("VmRSS"), time.perf_counter()
    forget_peak()
    for codes in model.stream(drawn, k=k):
        rows += codes.shape[0]
    took = time.perf_counter() - start
    extra = resident_mb("VmHWM") - baseline_mb
    return {"texts": rows, "extra MB": extra, "texts/s": rows / took}


if __name__ == "__main__":
    show_messages()
    tyro.cli(stream)
