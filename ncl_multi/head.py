"""The non-negative head, from features to sparse readable codes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ncl_multi.distributed import all_reduce_sum, world_size
from ncl_multi.losses.checks import at_least_float32
from ncl_multi.norm import SharedCentre, SharedNorm, moments

Activation = Literal["relu", "rep_relu", "softplus", "sigmoid", "exp", "none", "gelu", "leaky_relu"]
SIGNED: tuple[Activation, ...] = ("none", "gelu", "leaky_relu")
"""The baselines: their codes are not non-negative. `none` is the contrastive twin."""
Start = Literal["axes", "clusters"]


@dataclass(frozen=True)
class HeadOptions:
    """The options of a `NonNegHead`; they are explained there.

    Example:
        >>> HeadOptions(2048, k=32).build(384).out_dim
        2048
    """

    dims: int
    hidden_dim: int | None = None
    activation: Activation = "relu"
    batch_norm: bool = True
    density: float | None = None
    k: int | None = None

    def build(self, in_dim: int) -> "NonNegHead":
        """A fresh head for features of this width."""
        options = asdict(self)
        return NonNegHead(in_dim, options.pop("dims"), **options)

    def signed(self) -> "HeadOptions":
        """The options of the signed twin: no activation, density or k, no other change."""
        return replace(self, activation="none", density=None, k=None)


class NonNegHead(nn.Module):
    """A linear or one-hidden-layer projector whose output is non-negative and sparse.

    Args:
        in_dim: Width of the encoder's features.
        out_dim: Number of non-negative dimensions.
        hidden_dim: Width of a hidden layer; None for a linear head.
        activation: `relu`, `rep_relu` (ReLU forward, GELU gradient: revives silent units),
            `softplus`, `sigmoid`, `exp`; or a signed baseline, `none`, `gelu`, `leaky_relu`.
        batch_norm: Standardise each dimension over the batch, and over all processes, before the
            activation. On by default: no dimension can die, and training cannot stay at chance.
            Off is the paper's projector; its bias is set from the first batch so that every
            dimension starts alive.
        density: The sparsity dial: every dimension fires for about this share of rows. The
            threshold is the value that this share of a standard normal exceeds, so it needs
            `batch_norm`; in training the threshold of a dimension is then raised if it fires too
            often, and lowered if too rarely. Train with `anneal` to lower the density gradually.
        k: Keep only the k largest entries of a row.

    Example:
        >>> head = NonNegHead(384, 2048, density=0.1)
        >>> z = head(torch.randn(64, 384) + 5)
        >>> bool((z >= 0).all()), 0.08 < (z > 0).float().mean().item() < 0.12
        (True, True)
    """

    threshold: Tensor
    own_threshold: Tensor
    share: Tensor

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        hidden_dim: int | None = None,
        activation: Activation = "relu",
        batch_norm: bool = True,
        density: float | None = None,
        k: int | None = None,
    ):
        super().__init__()
        for name, size in {"in_dim": in_dim, "out_dim": out_dim, "hidden_dim": hidden_dim}.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")
        if activation not in _SERVED:
            names = ", ".join(_SERVED)
            raise ValueError(f"activation must be one of {names}; got {activation!r}")
        if k is not None and not 1 <= k <= out_dim:
            raise ValueError(f"k must lie in 1..{out_dim}, the head's width; got {k}")
        if density is not None:
            if not 0 < density <= 0.5:
                raise ValueError(
                    f"density must lie in (0, 0.5]; got {density}. 0.1 is a good start"
                )
            if activation not in ("relu", "rep_relu") or not batch_norm:
                raise ValueError(
                    f"density needs batch_norm and activation relu or rep_relu; got "
                    f"activation={activation!r}, batch_norm={batch_norm}"
                )
        self.in_dim, self.out_dim, self.hidden_dim = in_dim, out_dim, hidden_dim
        self.activation, self.density, self.k = activation, density, k
        self.hidden = None
        if hidden_dim is not None:
            self.hidden = nn.Linear(in_dim, hidden_dim, bias=not batch_norm)
        self.out = nn.Linear(hidden_dim or in_dim, out_dim, bias=not batch_norm)
        self.hidden_norm = SharedNorm(hidden_dim) if batch_norm and hidden_dim else None
        self.norm = SharedNorm(out_dim) if batch_norm else None
        # Centred first, so that a large mean of the input does not make the running mean of the
        # output lag behind weights that move.
        self.centre = SharedCentre(in_dim) if batch_norm else None
        if density is not None:
            self.register_buffer("share", torch.tensor(density))
            self.register_buffer("threshold", torch.tensor(_threshold(density)))
            self.register_buffer("own_threshold", torch.zeros(out_dim))
        # The first batch must not change weights that were loaded.
        self._fresh = not batch_norm
        self.register_load_state_dict_post_hook(_not_fresh)

    def forward(self, x: Float[Tensor, "n in_dim"]) -> Float[Tensor, "n out_dim"]:
        if x.ndim != 2 or x.shape[1] != self.in_dim:
            raise ValueError(
                f"this head takes rows of {self.in_dim} features, shape (n, {self.in_dim}); "
                f"got {tuple(x.shape)}"
            )
        if self.centre is not None:
            x = self.centre(x)
        if self.hidden is not None:
            x = self.hidden(x)
            x = F.relu(x if self.hidden_norm is None else self.hidden_norm(x))
        if self._fresh and self.training:
            self._start_alive(x)
        h = self.out(x)
        if self.norm is not None:
            h = self.norm(h)
        if self.density is not None:
            h = h - (self.threshold + self.own_threshold).to(h.dtype)
            if self.training:
                self._keep_to_share(h)
        z = _activate(h, self.activation)
        return z if self.k is None else top_k(z, self.k)

    def anneal(self, progress: float) -> None:
        """Set the density for this share of the run, from 0 to 1.

        It falls geometrically from one half to `density` over the first 70 %, which costs much less
        quality than starting there. `fit` calls this before every step.
        """
        if self.density is not None:
            share = 0.5 * (self.density / 0.5) ** min(progress / 0.7, 1.0)
            self.share.fill_(share)
            self.threshold.fill_(_threshold(share))

    @torch.no_grad()
    def start_on(
        self, x: Float[Tensor, "n in_dim"], way: Start = "axes", *, plain: bool = False
    ) -> None:
        """Start the dimensions on axes or clusters of these features, not at random.

        Args:
            x: Features, centred if the head is trained on centred ones.
            way: `axes` are those of `sparse_axes`, the strongest first. Each gives two dimensions,
                one per direction, so that the largest entries of a row contain much of it.
                `clusters` gives each dimension one of the centres of `k_means`, for k-means++
                seeded by torch's generator, so that it fires for similar rows.
            plain: For a head without `batch_norm`: all directions of unit length and no bias, so
                that entries start as cosines. The first batch does not standardise them.

        If there are fewer axes or distinct rows than dimensions, the last dimensions keep their
        random start.

        Example:
            >>> kinds = torch.eye(3)[torch.arange(60) % 3] - 1 / 3
            >>> head = NonNegHead(3, 3)
            >>> head.start_on(kinds, "clusters")
            >>> (head(kinds) > 0).sum(dim=1).unique()  # each row fires the dimension of its kind
            tensor([1])
        """
        if way == "clusters":
            self.start_at(k_means(x, self.out_dim), plain=plain)
            return
        if way != "axes":
            raise ValueError(f"way must be one of axes, clusters; got {way!r}")
        self.start_at(axes_both_ways(x)[: self.out_dim], plain=plain)

    @torch.no_grad()
    def start_at(self, directions: Float[Tensor, "m in_dim"], *, plain: bool = False) -> None:
        """Start the first dimensions as these directions, with the average length of random ones.

        For `plain` see `start_on`.
        """
        if self.hidden is not None:
            raise ValueError("start_on needs a linear head; this one has a hidden layer")
        weight = self.out.weight
        length = directions.norm(dim=1).mean().clamp_min(1e-12)
        weight[: len(directions)] = (directions / length).to(weight) * weight.norm(dim=1).mean()
        if plain:
            if self.out.bias is None:
                raise ValueError("a plain start needs a head without batch_norm")
            weight.copy_(F.normalize(weight, dim=1))
            self.out.bias.zero_()
            self._fresh = False

    @torch.no_grad()
    def centre_on(self, mean: Float[Tensor, " in_dim"]) -> None:
        """Map this mean to zero, in a linear head without `batch_norm`.

        The first batch then does not standardise the dimensions: they keep their lengths.
        """
        if self.out.bias is not None and self.hidden is None:
            self.out.bias.copy_(-(self.out.weight @ mean.to(self.out.weight)))
            self._fresh = False

    @torch.no_grad()
    def fold(self) -> nn.Sequential:
        """The head for inference: normalisation and threshold are merged into linear layers.

        Only Linear and ReLU, unless there is a hidden layer, another activation or `k`.
        """
        centre = None if self.centre is None else self.centre.mean
        shift = None if self.density is None else self.threshold + self.own_threshold
        layers: list[nn.Module] = []
        if self.hidden is not None:
            layers += [_merge(self.hidden, centre, self.hidden_norm, None), nn.ReLU()]
            centre = None
        layers.append(_merge(self.out, centre, self.norm, shift))
        layers.append(_SERVED[self.activation]())
        if self.k is not None:
            layers.append(TopK(self.k))
        return nn.Sequential(*layers).eval()

    @property
    def options(self) -> "HeadOptions":
        """What this head was made with."""
        return HeadOptions(
            self.out_dim, self.hidden_dim, self.activation, self.norm is not None, self.density,
            self.k,
        )  # fmt: skip

    @property
    def trained(self) -> bool:
        """Whether it has seen a training batch, or weights were loaded."""
        return not self._fresh if self.norm is None else bool(self.norm.batches > 0)

    @torch.no_grad()
    def signed(self) -> "NonNegHead":
        """The signed baseline with the same weights."""
        twin = self.options.signed().build(self.in_dim).to(self.out.weight)
        state = self.state_dict()
        twin.load_state_dict({name: state[name] for name in twin.state_dict()})
        twin._fresh = self._fresh
        return twin.train(self.training)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, density={self.density}, k={self.k}"

    @torch.no_grad()
    def _keep_to_share(self, h: Tensor) -> None:
        """Raise thresholds of dimensions that fire too often, lower those of the others."""
        fired = all_reduce_sum((h > 0).sum(dim=0).float()) / (len(h) * world_size())
        self.own_threshold += 0.1 * (fired / self.share - 1)

    @torch.no_grad()
    def _start_alive(self, x: Tensor) -> None:
        """Scale and shift the weights so that outputs of the first batch are standardised."""
        if len(x) * world_size() < 2:
            return
        mean, variance = moments(at_least_float32(self.out(x)))
        scale = (variance + SharedNorm.eps).rsqrt().to(self.out.weight.dtype)
        self.out.weight.mul_(scale[:, None])
        self.out.bias.sub_(mean.to(scale.dtype)).mul_(scale)
        self._fresh = False


@torch.no_grad()
def sparse_axes(x: Float[Tensor, "n d"], steps: int = 60) -> Float[Tensor, "d d"]:
    """The rotation, one axis per row, that makes unit rows sparsest by their fourth powers.

    As in varimax and independent component analysis. Each step is the best rotation towards the
    gradient.

    Example:
        >>> x = torch.eye(3)[torch.arange(90) % 3]
        >>> turn = torch.linalg.qr(torch.randn(3, 3))[0]
        >>> (sparse_axes(x @ turn.T) @ turn).abs().amax(dim=1).round(decimals=3)
        tensor([1., 1., 1.])
    """
    unit = F.normalize(x, dim=1)
    axes = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    for _ in range(steps):
        left, _, right = torch.linalg.svd((unit @ axes.T).pow(3).T @ unit)
        axes = left @ right
    return axes


@torch.no_grad()
def axes_both_ways(x: Float[Tensor, "n d"]) -> Float[Tensor, "m d"]:
    """`sparse_axes`, the strongest first, each followed by its opposite."""
    axes = sparse_axes(x)
    strongest = F.normalize(x, dim=1).matmul(axes.T).square().mean(dim=0)
    axes = axes[strongest.argsort(descending=True)]
    return torch.stack([axes, -axes], dim=1).flatten(0, 1)


@torch.no_grad()
def k_means(x: Float[Tensor, "n d"], k: int, steps: int = 15) -> Float[Tensor, "m d"]:
    """Centres of k clusters of rows: k-means++, then Lloyd's steps until they converge.

    Random numbers come from torch's generator. With fewer than k distinct rows there are as many
    centres as distinct rows. An empty cluster keeps its centre.

    Example:
        >>> x = torch.tensor([[0.0], [2.0], [10.0], [12.0]])
        >>> k_means(x, 2).sort(dim=0).values.flatten()
        tensor([ 1., 11.])
    """
    if k < 1 or len(x) == 0:
        raise ValueError(f"k_means needs rows and k of at least 1; got {len(x)} rows and k={k}")
    centres = _spread_rows(x, k)
    nearest = None
    for _ in range(steps):
        previous, nearest = nearest, _nearest(x, centres)
        if previous is not None and torch.equal(previous, nearest):
            break
        count = torch.bincount(nearest, minlength=len(centres))[:, None]
        total = torch.zeros_like(centres).index_add_(0, nearest, x)
        centres = torch.where(count > 0, total / count.clamp_min(1), centres)
    return centres


@torch.no_grad()
def joined_clusters(x: Float[Tensor, "n d"], k: int) -> Float[Tensor, "m d"]:
    """Centres of k clusters of rows: those of `k_means` for four times as many, joined by `ward`.

    Clusters of few rows join their neighbours, so clusters are more even than those of `k_means`
    for k, and more alike for other random numbers. `k_means` finds fewer centres where there would
    be fewer than four rows for each, but never fewer than k.

    Example:
        >>> x = torch.arange(1.0, 4.0).repeat_interleave(20)[:, None] + 0.01 * torch.randn(60, 1)
        >>> joined_clusters(x, 3).sort(dim=0).values.flatten().round()
        tensor([1., 2., 3.])
    """
    centres = k_means(x, max(k, min(4 * k, len(x) // 4)))
    return ward(centres, torch.bincount(_nearest(x, centres), minlength=len(centres)), k)


@torch.no_grad()
def ward(centres: Float[Tensor, "n d"], sizes: Int[Tensor, " n"], k: int) -> Float[Tensor, "m d"]:
    """Centres of k clusters: two at a time are joined, where that spreads rows around them least.

    Ward's method, of clusters with these centres and numbers of rows. Joining two raises the
    squared distances of their rows to their centre by that of their centres, times the product of
    their sizes over the sum.

    Example:
        >>> ward(torch.tensor([[0.0], [3.0], [8.0]]), torch.tensor([1, 2, 1]), 2).flatten()
        tensor([2., 8.])
    """
    # Empty clusters are joined first, and weigh nothing.
    rows = sizes.double().clamp_min(1e-9)
    around = (centres - centres.mean(dim=0)).double()
    rise = torch.cdist(around, around).square() * rows[:, None] * rows / (rows[:, None] + rows)
    rise.fill_diagonal_(torch.inf)
    cluster, total = torch.arange(len(centres), device=centres.device), rows.clone()
    least, partner = rise.min(dim=1)
    for _ in range(len(centres) - k):
        a = int(least.argmin())
        b = int(partner[a])
        # The rise of joining both with a third, by the formula of Lance and Williams.
        joined = (total[a] + total) * rise[a] + (total[b] + total) * rise[b] - total * rise[a, b]
        rise[a] = rise[:, a] = joined / (total[a] + total[b] + total)
        rise[b] = rise[:, b] = torch.inf
        total[a] += total[b]
        cluster[cluster == b] = a
        # A joined cluster is never nearer to a third than the nearer of its two parts was, so only
        # those that had one of them as their partner look for another.
        stale = (partner == a) | (partner == b)
        stale[[a, b]] = True
        least[stale], partner[stale] = rise[stale].min(dim=1)
    _, cluster = cluster.unique(return_inverse=True)
    sums = around.new_zeros(int(cluster.max()) + 1, centres.shape[1])
    weight = around.new_zeros(len(sums)).index_add_(0, cluster, rows)
    sums.index_add_(0, cluster, centres * rows[:, None])
    return (sums / weight[:, None]).to(centres)


def _nearest(x: Tensor, centres: Tensor) -> Int[Tensor, " n"]:
    """The nearest centre of each row."""
    length = centres.square().sum(dim=1)
    # In chunks: the matrix of all distances could be larger than the rows.
    return torch.cat(
        [torch.addmm(length, rows, centres.T, alpha=-2).argmin(dim=1) for rows in x.split(8192)]
    )


def _spread_rows(x: Tensor, k: int) -> Tensor:
    """k-means++: the next row is drawn in proportion to its squared distance to the drawn ones."""
    around = x - x.mean(dim=0)
    length = around.square().sum(dim=1)
    far = torch.full_like(length, torch.inf)
    drawn = [int(torch.randint(len(x), ()))]
    while len(drawn) < k:
        both = length + length[drawn[-1]]
        apart = both - 2 * (around @ around[drawn[-1]])
        # Rounding errors count as zero: equal rows are not drawn twice.
        far = torch.minimum(far, torch.where(apart > 1e-5 * both, apart, 0.0))
        odds = far.double().cumsum(dim=0)
        if odds[-1] == 0:
            break
        at = torch.rand((), dtype=torch.float64).to(odds.device) * odds[-1]
        drawn.append(int(torch.searchsorted(odds, at, right=True).clamp_max(len(x) - 1)))
    return x[drawn]


class TopK(nn.Module):
    """`top_k` for `nn.Sequential`."""

    def __init__(self, k: int):
        super().__init__()
        self.k = k

    def forward(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return top_k(z, self.k)


def top_k(z: Float[Tensor, "n d"], k: int) -> Float[Tensor, "n d"]:
    """Keep the k largest entries of each row, by size, and set the rest to zero.

    Example:
        >>> top_k(torch.tensor([[3.0, 1.0, 2.0]]), 2)
        tensor([[3., 0., 2.]])
    """
    return top_ks(z, (k,))[0]


def top_ks(z: Float[Tensor, "n d"], ks: Sequence[int]) -> list[Float[Tensor, "n d"]]:
    """`top_k` for several k at once, with one search for the largest entries.

    Example:
        >>> top_ks(torch.tensor([[3.0, 1.0, 2.0]]), (2, 1))
        [tensor([[3., 0., 2.]]), tensor([[3., 0., 0.]])]
    """
    for k in ks:
        if not 1 <= k <= z.shape[1]:
            raise ValueError(f"k must lie in 1..{z.shape[1]}, the number of dimensions; got {k}")
    # They are sorted: the entries for a smaller k are the first of those for a larger one.
    indices = z.abs().topk(max(ks), dim=1).indices
    largest = z.gather(1, indices)
    return [torch.zeros_like(z).scatter_(1, indices[:, :k], largest[:, :k]) for k in ks]


class _Exp(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.exp()


_SERVED: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "rep_relu": nn.ReLU,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
    "exp": _Exp,
    "none": nn.Identity,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
}


def _activate(h: Tensor, activation: Activation) -> Tensor:
    if activation == "rep_relu":
        soft = F.gelu(h)
        # In this order the difference is exactly zero, and so are ReLU's zeros.
        return F.relu(h).detach() + (soft - soft.detach())
    return _SERVED[activation]()(h)


def _threshold(share: float) -> float:
    """The value that this share of a standard normal exceeds."""
    return NormalDist().inv_cdf(1 - share)


def _merge(
    linear: nn.Linear, centre: Tensor | None, norm: SharedNorm | None, shift: Tensor | None
) -> nn.Linear:
    """A linear layer merged with centring before it, and norm and threshold after it."""
    weight, bias = linear.weight.double(), linear.weight.new_zeros(linear.out_features).double()
    if linear.bias is not None:
        bias = linear.bias.double()
    if centre is not None:
        bias = bias - weight @ centre.double()
    if norm is not None:
        scale = (norm.variance.double() + norm.eps).rsqrt()
        weight, bias = weight * scale[:, None], (bias - norm.mean.double()) * scale
    if shift is not None:
        bias = bias - shift.double()
    # Its random initialisation, which is overwritten, must not advance the global generator.
    with torch.random.fork_rng(devices=[]):
        merged = nn.Linear(
            linear.in_features, linear.out_features,
            device=linear.weight.device, dtype=linear.weight.dtype,
        )  # fmt: skip
    merged.weight.copy_(weight)
    merged.bias.copy_(bias)
    return merged


def _not_fresh(head: Any, _: object) -> None:
    head._fresh = False
