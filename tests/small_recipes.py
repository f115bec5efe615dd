"""Every recipe in a size that takes seconds, as the command that a user would type."""

import json
import os
import re
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).parent.parent
SHARED = ("--device", "cpu", "--checkpoint-every", "2", "--log-every", "5")
PICTURES = (
    "--data", "digits", "--images", "128", "--size", "8", "--model", "test_resnet", "--dims", "32",
    "--hidden-dim", "16",
)  # fmt: skip
SMALL = {
    "clip_ncl": ("--dims", "64", "--k", "8", "--data", "{here}/pairs", "--model", "hf:{here}/clip"),
    "vision_ncl": PICTURES,
    "supervised_ncl": (*PICTURES, "--pretrain-epochs", "1"),
    "sentence_ncl": (
        "--dims", "32", "--k", "4", "8",
        "--data", "{here}/triplets.csv", "--model", "{here}/bert",
    ),
    # Where nothing is random, more drops than these would make all nodes of a view alike.
    "graph_ncl": (
        "--dims", "16", "--width", "8", "--density", "0.2", "--data", "{here}/graph.pt",
        "--drop-edges", "0.2", "0.1", "--drop-features", "0.1", "0.2",
    ),
}  # fmt: skip
WORDS = ("a", "the", "dog", "cat", "bird", "runs", "sits", "on", "grass", "snow", "red", "big")


def command(recipe: str, here: Path, out: Path, *flags: str) -> list[str]:
    """The command line, for data and models that `lay_out` put into `here`."""
    data_options = [flag.format(here=here) for flag in SMALL[recipe]]
    return [str(ROOT / f"recipes/{recipe}.py"), *data_options, *SHARED, "--out", str(out), *flags]


def lay_out(here: Path) -> None:
    """Write small data of each kind and tiny encoders with random weights."""
    import transformers
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch_geometric.data import Data

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)

    def sentence() -> str:
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (5,), generator=draw))

    (here / "triplets.csv").write_text(
        "anchor,positive,negative\n"
        + "".join(f"{sentence()},{sentence()},{sentence()}\n" for _ in range(96))
    )
    pairs = here / "pairs"
    pairs.mkdir(parents=True)
    lines = ["image,caption"]
    for number in range(96):
        colours = torch.randint(256, (16, 16, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(colours.numpy()).save(pairs / f"{number}.png")
        lines += [f"{number}.png,{sentence()}", f"{number}.png,{sentence()}"]
    (pairs / "captions.csv").write_text("\n".join(lines) + "\n")
    edges = torch.randint(120, (2, 600), generator=draw)
    graph = Data(x=torch.rand(120, 12, generator=draw), edge_index=edges, y=torch.arange(120) % 3)
    torch.save(graph, here / "graph.pt")

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate([*special, *WORDS])}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", bos_token="[CLS]", eos_token="[SEP]", model_max_length=16,
    )  # fmt: skip
    size = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32,
    }  # fmt: skip
    text = size | {"vocab_size": 32, "max_position_embeddings": 16}
    bert = transformers.BertModel(transformers.BertConfig(**text))
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=text | {"eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 0},
            vision_config=size | {"image_size": 16, "patch_size": 8},
            projection_dim=16,
        )
    )
    for name, model in (("bert", bert), ("clip", clip)):
        model.save_pretrained(here / name)
        tokenizer.save_pretrained(here / name)
    transformers.CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    ).save_pretrained(here / "clip")


def check_run(out: Path) -> None:
    """One contract for what every recipe leaves behind."""
    figures = json.loads((out / "metrics.json").read_text())
    for model, splits in figures.items():
        assert re.fullmatch(r"[a-z_]+(@\d+)?", model), model
        for split, row in splits.items():
            assert re.fullmatch(r"[a-z]+", split), split
            for measure, value in row.items():
                assert re.fullmatch(r"[a-z0-9_]+", measure), measure
                assert type(value) in (int, float), measure
    assert any(model == "ncl" or model.startswith("ncl@") for model in figures)
    files = [path for path in out.rglob("features/*") if path.suffix == ".safetensors"]
    assert files
    for path in files:
        assert re.fullmatch(r"[a-z]+(_(image|text))?_(head|encoder)", path.stem), path
    cards = [path.read_text() for path in out.rglob("model/README.md")]
    assert cards
    assert all("ncl.load(" in card and "Not trained" not in card for card in cards)
    for name in ("config.json", "checkpoint.pt", "train.jsonl", "atlas.html"):
        assert list(out.rglob(name)), name


@contextmanager
def nothing_random():
    """Every draw is the same number, so that rows may be dealt out to processes in any way."""

    def uniform(x, low=0.0, high=1.0):
        return x.fill_(0.3 * low + 0.7 * high)

    def rand(*size, **options):
        return torch.full(size[0] if isinstance(size[0], (tuple, list)) else size, 0.3, **options)

    with (
        patch.object(torch.Tensor, "uniform_", uniform),
        patch.object(torch, "rand", rand),
        patch.object(torch, "rand_like", lambda x, **_: torch.full_like(x, 0.3)),
        patch.object(torch, "randint", lambda *given, **_: torch.zeros(given[-1]).long()),
        patch.object(torch.nn.functional, "dropout", lambda x, *_, **__: x),
    ):
        yield


def in_doubles() -> None:
    """Train in float64, with nothing random in a step, by plain gradients.

    What is left can differ between one process and several by rounding alone.
    """
    from ncl_multi.training import fit as loop

    fit = loop.fit
    # Features in single precision, which another test may have cached, would not do.
    os.environ["NCL_CACHE"] += "-doubles"
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double

    def doubled(part):
        if isinstance(part, torch.Tensor):
            return part.double() if part.is_floating_point() else part
        if isinstance(part, dict):
            return {name: doubled(data_options) for name, data_options in part.items()}
        return type(part)(map(doubled, part)) if isinstance(part, (list, tuple)) else part

    def plain_fit(objective, loader, cfg, **_):
        forward = objective.double().forward

        def plain_forward(batch):
            with nothing_random():
                return forward(doubled(batch))

        objective.forward = plain_forward
        # What an objective draws its rows from is in single precision.
        for name, value in vars(objective).items():
            if isinstance(value, torch.Tensor):
                setattr(objective, name, doubled(value))
            for field in ("image", "text", "x"):
                if isinstance(getattr(value, field, None), torch.Tensor):
                    object.__setattr__(value, field, doubled(getattr(value, field)))
        for module in objective.modules():
            module.register_forward_pre_hook(lambda _, given: doubled(given))
        sgd = lambda weights: torch.optim.SGD(weights, 0.1)  # noqa: E731
        return fit(objective, loader, cfg, optimizer=sgd)

    loop.fit = plain_fit


def watching_memory() -> None:
    """Write the resident megabytes after every step into `memory.txt` of the run folder."""
    from ncl_multi.training import fit as loop

    fit = loop.fit

    def watching_fit(objective, loader, cfg, **options):
        def watch(*_):
            status = Path("/proc/self/status").read_text()
            kilobytes = int(status.split("VmRSS:")[1].split()[0])
            with (cfg.out / "memory.txt").open("a") as file:
                file.write(f"{kilobytes / 1024}\n")

        objective.register_forward_hook(watch)
        return fit(objective, loader, cfg, **options)

    loop.fit = watching_fit
