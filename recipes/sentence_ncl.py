"""Sparse sentence embeddings: any Hugging Face encoder, a non-negative head, a few active dims.

Usage:
    python recipes/sentence_ncl.py
    python recipes/sentence_ncl.py --model sentence-transformers/all-mpnet-base-v2 --dims 2048
    python recipes/sentence_ncl.py --data documents.txt --texts none --contrast 1 --agree 0
    python recipes/sentence_ncl.py --data pairs.csv --texts none --finetune --lr 2e-5
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro

from ncl_multi.head import Activation
from ncl_multi.training.fit import TrainConfig


@dataclass(frozen=True)
class Config(TrainConfig):
    """Sparse sentence embeddings with a non-negative head."""

    out: Path = Path("runs/sentence_ncl")
    data: str = "snli"
    """`snli`; a csv or jsonl of sentences, pairs or triplets; `hf:<name>` from the hub; or what is
    to be searched: `cranfield` (NCL_DATA), or a txt file, a document a line."""
    limit: int | None = 8000
    """Use the first so many examples of `data`; None for all."""
    texts: Literal["stsb", "none"] = "stsb"
    """Also learn from these pairs and what people say of them: the STS-B training split."""
    model: str = "minilm"
    """`minilm`, or any encoder on the hub or in a folder."""
    pooling: Literal["mean", "cls", "last", "own"] | None = None
    """How tokens become one vector; None takes the model's own."""
    dims: int | None = None
    """Number of non-negative dimensions; None for twice the encoder's width."""
    hidden_dim: int | None = None
    """Width of a hidden layer in the head; None for a linear head."""
    activation: Activation = "relu"
    """`none` is the signed twin."""
    k: tuple[int, ...] | None = (8, 16, 32, 64)
    """Train for these numbers of active dimensions at once; the last is what the model serves."""
    anneal_k: float = 1.0
    """Start with so many times as many, and come down over the first 70 % of the steps."""
    loss: Literal["info_nce", "spectral"] = "info_nce"
    """The contrastive loss of pairs."""
    temperature: float = 0.05
    """Of the contrastive losses."""
    contrast: float = 0.0
    """Weight of the loss of pairs and triplets; sentences alone are paired with a noisy copy."""
    agree: float = 0.3
    """Weight of the correlation between the cosines of codes and those of the encoder."""
    scored: float = 0.5
    """Weight of the correlation with people's scores; 0 takes the sentences without them."""
    neighbours: int = 64
    """Some of the pairs that should agree are a sentence and one of so many nearest others."""
    reconstruction: float = 0.0
    """Weight of rebuilding the encoder's features from the codes, linearly."""
    dropout: float = 0.05
    """Share of features that is dropped in training; makes the noisy copy, too."""
    finetune: bool = False
    """Train the encoder too; otherwise it is frozen and its features are cached."""
    csr_k: tuple[int, ...] = (8, 16, 32, 64)
    """Also train sentence-transformers' CSR, once for each k, same data and width; none to not."""
    csr_steps: int = 75
    """Steps for each of them; with four k, ours takes as many for all together."""
    csr_lr: float = 1e-3
    """Highest learning rate of CSR."""
    twin: bool = False
    """Also train the signed twin, with the same seed and budget."""
    onnx: bool = False
    """Also write `model.onnx`."""
    epochs: int = 10
    batch_size: int = 256
    """Examples per process."""
    lr: float = 3e-3
    ema: float | None = 0.98
    """End with a moving average of the weights: few scored pairs make for noisy ones."""


def main(cfg: Config) -> None:
    from accelerate import PartialState

    from ncl_multi import data, wrap
    from ncl_multi.adapters.sentence.data import Corpus, cached_features
    from ncl_multi.adapters.sentence.export import export_onnx, export_sentence_transformers
    from ncl_multi.adapters.sentence.report import Judged, compare, plot
    from ncl_multi.atlas.page import write_atlas
    from ncl_multi.report import table, write_json
    from ncl_multi.training.fit import twin_of

    corpus = Corpus.read(cfg.data, cfg.limit, cfg.texts, cfg.rows_seen)
    source = str(data.minilm()) if cfg.model == "minilm" else cfg.model
    bare = wrap(source, pooling=cfg.pooling)
    cfg = replace(cfg, dims=cfg.dims or 2 * bare.encoder.width)
    h = cached_features(bare, corpus.sentences)
    judged = Judged.of(partial(cached_features, bare))
    model = train(cfg, source, corpus, h, judged)
    if cfg.twin:
        train(twin_of(cfg), source, corpus, h, judged)
    others = baselines(cfg, corpus, h)
    if not PartialState().is_main_process:
        return
    judged.write(cfg.out / "compare", others)
    whole = model.head.fold()[:-1] if cfg.k else model.head.fold()
    (Judged.of(model.embed) if cfg.finetune else judged).write(cfg.out / "compare", {"ours": whole})
    export_sentence_transformers(model, cfg.out / "sentence_transformers")
    if cfg.onnx:
        export_onnx(model, cfg.out / "model.onnx")
    rows = compare(cfg.out)
    named = {f"{row['method']} {row['active']}": row for row in rows}
    write_json(cfg.out / "metrics.json", named)
    table("quality at k active dimensions", named)
    print(f"the same as a plot: {plot(rows, cfg.out / 'quality.png')}")
    print(f"what each dimension means: {write_atlas(cfg.out)}")


def train(cfg: Config, source: str, corpus: Any, h: Any, judged: Any) -> Any:
    """Train one model and save it."""
    import torch
    from accelerate import PartialState
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    from ncl_multi import fit, gather, wrap
    from ncl_multi.adapters.sentence.data import Neighbours, Rows
    from ncl_multi.adapters.sentence.objective import Learner, agree, at_each_k, contrast

    torch.manual_seed(cfg.seed)
    model = wrap(
        source, cfg.dims, pooling=cfg.pooling, hidden_dim=cfg.hidden_dim, activation=cfg.activation
    )
    learner = Learner(
        model if cfg.finetune else model.head, cfg.k, cfg.anneal_k, rebuild=bool(cfg.reconstruction)
    )

    # Few dimensions have the most to learn.
    weights = [max(cfg.k) / k for k in cfg.k] if cfg.k else [1.0]
    around = Neighbours(h, cfg.neighbours)
    if cfg.hidden_dim is None:
        model.head.start_on(h)

    def step(trained, batch):
        columns = list(batch.cpu().unbind(dim=1))
        if len(columns) == 1:
            columns *= 2
        first, second, scores = corpus.draw_pairs(2 * len(batch))
        drawn = (first, second, *around.draw(2 * len(batch)))
        rows = torch.cat([*columns, *drawn])
        wanted = h[rows].to(batch.device)
        if cfg.finetune:
            inputs = model.encoder.prepare([corpus.sentences[row] for row in rows])
            given = {name: part.to(batch.device) for name, part in inputs.items()}
        else:
            # The encoder's own dropout is not at hand: drop some of its features instead.
            given = F.dropout(wanted, cfg.dropout)
        z, rebuild = trained(given)
        sizes = [len(part) for part in (*columns, *drawn)]
        scores = gather(scores.to(batch.device))
        cosines = F.cosine_similarity(*pairs_of([*map(gather, wanted.split(sizes))]))
        same = [gather(column.to(batch.device)) for column in columns[1:]] if cfg.contrast else []
        total = z.new_zeros(())
        for at_k, counts in zip(at_each_k(z, learner.ks), weights, strict=True):
            parts = [*map(gather, at_k.split(sizes))]
            loss = cfg.agree * agree(*pairs_of(parts), cosines)
            if cfg.scored and len(scores):
                first, second = parts[len(columns) : len(columns) + 2]
                loss = loss + cfg.scored * agree(first, second, scores)
            if cfg.contrast:
                loss = loss + cfg.contrast * contrast(
                    parts[: len(columns)],
                    loss=cfg.loss,
                    temperature=cfg.temperature,
                    groups=torch.cat(same),
                )
            if rebuild is not None:
                loss = loss + cfg.reconstruction * F.mse_loss(rebuild(at_k), wanted)
            total = total + counts * loss
        return total / len(weights), z

    loader = DataLoader(
        Rows(corpus.examples), cfg.batch_size, collate_fn=Rows.together, drop_last=True
    )
    fit(learner, step, loader, cfg)
    model.head.k = max(cfg.k) if cfg.k else None
    model.cpu().eval()
    if PartialState().is_main_process:
        save(model, cfg, judged)
    return model


def pairs_of(parts: list[Any]) -> tuple[Any, Any]:
    """Both sides of all pairs whose cosines should be the encoder's.

    Sentences of one example, near ones, people's pairs, and any two.
    """
    from torch import cat

    *examples, first, second, near, far = parts
    left = cat([examples[0], examples[0], near, first, near])
    right = cat([examples[1], examples[-1], far, second, near.roll(1, 0)])
    return left, right


def save(model: Any, cfg: Config, judged: Any) -> None:
    """Write the model, and its codes of the STS-B test sentences."""
    import torch
    from torch.nn import functional as F

    from ncl_multi import Features

    model.save_pretrained(cfg.out / "model")
    about = {"model": cfg.model, "data": "stsb", "split": "test", "seed": cfg.seed}
    about |= {"activation": cfg.activation, "output": "head", "normalised": True}
    sentences, features = judged.sentences()
    with torch.no_grad():
        z = model.head(model.embed(sentences) if cfg.finetune else features)
    z = F.normalize(z, dim=1)
    Features(z, items=sentences, about=about).save(cfg.out / "features" / "test.safetensors")


def baselines(cfg: Config, corpus: Any, h: Any) -> dict[str, Any]:
    """CSR trained on the same data at each k; PCA; the encoder cut, and whole."""
    import torch
    from torch.utils.data import DataLoader

    from ncl_multi import fit
    from ncl_multi.adapters.sentence.data import Rows
    from ncl_multi.adapters.sentence.objective import SparseAutoencoder
    from ncl_multi.adapters.sentence.report import principal_axes

    mean, axes = principal_axes(h, 256)
    found: dict[str, Any] = {
        "dense": lambda h: h,
        "truncated": lambda h: h,
        "pca": lambda h: (h - mean) @ axes,
    }
    if corpus.examples.shape[1] < 2:
        return found
    loader = DataLoader(
        Rows(corpus.examples), cfg.batch_size, collate_fn=Rows.together, drop_last=True
    )

    def step(csr, batch):
        # Sentences that no one has paired are their own positives, and their partners negatives.
        first, second, _ = corpus.draw_pairs(len(batch))
        more = (first, first, second)
        columns = zip(batch.cpu().unbind(dim=1), more, strict=False)
        return csr([h[torch.cat(column)].to(batch.device) for column in columns])

    for k in cfg.csr_k:
        torch.manual_seed(cfg.seed)
        csr = SparseAutoencoder(h.shape[1], cfg.dims, k)
        out = cfg.out / f"csr/{k}"
        steps = min(cfg.csr_steps, cfg.steps or cfg.epochs * len(loader))
        own = replace(cfg, out=out, steps=steps, lr=cfg.csr_lr, ema=None)
        fit(csr, step, loader, own)
        found[f"csr@{k}"] = csr.cpu().codes
    return found


if __name__ == "__main__":
    main(tyro.cli(Config))
