"""Non-negative CLIP: images and texts in one sparse, readable space.

Example:
    model = NonNegClip("ViT-B-32:laion2b_s34b_b79k", dims=2048, k=16).fit(pairs)
    model.encode(["a dog on grass"])  # scipy.sparse.csr_array, unit rows
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ncl_multi.adapters.clip.config import ClipConfig
from ncl_multi.adapters.clip.heads import ClipHeads, Scalar
from ncl_multi.adapters.clip.inputs import PixelPairs, TowerFeatures, tower_features
from ncl_multi.adapters.clip.load import DEMO, load_towers
from ncl_multi.adapters.clip.objective import ClipObjective
from ncl_multi.adapters.clip.pairs import Pairs, as_pairs
from ncl_multi.adapters.clip.towers import Pixels, Tokens, Towers
from ncl_multi.data.fetch import cache as user_cache
from ncl_multi.data.folders import on_white
from ncl_multi.data.pictures import thumbnail
from ncl_multi.files import read_picture
from ncl_multi.model import SparseModel, check_fits
from ncl_multi.optional import needs

with needs("ncl-multi[clip]"):
    from PIL import Image

_DEFAULTS: dict[str, Any] = {
    "spectral": 10.0, "dropout": 0.5, "temperature": 0.05, "min_temperature": 0.03,
}  # fmt: skip


class NonNegClip(
    SparseModel,
    library_name="ncl_multi",
    tags=["clip", "non-negative-contrastive-learning", "sparse-embeddings"],
    paper_url="https://arxiv.org/abs/2403.12459",
):
    """Two towers and their non-negative heads: images and texts in one sparse space.

    `fit` takes `Pairs`, or a list of (image, caption) with images as PIL images, files or bytes and
    one caption or several. The towers stay frozen unless the config says `finetune`. `encode`
    takes texts (`str`) or images (PIL, `Path`).

    Args:
        towers: A name, see `load_towers`, or `Towers` of your own.
        dims: Number of non-negative dimensions.
        seed: Seed of the initial weights.
        options: Options of `ClipHeads`. Unless they are given, k is 4, or 2 % of more than 200
            dimensions, the spectral loss weighs 10, half of the features are dropped in training,
            and the temperature starts at .05, not below .03.
    """

    kind = "clip"
    example = 'model.encode(["a dog on grass"])  # or [Path("dog.jpg")]: images, one space'
    config_type = ClipConfig

    def __init__(
        self, towers: str | Towers = DEMO, dims: int = 200, *, seed: int = 0, **options: Any
    ):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.towers = load_towers(towers) if isinstance(towers, str) else towers
            widths = self.towers.image_dim, self.towers.text_dim
            options = _DEFAULTS | {"k": min(max(4, dims // 50), dims)} | options
            self.heads = ClipHeads(*widths, dims, **options)

    def forward(
        self, pixels: Pixels, tokens: Tokens
    ) -> tuple[Float[Tensor, "n dims"], Float[Tensor, "n dims"], Scalar]:
        return self.heads(self.towers.image(pixels), self.towers.text(tokens))

    def _entries(self) -> int | None:
        # Training compares cut rows with whole ones, so the heads do not cut.
        return self.heads.k

    def options(self) -> dict[str, Any]:
        heads = self.heads
        head = heads.image.options
        return {
            "dims": head.dims, "hidden_dim": head.hidden_dim, "activation": head.activation,
            "density": head.density, "shared": heads.text is None, "k": heads.k,
            "spectral": heads.spectral, "contrast": heads.contrast_weight, "dropout": heads.dropout,
            "min_temperature": heads.contrast.min_temperature,
        }  # fmt: skip

    def tower_features(self, pairs: Pairs, config: ClipConfig, views: int = 1) -> TowerFeatures:
        """The towers' features of all images and captions, from the cache if they are there."""
        best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = torch.device(config.device or best or "cpu")
        # Features of towers that are being trained are useless to other runs.
        run_folder = config.out if config.finetune else None
        cache = config.cache or (run_folder / "cache" if run_folder else user_cache() / "clip")
        return tower_features(self.towers, pairs, cache, views=views, device=device)

    @classmethod
    def _build(cls, options: dict[str, Any], folder: Path, **load_options: Any) -> "NonNegClip":
        # Version 0.1 saved the options of the heads separately.
        options = options | options.pop("options", {})
        heads, weights = folder / "model.safetensors", folder / "towers.safetensors"
        check_fits(lambda: Towers.load(folder / "towers"), weights if weights.exists() else heads)
        towers = Towers.load(folder / "towers")
        check_fits(lambda: cls(towers, **options).heads, heads)
        return cls(towers, **options)

    @classmethod
    def on_base(cls, base: str, options: dict[str, Any]) -> "NonNegClip":
        """Fresh heads on towers by name; see `load_towers`."""
        return cls(base, **options)

    def base_part(self) -> nn.Module:
        """The towers."""
        return self.towers

    def head_part(self) -> nn.Module:
        """The heads of both sides."""
        return self.heads

    def _save_parts(self, folder: Path) -> None:
        self.towers.save(folder / "towers")
        # In a separate file, which the models of a run can share while the towers are frozen.
        save_model(self.towers, str(folder / "towers.safetensors"))
        save_model(self.heads, str(folder / "model.safetensors"))

    def _load_parts(self, folder: Path) -> None:
        if not (folder / "towers.safetensors").exists():
            # Version 0.1 kept everything in one file.
            super()._load_parts(folder)
            return
        load_model(self.towers, folder / "towers.safetensors")
        load_model(self.heads, folder / "model.safetensors")

    def _encoder_name(self) -> str:
        return self.towers.name

    def _became_signed(self) -> None:
        self.heads.k = None

    def _fit(self, data: Any, config: Any) -> dict[str, Any]:
        from ncl_multi.training import fit as loop

        pairs = as_pairs(data)
        config = config.for_rows(len(pairs), "images with captions")
        if config.rows_seen is not None:
            pairs = pairs.at_most(config.rows_seen)
        inputs: TowerFeatures | PixelPairs
        if config.finetune:
            inputs = PixelPairs(pairs, self.towers)
        else:
            inputs = self.tower_features(pairs, config, config.views)
            self.heads.centre(inputs.image[0], inputs.text)
            if config.start == "clusters" and self.heads.image.hidden_dim is None:
                self.heads.start_on_clusters(inputs.image[0], inputs.text, inputs.pairs.links)
        size = min(config.batch_size, len(inputs))
        rows: Any = inputs
        loader = DataLoader(rows, size, num_workers=config.workers, drop_last=True)
        objective = ClipObjective(self if config.finetune else self.heads, inputs)
        loop.fit(objective, loader, config, fingerprint=pairs.fingerprint())
        self.heads.to(next(objective.parameters()).device)
        self.towers.to(self.device)
        return {"data": pairs.name, "images": len(pairs), "captions": len(pairs.captions)}

    def _embedded(self, items: Any, batch_size: int | None, progress: bool) -> Iterator[Tensor]:
        texts = _are_texts(items)
        size = batch_size or (256 if texts else 64)
        starts = range(0, len(items), size)
        for start in tqdm(starts, desc="encode", unit="batch", leave=False, disable=not progress):
            batch = items[start : start + size]
            with torch.inference_mode():
                if texts:
                    yield self.towers.text(self.towers.tokens(batch).to(self.device))
                else:
                    pixels = torch.stack([self.towers.pixels(_open(image)) for image in batch])
                    yield self.towers.image(pixels.to(self.device))

    def _head(self, items: Any) -> Any:
        return self.heads.encode_text if _are_texts(items) else self.heads.encode_image

    def _display(self, items: Any) -> dict[str, Any]:
        if _are_texts(items):
            return {"items": list(items)}
        return {"thumbnails": [thumbnail(_open(image), "JPEG", 96) for image in items]}


def _are_texts(items: Any) -> bool:
    """Whether items are texts; mixed items, or one text without a list, are refused."""
    if isinstance(items, str | bytes | Path):
        raise ValueError(f"encode takes a list of texts or of images; got {items!r}")
    kinds = [isinstance(item, str) for item in items]
    if any(kinds) and not all(kinds):
        row = kinds.index(not kinds[0])
        raise ValueError(
            f"items must be all texts or all images; row {row} is a {type(items[row]).__name__}"
        )
    return bool(kinds) and kinds[0]


def _open(image: Any) -> Image.Image:
    return on_white(image if isinstance(image, Image.Image) else read_picture(image))
