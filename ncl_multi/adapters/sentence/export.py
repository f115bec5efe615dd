"""Export a trained model to run without this package: sentence-transformers, ONNX."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi.adapters.sentence.encoder import Encoder
from ncl_multi.adapters.sentence.model import NonNegEncoder
from ncl_multi.optional import needs

with needs("ncl-multi[sentence]"):
    from sentence_transformers import SentenceTransformer, SparseEncoder
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SpladePooling

_POOLING = {"mean": "mean", "cls": "cls", "last": "lasttoken"}


def export_sentence_transformers(model: NonNegEncoder, folder: str | Path) -> Path:
    """Write the model in stock modules: `folder` for `SentenceTransformer`, and
    `folder/sparse_encoder` for `SparseEncoder`, which cannot share one.

    Normalisation is folded into the linear layer, `Dense` with ReLU. With `k`, the layer is the
    stock `SparseAutoEncoder`, the one stock module that keeps the largest entries; in
    `SparseEncoder`, `encode(..., max_active_dims=16)` then keeps fewer. Rows have unit length.
    Codes of tokens end in the stock `SpladePooling`; only `SparseEncoder` cuts them to `k`.
    """
    folder = Path(folder)
    modules = stock_modules(model)
    SentenceTransformer(modules=modules, device="cpu", similarity_fn_name="cosine").save_pretrained(
        str(folder)
    )
    # Torch warns of sparse tensors whose checks are neither asked for nor declined.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        SparseEncoder(
            modules=modules, device="cpu", similarity_fn_name="cosine", max_active_dims=model.head.k
        ).save_pretrained(str(folder / "sparse_encoder"))
    return folder


def stock_modules(model: NonNegEncoder) -> list[nn.Module]:
    """The model as sentence-transformers modules, on the CPU."""
    if model.encoder.tower != "text":
        raise ValueError("only text encoders have a form in sentence-transformers; this is images")
    layers = [layer for layer in model.head.fold().cpu() if not isinstance(layer, nn.Identity)]
    if not type(layers[1]).__module__.startswith("torch.nn") or (
        model.head.k is not None and model.head.activation not in ("relu", "rep_relu")
    ):
        raise ValueError(
            f"sentence-transformers has no module for activation={model.head.activation!r} with "
            f"k={model.head.k}; train with relu"
        )
    modules = _encoder_modules(model.encoder)
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if model.encoder.pooling == "tokens":
        if model.head.hidden is not None or model.head.activation not in ("relu", "rep_relu"):
            raise ValueError("sentence-transformers reads tokens with a linear layer and relu only")
        dense = _dense(linear[0], nn.Identity(), "token_embeddings")
        return [modules[0], dense, SpladePooling("max"), Normalize()]
    for layer in linear[:-1]:
        modules.append(_dense(layer, nn.ReLU()))
    if model.head.k is None:
        modules.append(_dense(linear[-1], layers[-1] if len(layers) % 2 == 0 else nn.Identity()))
    else:
        modules.append(_largest(linear[-1], model.head.k))
    return [*modules, Normalize()]


def export_onnx(model: NonNegEncoder, path: str | Path) -> Path:
    """Write encoder and folded head as one ONNX graph from token ids to unit codes.

    The batch and the length of sentences are free. The graph is run once with onnxruntime and must
    give the model's own codes to 1e-4, which is what single precision allows.
    """
    with needs("ncl-multi[onnx]"):
        import onnxruntime
    if model.encoder.pooling == "tokens":
        raise ValueError("codes of tokens have no ONNX graph; use export_sentence_transformers")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    model = model.eval().cpu()
    sentences = ["Two dogs run over a green field.", "Snow.", "A man is playing the guitar."]
    inputs = model.encoder.prepare(sentences)
    names = [name for name in inputs if name in ("input_ids", "attention_mask", "token_type_ids")]
    graph = _Codes(model, names).eval()
    arguments = tuple(inputs[name] for name in names)
    rows, tokens = torch.export.Dim("rows"), torch.export.Dim("tokens")
    torch.onnx.export(
        graph, arguments, str(path), input_names=names, output_names=["codes"], dynamo=True,
        dynamic_shapes=(tuple({0: rows, 1: tokens} for _ in names),), verbose=False,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    got = session.run(None, {name: inputs[name].numpy() for name in names})[0]
    with torch.no_grad():
        apart = float((torch.from_numpy(got) - graph(*arguments)).abs().max())
    if apart > 1e-4:
        raise ValueError(f"the ONNX graph differs from the model by {apart:.2g}; it is at {path}")
    return path


class _Codes(nn.Module):
    """The model as a function of plain tensors."""

    def __init__(self, model: NonNegEncoder, names: list[str]):
        super().__init__()
        self.encoder, self.head, self.names = model.encoder, model.head.fold(), names

    def forward(self, *tensors: Tensor) -> Tensor:
        h = self.encoder(dict(zip(self.names, tensors, strict=True)))
        return F.normalize(self.head(h), dim=1)


def _encoder_modules(encoder: Encoder) -> list[Any]:
    if encoder.stock:
        return list(encoder.model.cpu().children())
    if encoder.pooling not in (*_POOLING, "tokens"):
        raise ValueError(f"sentence-transformers has no pooling {encoder.pooling!r}")
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        body = Transformer(folder)
    pooling = _POOLING.get(encoder.pooling)
    return [body] if pooling is None else [body, Pooling(encoder.width, pooling)]


def _dense(layer: nn.Linear, activation: nn.Module, reads: str = "sentence_embedding") -> Dense:
    return Dense(
        layer.in_features,
        layer.out_features,
        activation_function=activation,
        init_weight=layer.weight.detach(),
        init_bias=layer.bias.detach(),
        module_input_name=reads,
    )


@torch.no_grad()
def _largest(layer: nn.Linear, k: int) -> SparseAutoEncoder:
    module: Any = SparseAutoEncoder(layer.in_features, layer.out_features, k=k, k_aux=0)
    module.encoder.weight.copy_(layer.weight)
    module.latent_bias.copy_(layer.bias)
    return module
