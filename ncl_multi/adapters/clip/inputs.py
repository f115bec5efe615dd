"""Training inputs: features of frozen towers, computed once and cached on disk, or pixels.

With frozen towers the heads train in seconds.
"""

import functools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from ncl_multi.adapters.clip.pairs import DamagedImageError, Pairs
from ncl_multi.adapters.clip.towers import Towers
from ncl_multi.data.pictures import leave_out
from ncl_multi.training.feature_cache import Compute, Shard, cached_shards

log = logging.getLogger(__name__)

_SMALLEST_CROP = 0.5


@dataclass(frozen=True)
class TowerFeatures:
    """Features of all images, in several views, and of all captions of `pairs`.

    `pairs` are those whose image decoded.
    """

    pairs: Pairs
    image: Float[Tensor, "views images i"]
    text: Float[Tensor, "captions t"]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> int:
        return row

    def draw(
        self, rows: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n i"], Float[Tensor, "n t"], Int[Tensor, " n"]]:
        """Each image in a random view, with one of its captions at random, and their groups."""
        caption, groups = self.pairs.draw(rows.cpu())
        view = torch.randint(len(self.image), (len(rows),))
        drawn = self.image[view, rows.cpu()], self.text[caption], groups
        image, text, groups = (tensor.to(rows.device) for tensor in drawn)
        return image, text, groups


@dataclass(frozen=True)
class PixelPairs:
    """Pixels and tokens, to train the towers too.

    An image that does not decode is logged and replaced by the next one, so batches stay full.
    """

    pairs: Pairs
    towers: Towers

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        for other in (*range(row, len(self)), *range(row)):
            try:
                return self.towers.pixels(self.pairs.open(other)), other
            except DamagedImageError as error:
                log.warning("left out, does not decode: %s", error)
        raise ValueError(f"none of the {len(self)} images of {self.pairs.name} decodes")

    def draw(
        self, batch: Sequence[Tensor]
    ) -> tuple[Float[Tensor, "n c h w"], Int[Tensor, "n length"], Int[Tensor, " n"]]:
        """The images, one caption of each at random, and their groups."""
        pixels, rows = batch
        caption, groups = self.pairs.draw(rows.cpu())
        tokens = self.towers.tokens([self.pairs.captions[row] for row in caption.tolist()])
        return pixels, tokens.to(pixels.device), groups.to(pixels.device)


def tower_features(
    towers: Towers,
    pairs: Pairs,
    cache: Path,
    *,
    views: int = 1,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
) -> TowerFeatures:
    """Features of a data set, read from the cache if they are there.

    View 0 is the whole image; others are crops of at least half of it, every second mirrored,
    always the same for the same image. Images that do not decode are left out and logged.
    """
    if views < 1:
        raise ValueError(f"views must be at least 1; got {views}")
    # On a CPU a layer's output of few images stays in the cache, and convolutions like the channels
    # last: up to twice as fast at 128 pixels, about the same at 112.
    on_cpu = torch.device(device).type == "cpu"
    at_once = batch_size or (16 if on_cpu else 256)
    batch_size = batch_size or (32 if on_cpu else 256)
    model = {"model": towers.name, "weights": towers.fingerprint()}
    about = model | {"transform": towers.transform(), "data": pairs.fingerprint()}
    about["width"] = str(towers.image_dim)
    towers.to(device).to(memory_format=torch.channels_last).eval()

    def pixels_of(view: int) -> Callable[[int], Tensor | None]:
        def read(row: int) -> Tensor | None:
            try:
                image = pairs.open(row)
            except DamagedImageError:
                return None
            return towers.pixels(_view(image, view, pairs.image_names[row]))

        return read

    def of_images(view: int) -> Compute:
        def compute(rows: Sequence[int], done: Callable[[int], object]) -> Shard:
            decoded: list[int] = []
            parts = []
            # Pillow releases the interpreter lock while it decodes and scales: threads are enough.
            # On a CPU the tower uses all cores, and more threads would slow it down.
            with ThreadPoolExecutor() as pool:
                each = map if on_cpu else pool.map
                for batch in _batches(rows, at_once):
                    read = zip(batch, each(pixels_of(view), batch), strict=True)
                    readable = {row: pixels for row, pixels in read if pixels is not None}
                    if readable:
                        pixels = torch.stack([*readable.values()]).to(
                            device, memory_format=torch.channels_last
                        )
                        parts.append(towers.image(pixels).half().cpu())
                    decoded += readable
                    done(len(batch))
            empty = torch.zeros(0, towers.image_dim, dtype=torch.half)
            return torch.cat([empty, *parts]), decoded

        return compute

    stored = [
        cached_shards(cache, _name(pairs, f"view{view}"), len(pairs), about, of_images(view))
        for view in range(views)
    ]
    decoded_rows = stored[0][1]
    _name_the_skipped(pairs, decoded_rows)
    readable = pairs.keep(decoded_rows)
    about = model | {"data": readable.fingerprint()}
    by_length = sorted(range(len(readable.captions)), key=lambda row: len(readable.captions[row]))

    def of_captions(rows: Sequence[int], done: Callable[[int], object]) -> Shard:
        parts = []
        # Captions sorted by length need little padding.
        for batch in _batches([by_length[row] for row in rows], 4 * batch_size):
            tokens = towers.tokens([readable.captions[row] for row in batch]).to(device)
            parts.append(towers.text(tokens).half().cpu())
            done(len(batch))
        return torch.cat(parts), list(rows)

    texts, _ = cached_shards(cache, _name(pairs, "texts"), len(by_length), about, of_captions)
    in_order = torch.empty_like(texts)
    in_order[by_length] = texts
    return TowerFeatures(readable, torch.stack([h for h, _ in stored]), in_order)


def _name(pairs: Pairs, what: str) -> str:
    return f"{Path(pairs.name).name.replace(':', '-')}-{pairs.split}-{what}"


def _view(image: Image.Image, view: int, name: str) -> Image.Image:
    """A crop that depends only on the image's name and the view."""
    if view == 0:
        return image
    chance = random.Random(f"{name}/{view}")  # noqa: S311
    side = chance.uniform(_SMALLEST_CROP, 1) ** 0.5
    width, height = round(image.width * side), round(image.height * side)
    left, top = chance.randint(0, image.width - width), chance.randint(0, image.height - height)
    crop = image.crop((left, top, left + width, top + height))
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if view % 2 else crop


def _name_the_skipped(pairs: Pairs, decoded: Sequence[int]) -> None:
    skipped = [pairs.image_names[row] for row in sorted(set(range(len(pairs))) - set(decoded))]
    _leave_out_once(f"{pairs.name}, {pairs.split}", tuple(skipped), len(pairs))


@functools.cache
def _leave_out_once(source: str, names: tuple[str, ...], total: int) -> None:
    leave_out(source, names, total)


def _batches(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
