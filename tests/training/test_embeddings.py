"""Neighbours, examples and the objective of embeddings, against loops."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ncl_multi.data.shards import Shards
from ncl_multi.head import NonNegHead, k_means, top_k
from ncl_multi.losses import imitation, info_nce
from ncl_multi.training.embeddings import (
    EmbeddingObjective,
    SameGroup,
    read_examples,
    same_rows,
    start_heads,
)
from ncl_multi.training.neighbours import Neighbours, nearest


def rows(n=30, d=6, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_nearest_rows_are_those_of_highest_cosine():
    x = rows().double()
    unit = F.normalize(x, dim=1)
    for row, near in enumerate(nearest(x, 4)):
        cosines = [(float(unit[row] @ other), at) for at, other in enumerate(unit) if at != row]
        assert near.tolist() == [at for _, at in sorted(cosines, reverse=True)[:4]]


def test_many_rows_are_compared_within_clusters():
    torch.manual_seed(0)
    kinds = torch.eye(5).repeat_interleave(40, dim=0) + 0.01 * rows(200, 5)
    near = nearest(kinds, 3, most_compared=100)
    assert (near // 40 == (torch.arange(200) // 40)[:, None]).all()
    alone = (near == torch.arange(200)[:, None]).any(dim=1)
    assert alone.float().mean() < 0.05
    with pytest.raises(ValueError, match="at least two rows"):
        nearest(kinds[:1], 1)


def test_a_partner_is_a_neighbour_or_of_the_same_group():
    x = rows()
    near = Neighbours(x, 5)
    drawn = near.of(torch.arange(30))
    assert all(partner in near.nearest[row] for row, partner in enumerate(drawn))
    groups = torch.tensor([4, 4, 4, 9, 9, 1])
    for _ in range(20):
        partners = SameGroup(groups).of(torch.arange(6))
        assert torch.equal(groups[partners], groups)
        assert (partners != torch.arange(6))[:5].all()
        assert partners[5] == 5


def test_equal_rows_are_not_rivals():
    x = rows(4)
    assert same_rows(x[[0, 1, 0, 2]]).unique(return_counts=True)[1].tolist().count(2) == 1
    assert len(same_rows(torch.tensor([[0.0], [-0.0]])).unique()) == 1


def test_examples_are_drawn_with_their_rows_only():
    x = rows(50).numpy()
    torch.manual_seed(0)
    few = read_examples([Shards(x)], None, None, neighbours=3, max_rows=20)
    assert len(few.rows) == len(few.sides[0]) == 20
    assert np.array_equal(few.sides[0].numpy(), x[few.numbers])
    pairs = np.array([[40, 3], [7, 40]])
    some = read_examples([Shards(x)], pairs, None, neighbours=3, max_rows=20)
    assert some.numbers.tolist() == [3, 7, 40]
    assert some.numbers[some.rows.numpy()].tolist() == pairs.tolist()
    with pytest.raises(ValueError, match="one group per row, 50"):
        read_examples([Shards(x)], None, [1, 2], neighbours=3, max_rows=20)
    with pytest.raises(ValueError, match="not both"):
        read_examples([Shards(x)], pairs, np.arange(50), neighbours=3, max_rows=20)


def test_the_loss_is_contrast_and_imitation_of_cut_and_whole_codes():
    data = read_examples(
        [Shards(rows().numpy())], None, np.arange(30) % 7, neighbours=3, max_rows=99
    )
    head = NonNegHead(6, 16, batch_norm=False)
    start_heads([head], data)
    objective = EmbeddingObjective(
        nn.ModuleList([head]), data, [3], temperature=0.1, imitation=2.0,
        noise=0.0,
    )  # fmt: skip
    torch.manual_seed(3)
    loss, z = objective(torch.arange(12)[:, None])
    torch.manual_seed(3)
    partners = data.partners.of(torch.arange(12))
    h = [F.normalize(data.sides[0][own], dim=1) for own in (torch.arange(12), partners)]
    whole = [head(x) for x in h]
    groups = torch.arange(12) % 7
    expected = 0.0
    for query in (top_k(whole[0], 3), whole[0]):
        other = top_k(whole[1], 3)
        expected += info_nce(query, other, temperature=0.1, groups=groups).item() / 2
        expected += 2.0 * imitation((query, other), (h[0], h[1]), 0.1).item() / 2
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(z, whole[0], atol=1e-6)


def test_cut_codes_of_two_sides_imitate_whole_ones_of_rows_with_half_of_them_dropped():
    # Wide enough that no code is zero, and none a rounding error.
    x, y = rows(d=20), rows(d=16, seed=1)
    torch.manual_seed(0)
    data = read_examples(
        [Shards(side.numpy()) for side in (x, y)], None, None, neighbours=3, max_rows=99
    )
    heads = nn.ModuleList([NonNegHead(width, 64, batch_norm=False) for width in (20, 16)])
    start_heads(heads, data)
    objective = EmbeddingObjective(heads, data, [3], temperature=0.1, imitation=2.0, noise=0.0)
    torch.manual_seed(3)
    loss, z = objective(torch.arange(12)[:, None].expand(-1, 2))
    torch.manual_seed(3)
    torch.randint(1, ())
    units = [F.normalize(side, dim=1) for side in (x, y)]
    whole = []
    for head, unit in zip(heads, units, strict=True):
        around = unit[:12] - unit.mean(dim=0)
        kept = F.dropout(torch.ones_like(around), 0.5) / 2
        whole.append(head(unit.mean(dim=0) + 2 * kept * around))
    cut = [top_k(side, 3) for side in whole]
    expected = info_nce(*whole, temperature=0.1) + info_nce(*cut, temperature=0.1)
    expected = (expected + 2.0 * imitation(tuple(cut), tuple(whole), 0.1)) / 2
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(z, whole[0], atol=1e-6)


def test_dimensions_start_on_what_rows_do_not_have_in_common():
    common = rows() + 20
    data = read_examples([Shards(common.numpy())], None, None, neighbours=3, max_rows=99)
    head = NonNegHead(6, 12, batch_norm=False)
    start_heads([head], data)
    share = (head(F.normalize(common, dim=1)) > 0).float().mean(dim=0)
    assert share.min() > 0.1
    assert share.max() < 0.9


@pytest.mark.parametrize(("dims", "clusters", "axes"), [(8, 4, 4), (30, 18, 12), (40, 20, 12)])
def test_dimensions_start_on_clusters_and_on_axes_both_ways(dims, clusters, axes):
    x = rows(60)
    data = read_examples([Shards(x.numpy())], None, None, neighbours=3, max_rows=99)
    head = NonNegHead(6, dims, batch_norm=False)
    torch.manual_seed(0)
    start_heads([head], data)
    weight = head.out.weight.detach()
    unit = F.normalize(x, dim=1)
    around = F.normalize(unit - unit.mean(dim=0), dim=1)
    torch.manual_seed(0)
    # At most a cluster for three rows, half as long as the axes.
    centres = F.normalize(k_means(around, clusters), dim=1) / 2
    assert torch.allclose(weight[:clusters], centres, atol=1e-5)
    signed = weight[clusters : clusters + axes]
    assert torch.allclose(signed[0::2], -signed[1::2], atol=1e-5)
    assert torch.allclose(weight[clusters:].norm(dim=1), torch.ones(dims - clusters), atol=1e-5)
