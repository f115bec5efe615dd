"""Codes of tokens: a head on every token of a text, whose strongest token counts.

A text is then found by what single words mean in it, as words are found by BM25. Such a code is
made of other parts than one of a whole text, and costs the same to store.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import csr_array
from torch import Tensor, nn

from ncl_multi.adapters.sentence.corpus import Corpus
from ncl_multi.adapters.sentence.encoder import length
from ncl_multi.adapters.sentence.model import NonNegEncoder, both_directions
from ncl_multi.adapters.sentence.objective import SentenceObjective
from ncl_multi.codes.features import to_csr
from ncl_multi.head import NonNegHead, TopK, top_k

_BATCH = 64
_START = 20_000
"""Tokens that dimensions start on."""


def strongest(z: Float[Tensor, "m d"], counts: Sequence[int]) -> Float[Tensor, "n d"]:
    """`log(1 + z)` of the largest entry among the tokens of each text, `counts` tokens each.

    The logarithm is what SPLADE does: a token that is twice as strong does not count twice.

    Example:
        >>> strongest(torch.tensor([[0.0, 1.0], [3.0, 0.0], [0.0, 0.0]]), [2, 1]).exp()
        tensor([[4., 2.],
                [1., 1.]])
    """
    return torch.stack([text.amax(dim=0) for text in z.split(list(counts))]).log1p()


class TokenHead(nn.Module):
    """A head for the tokens of several texts: one code per text."""

    def __init__(self, head: NonNegHead):
        super().__init__()
        self.head = head

    def forward(self, tokens: Sequence[Tensor]) -> Float[Tensor, "n dims"]:
        return strongest(self.head(torch.cat(list(tokens))), [len(text) for text in tokens])


class TokenObjective(SentenceObjective):
    """As for whole texts, but codes are made of tokens. The teacher reads whole texts."""

    def __init__(self, model: TokenHead, tokens: Sequence[Tensor], *arguments: Any):
        super().__init__(model, *arguments)
        self.tokens = tokens

    def _inputs(self, rows: Tensor, h: Tensor) -> list[Tensor]:
        drop = self.config.dropout
        texts = (self.tokens[row].to(h.device, torch.float32) for row in rows.tolist())
        return [nn.functional.dropout(text, drop) for text in texts]


class NonNegTokens(NonNegEncoder):
    """A non-negative head on the tokens of a frozen encoder: `wrap(name, pooling="tokens")`.

    `fit` reads the tokens of all its texts into memory, 0.8 kB each for MiniLM.
    """

    def forward(self, inputs: dict[str, Tensor]) -> Float[Tensor, "n dims"]:
        """Codes of a batch that `encoder.prepare` made."""
        z = TokenHead(self.head)(self.encoder.tokens(inputs))
        return z if self.head.k is None else top_k(z, self.head.k)

    def stream(
        self,
        items: Any,
        *,
        k: int | None = None,
        batch_size: int | None = None,
        progress: bool = False,
    ) -> Iterator[csr_array]:
        self._check_can_encode(k)
        k = k or self.head.k
        with self._evaluating():
            head = self.head.fold()
            head = head[:-1] if isinstance(head[-1], TopK) else head

            def read(texts: list[str]) -> Tensor:
                tokens = self._tokens(texts)
                return strongest(head(torch.cat(tokens)), [len(text) for text in tokens])

            for z in self._embedded(items, batch_size, progress, read, _maxima):
                yield to_csr(z if k is None else top_k(z, k))

    def queries(self, items: Any, **_: Any) -> csr_array:
        raise ValueError("codes of tokens have no signed form; use encode(queries, k=...)")

    def _tokens(self, texts: list[str]) -> list[Tensor]:
        inputs = self.encoder.prepare(texts)
        device = self.encoder.device
        return self.encoder.tokens({name: tensor.to(device) for name, tensor in inputs.items()})

    def _read(self, texts: Sequence[str], precision: str) -> list[Tensor]:
        """The tokens of each text, of all its passages, in half precision."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        pieces, owners = self._pieces(list(texts))
        order = sorted(range(len(pieces)), key=lambda piece: -length(pieces[piece]))
        tokens: list[list[Tensor]] = [[] for _ in texts]
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            with (
                torch.inference_mode(),
                torch.autocast(self.device.type, half, enabled=half is not None),
            ):
                read = self._tokens([pieces[piece] for piece in batch])
            for piece, rows in zip(batch, read, strict=True):
                # A copy of its own: a view would keep the whole batch in memory.
                tokens[owners[piece]].append(rows.half().cpu().clone())
        return [torch.cat(rows) for rows in tokens]

    def _objective(self, corpus: Corpus, h: Tensor, ks: Any, config: Any) -> SentenceObjective:
        if config.finetune:
            raise ValueError("codes of tokens are trained on a frozen encoder, without finetune")
        with self._evaluating():
            tokens = self._read(corpus.sentences, config.precision)
        every = torch.cat(tokens)
        sample = every[torch.randint(len(every), (min(len(every), _START),))].float()
        mean = sample.mean(dim=0)
        if self.head.hidden_dim is None and config.start != "random":
            # Axes have two directions each; wider heads start on clusters.
            if config.start == "axes" and self.dims <= 2 * sample.shape[1]:
                self.head.start_at(both_directions(sample - mean, self.dims))
            else:
                self.head.start_on(sample - mean, "clusters")
            self.head.centre_on(mean)
        return TokenObjective(TokenHead(self.head), tokens, corpus, h, ks, config)


def _maxima(z: Tensor, owners: np.ndarray, count: int) -> Tensor:
    """The largest entries of the passages of each text."""
    if len(z) == count:
        return z
    return torch.stack([text.amax(dim=0) for text in z.split(np.bincount(owners).tolist())])
