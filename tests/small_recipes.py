"""Every recipe in a size that takes seconds, as the command that a user would type."""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
SHARED = ("--device", "cpu", "--checkpoint-every", "2", "--log-every", "5")
PICTURES = (
    "--data", "digits", "--images", "128", "--size", "8", "--dims", "32", "--hidden-dim", "16",
)  # fmt: skip
SMALL = {
    "clip_ncl": ("--dims", "64", "--k", "8", "--data", "{here}/pairs", "--model", "hf:{here}/clip"),
    "vision_ncl": PICTURES,
    "supervised_ncl": (*PICTURES, "--pretrain-epochs", "1"),
    "sentence_ncl": (
        "--dims", "32", "--k", "4", "8", "--csr-dims", "64", "--csr-k", "4",
        "--data", "{here}/triplets.csv", "--texts", "none", "--model", "{here}/bert",
    ),
    "graph_ncl": ("--dims", "16", "--hidden", "8", "--density", "0.2", "--data", "{here}/graph.pt"),
}  # fmt: skip
WORDS = ("a", "the", "dog", "cat", "bird", "runs", "sits", "on", "grass", "snow", "red", "big")


def command(recipe: str, here: Path, out: Path, *flags: str) -> list[str]:
    """The command line, for data and models that `lay_out` put into `here`."""
    own = [flag.format(here=here) for flag in SMALL[recipe]]
    return [str(ROOT / f"recipes/{recipe}.py"), *own, *SHARED, "--out", str(out), *flags]


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


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
