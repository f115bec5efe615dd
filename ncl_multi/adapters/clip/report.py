"""How good, how sparse and how readable the codes of images and captions are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array, issparse, vstack
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from ncl_multi.adapters.clip.config import ClipConfig
from ncl_multi.adapters.clip.heads import ClipHeads
from ncl_multi.adapters.clip.inputs import TowerFeatures
from ncl_multi.adapters.clip.model import NonNegClip
from ncl_multi.adapters.clip.pairs import Pairs
from ncl_multi.codes.features import MOST_SHOWN, Features, join, spread, to_csr
from ncl_multi.codes.names import name_sides
from ncl_multi.data.pictures import thumbnail
from ncl_multi.files import link_equal_files
from ncl_multi.head import SIGNED, top_k
from ncl_multi.metrics import activity_figures, readable_features, retrieval
from ncl_multi.metrics.codes import Codes
from ncl_multi.metrics.retrieval import ItemCodes, QueryCodes
from ncl_multi.report import table, write_json

SHOWN = (
    "t2i_r_at_1", "t2i_r_at_10", "t2i_median_rank", "i2t_r_at_1", "i2t_r_at_10", "i2t_median_rank",
    "zero_shot_percent", "image_active_percent", "text_active_percent", "alive",
)  # fmt: skip
SHOWN_READABLE = (
    "purity_at_10", "chance", "cluster_purity", "class_consistency", "intruder_labels", "distinct",
    "readable_dims", "named", "names_once", "name_fit", "name_chance",
)  # fmt: skip
TEMPLATES = ("{}", "an emoji of {}", "a picture of {}")
Figures = dict[str, dict[str, dict[str, float]]]
_CURVE = (16, 64)
_SHARES = (0.05, 0.1, 1.0)
_ROWS_AT_ONCE = 1024


@torch.no_grad()
def codes(heads: ClipHeads, features: TowerFeatures) -> tuple[csr_array, csr_array]:
    """Codes of the images, as they are, and of the captions: unit rows."""
    device = heads.image.out.weight.device

    def encode(head: Callable[[Tensor], Tensor], h: Tensor) -> csr_array:
        return csr_array(vstack([to_csr(head(rows.to(device))) for rows in h.split(_ROWS_AT_ONCE)]))

    heads.eval()
    return encode(heads.encode_image, features.image[0]), encode(heads.encode_text, features.text)


def whole_codes(heads: ClipHeads, features: TowerFeatures) -> tuple[csr_array, csr_array]:
    """The same before rows are cut to their k largest entries."""
    k, heads.k = heads.k, None
    try:
        return codes(heads, features)
    finally:
        heads.k = k


def both_ways(z_image: QueryCodes, z_text: ItemCodes, relevant: csr_array) -> dict[str, float]:
    """R@1, 5 and 10 in per cent, and the median rank, of captions and of images as queries.

    `relevant` is images x captions; a query is answered by any item that is right for it.
    """
    # Sparse products are faster only if few entries are stored; the signed twin stores all.
    z_image, z_text = _dense_if_full(z_image), _dense_if_full(z_text)
    by_way = {
        "t2i": retrieval(z_text, z_image, csr_array(relevant.T), ks=(1, 5, 10)),
        "i2t": retrieval(z_image, z_text, relevant, ks=(1, 5, 10)),
    }
    row: dict[str, float] = {}
    for way, figures in by_way.items():
        row |= {f"{way}_r_at_{k}": 100 * figures[f"hit@{k}"] for k in (1, 5, 10)}
        row[f"{way}_median_rank"] = figures["median_rank"]
    return row


def _dense_if_full(z: Any) -> Any:
    full = issparse(z) and z.nnz > 0.05 * np.prod(z.shape)
    return torch.from_numpy(z.toarray()) if full else z


def truncation_curve(
    z_image: csr_array, z_text: csr_array, relevant: csr_array, ks: Sequence[int]
) -> dict[int, dict[str, float]]:
    """Retrieval when each row of either side keeps its k largest entries only, for each k."""
    dense = [torch.from_numpy(z.toarray()) for z in (z_image, z_text)]
    curve = {}
    for k in sorted(k for k in set(ks) if 1 <= k <= z_image.shape[1]):
        cut = [F.normalize(top_k(z, k), dim=1) for z in dense]
        curve[k] = both_ways(cut[0], cut[1], relevant)
    return curve


def zero_shot_accuracy(
    z_image: Codes,
    y: Int[Tensor, " n"],
    classes: Sequence[str],
    encode_text: Callable[[Sequence[str]], Float[Tensor, "m d"]],
    templates: Sequence[str] = TEMPLATES,
) -> float:
    """Share, in per cent, of images nearest to their class, described by several templates.

    A class is the mean of its descriptions' unit codes. Only classes that occur are candidates, and
    equal scores count as a guess among them.
    """
    present, y = y.unique(return_inverse=True)
    texts = [template.format(classes[c]) for c in present.tolist() for template in templates]
    described = F.normalize(encode_text(texts), dim=1).view(len(present), len(templates), -1)
    scores = retrieval(z_image, described.mean(dim=1), (y, torch.arange(len(present))), ks=(1,))
    return 100 * scores["hit@1"]


def image_share(z_image: QueryCodes, z_text: ItemCodes) -> Float[np.ndarray, " d"]:
    """Share of each dimension's mean square that comes from images: 1 images only, 0 texts only.

    A dimension that never fires gives NaN.
    """
    image, text = (np.asarray(_square(z).mean(axis=0)).ravel() for z in (z_image, z_text))
    with np.errstate(invalid="ignore"):
        return image / (image + text)


def judge(
    heads: ClipHeads,
    features: TowerFeatures,
    encode_text: Callable[[Sequence[str]], Tensor],
    names: Sequence[str],
) -> tuple[dict[str, float], tuple[csr_array, csr_array]]:
    """Every figure of one split, and the codes of images and captions it was taken from.

    The measures of readable dimensions are those of the images, with these names of dimensions.
    """
    pairs = features.pairs
    z_image, z_text = codes(heads, features)
    relevant = pairs.relevant()
    row = both_ways(z_image, z_text, relevant)
    for side, z in (("image", z_image), ("text", z_text)):
        read = activity_figures(z)
        row[f"{side}_active_percent"] = 100 * (1 - read["sparsity"])
        row |= {f"{side}_{m}": read[m] for m in ("alive", "active_dims")}
    share = image_share(z_image, z_text)
    row["alive"] = float(np.isfinite(share).mean())
    lives = share[np.isfinite(share)]
    row["dims_of_both_sides"] = float(((lives > 0.1) & (lives < 0.9)).mean())
    if pairs.y is not None and pairs.classes is not None:
        row["zero_shot_percent"] = zero_shot_accuracy(z_image, pairs.y, pairs.classes, encode_text)
    images = Features(z_image, pairs.y, pairs.joined_captions(), {"classes": pairs.classes})
    return row | readable_features(images, names=names).figures, (z_image, z_text)


def names_by_captions(z_image: csr_array, z_text: csr_array, pairs: Pairs) -> list[str]:
    """A name of each dimension from captions, and from the classes of the images they are of.

    A dimension whose strongest captions have nothing in common is named by its images' captions.
    """
    about = {"classes": pairs.classes}
    images = Features(z_image, pairs.y, pairs.joined_captions(), about | {"side": "image"})
    image, caption = pairs.links.T
    y = None
    if pairs.y is not None:
        y = torch.full((len(pairs.captions),), -1)
        y[caption] = pairs.y[image]
    return name_sides([Features(z_text, y, pairs.captions, about | {"side": "text"}), images])


def describe_dimensions(
    z_image: csr_array, z_text: csr_array, pairs: Pairs, names: Sequence[str], top: int = 5
) -> list[dict[str, Any]]:
    """Name, strongest captions, strongest images and image share of each dimension."""
    share = image_share(z_image, z_text)
    captions, images = (_strongest(z, top) for z in (z_text, z_image))
    return [
        {
            "dimension": dim,
            "name": name,
            "captions": [pairs.captions[row] for row in caption_rows],
            "images": [pairs.image_names[row] for row in image_rows],
            "image_share": None if np.isnan(share[dim]) else round(float(share[dim]), 4),
        }
        for dim, (name, caption_rows, image_rows) in enumerate(
            zip(names, captions, images, strict=True)
        )
    ]


def write_report(
    models: Mapping[str, NonNegClip],
    splits: Mapping[str, Pairs],
    config: ClipConfig,
    *,
    keep: int | None = None,
) -> Figures:
    """Measure every model on every split but `train`; write codes, figures and names.

    Dimensions are named by the training captions, wherever they are shown. Of data that was divided
    here, into `train` and `test`, the codes of both are also written together, as `all`: at most
    10,000 images and captions, at even distances. `ncl@16` is the `ncl` model with the 16 largest
    entries of each row, `ncl_shortened` the one with only `keep` dimensions, which is saved, too.
    What belongs to a model other than `ncl` is written to a folder of its name.
    """
    if config.out is None:
        raise ValueError("a report needs a folder: set out")
    figures: Figures = {}
    for name, model in models.items():
        plan = replace(config, out=config.out if name == "ncl" else config.out / name)
        inputs = {split: model.tower_features(pairs, plan) for split, pairs in splits.items()}
        named_by = inputs.pop("train")
        shorter = keep if name == "ncl" else None
        measured = _report(model, inputs, named_by, cast(Path, plan.out), plan.seed, shorter)
        figures |= {f"{name}{variant}": of_splits for variant, of_splits in measured.items()}
    link_equal_files(config.out)
    write_json(config.out / "metrics.json", figures)
    for split in figures[next(iter(models))]:
        for title, measures in (("", SHOWN), (", readable dimensions", SHOWN_READABLE)):
            rows = {
                name: {m: by_split[split][m] for m in measures if m in by_split[split]}
                for name, by_split in figures.items()
                if not set(measures).isdisjoint(by_split[split])
            }
            table(f"{splits[split].name}, {split}{title}", rows)
    return figures


def _report(
    model: NonNegClip,
    judged: Mapping[str, TowerFeatures],
    named_by: TowerFeatures,
    out: Path,
    seed: int,
    keep: int | None,
) -> Figures:
    """Figures of one model, under "", and of it with fewer entries (`@<k>`) or dimensions.

    Its codes, names and weights are written to `out`.
    """

    def encode_text(texts: Sequence[str]) -> Tensor:
        return torch.as_tensor(model.encode(texts, dense=True))

    figures: Figures = {"": {}}
    about: dict[str, Any] = {"model": model.towers.name, "seed": seed}
    about["activation"] = model.heads.image.activation
    ks = [*_CURVE, *(round(share * model.dims) for share in _SHARES), model.heads.k or model.dims]
    # The report of wide codes takes minutes, hence the bar.
    with tqdm(total=1 + 2 * len(judged), desc="report", unit="part", leave=False) as bar:
        train_codes = codes(model.heads, named_by)
        names = names_by_captions(*train_codes, named_by.pairs)
        about["names"] = names
        described = describe_dimensions(*train_codes, named_by.pairs, names)
        write_json(out / "dimensions.json", described)
        short = None if keep is None else model.shorten(keep, list(train_codes))
        bar.update()
        for split, features in judged.items():
            row, (z_image, z_text) = judge(model.heads, features, encode_text, names)
            bar.update()
            relevant = features.pairs.relevant()
            if model.heads.image.activation not in SIGNED:
                whole = whole_codes(model.heads, features)
                for k, at_k in truncation_curve(*whole, relevant, ks).items():
                    figures.setdefault(f"@{k}", {})[split] = at_k
            if short is not None:
                shorter = both_ways(*codes(short.heads, features), relevant)
                figures.setdefault("_shortened", {})[split] = shorter
            figures[""][split] = row
            by_side = _to_features(z_image, z_text, features.pairs, about)
            for side, side_features in by_side.items():
                side_features.save(out / "features" / f"{split}_{side}_head.safetensors")
            if split == "test":
                train_features = _to_features(*train_codes, named_by.pairs, about, MOST_SHOWN)
                for side, side_features in by_side.items():
                    both = join({"train": train_features[side], "test": side_features})
                    both = both.take(spread(len(both), MOST_SHOWN))
                    both.save(out / "features" / f"all_{side}_head.safetensors")
            bar.update()
    model.figures = {
        f"{measure}, {split}": round(value, 4)
        for split, row in figures[""].items()
        for measure, value in row.items()
    }
    model.save_pretrained(out / "model")
    if short is not None:
        short.save_pretrained(out / "short")
    return figures


def _to_features(
    z_image: csr_array,
    z_text: csr_array,
    pairs: Pairs,
    about: Mapping[str, Any],
    most: int | None = None,
) -> dict[str, Features]:
    """Features of each side, with texts and thumbnails; at most `most` rows."""
    about = {**about, "data": pairs.name, "split": pairs.split, "output": "head"}
    about |= {"normalised": True, "classes": pairs.classes}
    rows, captions = spread(len(pairs), most or len(pairs)), pairs.joined_captions()
    image = Features(
        z_image[rows],
        y=None if pairs.y is None else pairs.y[rows],
        items=[captions[row] for row in rows],
        about=about | {"side": "image"},
        thumbnails=[thumbnail(pairs.open(row), "JPEG", 96) for row in rows],
    )
    text = Features(z_text, items=pairs.captions, about=about | {"side": "text"})
    return {"image": image, "text": text.take(spread(len(text), most or len(text)))}


def _square(z: Codes) -> Any:
    return z.square().double().numpy() if isinstance(z, Tensor) else z.multiply(z)


def _strongest(z: csr_array, top: int) -> Iterator[list[int]]:
    columns = z.tocsc()
    for start, end in zip(columns.indptr, columns.indptr[1:], strict=False):
        order = np.argsort(-columns.data[start:end], kind="stable")[:top]
        yield columns.indices[start:end][order].tolist()
