"""Graphs: views and sampling by hand, the model, bad graphs, the recipe in a few steps."""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import HalfHop
from torch_geometric.utils import to_undirected

from ncl_multi import Features, info_nce, spectral
from ncl_multi.adapters.graph.config import GraphConfig, active, rule
from ncl_multi.adapters.graph.data import (
    check,
    describe,
    encoder_input,
    load_graph,
    prepare,
)
from ncl_multi.adapters.graph.drawing import _spring, drawings
from ncl_multi.adapters.graph.even import EvenTopK, even_top_k, fit_energy
from ncl_multi.adapters.graph.links import hide_links
from ncl_multi.adapters.graph.model import ENCODERS, NonNegGraph
from ncl_multi.adapters.graph.objective import GraphObjective, cluster_cores
from ncl_multi.adapters.graph.report import node_names
from ncl_multi.adapters.graph.sampling import TorchSampler, neighbor_loader
from ncl_multi.adapters.graph.views import Adaptive, View, view, with_slow_nodes
from ncl_multi.head import top_k
from ncl_multi.losses import reconstruction_loss
from ncl_multi.metrics.nodes import (
    Split,
    _fewer_columns,
    agreement,
    communities,
    k_means,
    link_prediction,
    node_accuracy,
    random_split,
    strongest_dimension,
    strongest_group,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import graph_ncl


@pytest.fixture
def graph() -> Data:
    """Three groups of ten nodes, wired within, each with words of its own."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(3).repeat_interleave(10)
    pairs = torch.randint(10, (2, 90), generator=generator) + 10 * torch.arange(3).repeat(30)
    pairs = pairs[:, pairs[0] != pairs[1]]
    x = torch.zeros(30, 150)
    x[
        torch.arange(30).repeat(3), torch.randint(50, (90,), generator=generator) + 50 * y.repeat(3)
    ] = 1
    return Data(x=x, edge_index=to_undirected(pairs, num_nodes=30), y=y)


def as_sparse(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return x.to_sparse_csr()


def line(nodes: int) -> torch.Tensor:
    return torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])


# Views


def test_a_view_drops_about_the_share_it_was_asked_for():
    torch.manual_seed(0)
    x, edges, _ = view(torch.ones(3, 4000), line(4001), edges=0.3, features=0.2)
    assert edges.shape[1] / 4000 == pytest.approx(0.7, abs=0.03)
    assert x[0].mean().item() == pytest.approx(0.8, abs=0.03)
    assert (x == x[0]).all(), "the same columns go for all nodes"


def test_a_view_that_drops_nothing_is_the_graph(graph):
    x, edges, _ = view(graph.x, graph.edge_index, edges=0.0, features=0.0)
    assert torch.equal(x, graph.x)
    assert torch.equal(edges, graph.edge_index)


def test_sparse_features_lose_whole_columns_too(graph):
    torch.manual_seed(0)
    x, *_ = view(as_sparse(graph.x), graph.edge_index, edges=0.0, features=0.5)
    dense = x.to_dense()
    gone = (dense.sum(0) == 0) & (graph.x.sum(0) > 0)
    assert 15 < gone.sum() < 60
    assert torch.equal(dense[:, ~gone], graph.x[:, ~gone])


def test_adaptive_factors_are_gca_by_hand():
    edges = torch.tensor([[0, 1, 2, 0, 3, 4], [1, 2, 0, 3, 4, 0]])
    x = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]])
    degrees = [2.0, 1, 1, 1, 1]
    log = torch.tensor([(degrees[a] + degrees[b]) / 2 for a, b in edges.T.tolist()]).log()
    factors = Adaptive.by_degree(x, edges)
    assert torch.allclose(factors.edges, (log.max() - log) / (log.max() - log.mean()))
    # Feature 0 is carried by degrees 2 + 1, feature 1 by 1 + 1, feature 2 by none: the rarest.
    log = torch.tensor([3.0, 2.0, 2.0]).log()
    assert torch.allclose(factors.features, (log.max() - log) / (log.max() - log.mean()))
    assert factors.edges.mean().item() == pytest.approx(1.0)


def test_adaptive_dropping_spares_the_hub_and_never_exceeds_its_ceiling():
    torch.manual_seed(0)
    factors = Adaptive(torch.tensor([0.0, 1.0, 9.0]).repeat(3000), torch.ones(4))
    edges = torch.arange(9000).repeat(2, 1)
    _, kept, _ = view(torch.ones(9000, 4), edges, edges=0.3, features=0.0, adaptive=factors)
    shares = torch.bincount(kept[0] % 3, minlength=3) / 3000
    assert shares[0] == 1
    assert shares[1].item() == pytest.approx(0.7, abs=0.03)
    assert shares[2].item() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_to_drop_outside_zero_to_one_is_refused(graph, share):
    with pytest.raises(ValueError, match="edges to drop"):
        view(graph.x, graph.edge_index, edges=share, features=0.1)


def test_half_hop_is_pygs_transform(graph):
    for x in (graph.x, as_sparse(graph.x)):
        torch.manual_seed(3)
        slow = with_slow_nodes(x, graph.edge_index, 0.4)
        torch.manual_seed(3)
        theirs = HalfHop(p=0.4)(Data(x=graph.x, edge_index=graph.edge_index))
        assert torch.equal(slow.edge_index, theirs.edge_index)
        assert torch.allclose(slow.x.to_dense(), theirs.x)
    assert len(slow.x.to_dense()) > 30, "new nodes come after the real ones"


def test_weights_of_edges_go_with_their_edges_and_half_hop_refuses_them():
    weight, edges = torch.arange(8.0), torch.arange(8).repeat(2, 1)
    kept = view(torch.ones(8, 2), edges, weight, edges=0.5, features=0.0)
    assert torch.equal(kept.edge_attr, kept.edge_index[0].float())
    with pytest.raises(ValueError, match="this graph has weights"):
        view(torch.ones(8, 2), edges, weight, edges=0.0, features=0.0, half_hop=0.5)


# Sampling


def test_sampled_neighbours_are_true_distinct_and_no_more_than_asked(graph):
    torch.manual_seed(0)
    seeds = torch.tensor([25, 3, 14])
    part = neighbor_loader(graph, [2, 3])(seeds)
    assert torch.equal(part.n_id[:3], seeds)
    assert torch.equal(part.x, graph.x[part.n_id])
    real = set(map(tuple, graph.edge_index.T.tolist()))
    drawn = part.n_id[part.edge_index].T.tolist()
    assert all(tuple(edge) in real for edge in drawn)
    assert len(set(map(tuple, drawn))) == len(drawn)
    into = torch.bincount(part.edge_index[1], minlength=3)
    assert into[:3].max() <= 2
    assert into.max() <= 3


def test_every_neighbour_is_drawn_equally_often():
    torch.manual_seed(0)
    star = Data(
        x=torch.ones(6, 1), edge_index=torch.stack([torch.arange(1, 6), torch.zeros(5).long()])
    )
    sampler = TorchSampler(star, [2])
    drawn = torch.cat([sampler._edges_into(torch.tensor([0]), 2) for _ in range(2000)])
    shares = torch.bincount(drawn, minlength=5) / 2000
    assert torch.allclose(shares, torch.full((5,), 0.4), atol=0.04)


def test_a_node_without_edges_can_be_sampled():
    alone = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [1]]))
    part = neighbor_loader(alone, [2, 2])(torch.tensor([2]))
    assert part.num_nodes == 1
    assert part.edge_index.shape == (2, 0)


# The model


def stock(model, encoder):
    """PyG's encoder with the weights of the model's."""
    pygs = ENCODERS[encoder](6, 4, 2, 4, act="prelu").double()
    pygs.load_state_dict(model.encoder.state_dict())
    return pygs


@pytest.mark.parametrize("encoder", ["gcn", "sage", "gin"])
def test_one_product_is_the_sum_of_pygs_messages(encoder):
    torch.manual_seed(0)
    edges = torch.randint(40, (2, 200)).unique(dim=1)
    edges = edges[:, edges[0] != edges[1]]  # one way; `prepare` takes the others away
    x = torch.rand(40, 6, dtype=torch.float64)
    model = NonNegGraph(8, in_dim=6, encoder=encoder, width=4).double()
    messages = stock(model, encoder)(x, edges)
    torch.testing.assert_close(model._encode(x, edges), messages, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_encoder_gives_unit_non_negative_sparse_rows(graph, encoder):
    codes = NonNegGraph(32, in_dim=150, encoder=encoder, width=8, density=0.1).encode(graph)
    assert isinstance(codes, csr_array)
    assert codes.shape == (30, 32)
    assert codes.min() >= 0
    lengths = torch.from_numpy(codes.multiply(codes).sum(axis=1))
    assert (((lengths - 1).abs() < 1e-5) | (lengths == 0)).all()


def test_sparse_features_give_the_codes_of_dense_ones(graph):
    model = NonNegGraph(16, in_dim=150, width=8).eval()
    (dense,) = model(View(graph.x, graph.edge_index))
    (sparse,) = model(View(as_sparse(graph.x), graph.edge_index))
    assert torch.allclose(dense, sparse, atol=1e-6)


def test_codes_follow_the_nodes_when_these_are_renumbered(graph):
    model = NonNegGraph(16, in_dim=150, width=8)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    place = order.argsort()
    moved = Data(x=graph.x[order], edge_index=place[graph.edge_index])
    codes = model.encode(graph, dense=True)
    assert torch.allclose(model.encode(moved, dense=True), codes[order], atol=1e-6)


def test_rows_choose_the_nodes_that_are_coded(graph):
    model = NonNegGraph(16, in_dim=150, width=8).eval()
    view_of_all = View(graph.x, graph.edge_index)
    rows = torch.tensor([4, 0, 29])
    za, zb = model(view_of_all, view_of_all, rows=rows)
    assert torch.equal(za, zb)
    assert torch.allclose(za, model(view_of_all)[0][rows], atol=1e-6)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_few_nodes_are_encoded_and_learn_as_if_all_were(encoder, words):
    torch.manual_seed(0)
    x = (torch.rand(50, 40) < 0.02).float() if words else torch.randn(50, 40)
    edges = torch.randint(45, (2, 150)).unique(dim=1)
    data = prepare(Data(x=x, edge_index=edges, edge_weight=torch.rand(edges.shape[1])))
    model = NonNegGraph(16, in_dim=40, encoder=encoder, width=8, encoder_activation="relu").double()
    view_of_all = model.view_of(data)
    view_of_all = view_of_all._replace(x=view_of_all.x.double())
    rows = torch.tensor([49, 3, 17, 0])
    gradients = []
    for h in (model._encode(*view_of_all, rows=rows), model._encode(*view_of_all)[rows]):
        gradients.append(torch.autograd.grad(h.square().sum(), [*model.encoder.parameters()]))
        gradients[-1] += (h,)
    for few, whole in zip(*gradients, strict=True):
        assert torch.allclose(few, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_layer_by_layer_gives_the_codes_of_the_whole_graph(encoder, words, directed):
    torch.manual_seed(0)
    x = (torch.rand(50, 40) < 0.02).float() if words else torch.randn(50, 40)
    edges = torch.randint(45, (2, 150)).unique(dim=1)  # the last nodes have no edges
    weights = {
        "gcn": {"edge_weight": torch.rand(edges.shape[1])},
        "gat": {"edge_attr": torch.rand(edges.shape[1], 3)},
    }
    data = Data(x=x, edge_index=edges, **weights.get(encoder, {}))
    edge_dim = 3 if encoder == "gat" else None
    model = NonNegGraph(
        16, in_dim=40, encoder=encoder, width=8, directed=directed, edge_dim=edge_dim
    )
    whole = model.embed(data)
    for block in (1, 7, 50):
        assert torch.allclose(model.embed(data, batch_size=block), whole, atol=1e-6)


def test_a_graph_that_is_too_large_is_encoded_layer_by_layer(graph, monkeypatch):
    model = NonNegGraph(16, in_dim=150, width=8)
    whole = model.embed(graph)
    monkeypatch.setattr("ncl_multi.adapters.graph.config.WHOLE", 29)
    monkeypatch.setattr("ncl_multi.adapters.graph.model._BLOCK", 4)
    monkeypatch.delattr(NonNegGraph, "_encode")
    assert torch.allclose(model.embed(graph), whole, atol=1e-6)


def test_an_encoder_of_ones_own_takes_the_whole_graph(graph):
    model = NonNegGraph(16, in_dim=150, encoder=OneLayer(), width=8)
    assert torch.equal(model.embed(graph, batch_size=7), model.embed(graph))


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GCNConv(150, 8)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


STILL = {"drop_edges": (0.0, 0.0), "drop_features": (0.0, 0.0), "temperature": 0.5}


def objective_on(graph, **options):
    model = NonNegGraph(16, in_dim=graph.num_features, width=8)
    config = GraphConfig(**STILL | options).for_graph(30, graph.num_edges).for_rows(30)
    return GraphObjective(model, prepare(graph), config).eval()


def by_length(z, length):
    z = F.normalize(z, dim=1) * length**0.5
    return spectral(z, z) / length


def test_the_objective_is_a_signed_contrast_and_that_of_the_codes(graph):
    nodes = torch.arange(20)
    objective = objective_on(graph, head_start=0.0, reconstruction=1.5)
    model, data = objective.model, objective.data
    (h,) = model.represent(model.view_of(data), rows=nodes)
    z = model.head(h)
    rebuilt = objective.rebuild(F.normalize(z, dim=1))
    expected = by_length(h, 1.0) + by_length(z, 5.0) + 1.5 * reconstruction_loss(rebuilt, h)
    loss, codes = objective(nodes)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(codes, z)


def test_encoder_and_codes_may_learn_from_info_nce_of_all_nodes(graph):
    objective = objective_on(graph, loss="info_nce", head_start=0.0, reconstruction=0.0)
    (h,) = objective.model.represent(objective.model.view_of(objective.data))
    z = objective.model.head(h)
    expected = sum(info_nce(x, x, temperature=0.5, within_view=True) for x in (h, z))
    assert objective(torch.arange(30))[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_codes_teach_the_head_and_not_the_encoder(graph):
    objective = objective_on(graph, head_start=0.0)
    loss, _ = objective(torch.arange(30))
    (h,) = objective.model.represent(objective.model.view_of(objective.data))
    weight = objective.model.encoder.convs[0].lin.weight
    of_all = torch.autograd.grad(loss, weight)[0]
    of_features = torch.autograd.grad(by_length(h, 1.0), weight)[0]
    assert torch.allclose(of_all, of_features, atol=1e-6)


def test_the_head_waits_for_its_start_and_takes_part_in_every_step(graph):
    objective = objective_on(graph, head_start=0.5).train()
    objective.anneal(0.4)
    weights = objective.model.head.out.weight.clone()
    loss, _ = objective(torch.arange(30))
    loss.backward()
    assert all(p.grad is not None for p in objective.parameters()), "as DDP asks"
    assert objective.model.head.out.weight.grad.abs().sum() == 0
    assert not objective.started
    objective.anneal(0.5)
    assert objective.started
    assert not torch.equal(objective.model.head.out.weight, weights)
    started = objective.model.head.out.weight.clone()
    objective.anneal(0.6)
    assert torch.equal(objective.model.head.out.weight, started), "it starts once"


def test_cluster_cores_lie_where_rows_are_alike():
    draw = torch.Generator().manual_seed(0)
    groups = F.normalize(torch.randn(3, 8, generator=draw), dim=1)
    h = groups.repeat_interleave(20, dim=0) + 0.05 * torch.randn(60, 8, generator=draw)
    stray = -groups.sum(dim=0, keepdim=True)
    torch.manual_seed(0)
    cores = cluster_cores(torch.cat([h, stray]), 4)
    near = (F.normalize(cores, dim=1) @ groups.T).amax(dim=0)
    assert (near > 0.98).all()
    assert len(cores) == 4
    assert cluster_cores(torch.ones(3, 2), 5).shape == (1, 2), "equal rows are one cluster"


def even_by_hand(row, k, energy):
    """The kept entries of a row, one at a time from the largest on."""
    order, kept, total = sorted(range(len(row)), key=lambda j: -row[j]), [], 0.0
    for j in order[: 2 * k]:
        if total >= energy and len(kept) >= (k + 1) // 2:
            break
        kept.append(j)
        total += row[j] ** 2
    return [value if j in kept else 0.0 for j, value in enumerate(row)]


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_even_codes_are_their_definition_and_have_k_entries_on_average(k):
    generator = torch.Generator().manual_seed(k)
    scale = torch.rand(200, 1, generator=generator, dtype=torch.float64) + 0.2
    z = scale * torch.rand(200, 16, generator=generator, dtype=torch.float64)
    energy = fit_energy(z, k)
    codes = even_top_k(z, k, energy)
    by_hand = [even_by_hand(row, k, energy) for row in z.tolist()]
    torch.testing.assert_close(codes, torch.tensor(by_hand, dtype=torch.float64), rtol=0, atol=0)
    assert (codes > 0).sum(dim=1).double().mean() == pytest.approx(k, abs=0.02)
    assert torch.equal(EvenTopK(k, energy)(z), codes)


def test_even_codes_have_about_one_length():
    torch.manual_seed(0)
    z = torch.rand(500, 1) * torch.rand(500, 64) + 0.5 * torch.rand(500, 64)
    plain, even = top_k(z, 6).norm(dim=1), even_top_k(z, 6, fit_energy(z, 6)).norm(dim=1)
    assert even.std() / even.mean() < 0.5 * plain.std() / plain.mean()


def test_a_fitted_model_serves_even_codes_until_it_is_shortened(graph, tmp_path):
    model = NonNegGraph(16, k=2, width=8).fit(graph, steps=4, device="cpu")
    counts = np.diff(model.encode(graph).indptr)
    assert counts.mean() == pytest.approx(2, abs=0.1)
    assert len(set(counts)) > 1
    model.save_pretrained(tmp_path)
    again = NonNegGraph.from_pretrained(tmp_path)
    assert torch.equal(again.encode(graph, dense=True), model.encode(graph, dense=True))
    assert set(np.diff(model.encode(graph, k=3).indptr)) <= {0, 1, 2, 3}, "exactly the k asked for"
    shorter = model.shorten(8, model.features(graph))
    assert np.diff(shorter.encode(graph).indptr).max() <= 2


def test_settling_fits_the_density_to_the_graph_as_it_is(graph):
    model = NonNegGraph(16, in_dim=150, width=8, density=0.2)
    config = GraphConfig(drop_features=(0.6, 0.6)).for_graph(30, graph.num_edges).for_rows(30)
    objective = GraphObjective(model, prepare(graph), config).train()
    for _ in range(5):
        objective(torch.arange(30))
    objective.settle()
    assert (model.encode(graph, dense=True) > 0).float().mean().item() == pytest.approx(
        0.2, abs=0.05
    )


def test_the_objective_takes_sampled_neighbours_adaptive_views_and_half_hop(graph):
    nodes = torch.arange(20)
    everyone = objective_on(graph, neighbors=(30, 30, 30))
    whole = objective_on(graph)
    assert everyone(nodes)[0].item() == pytest.approx(whole(nodes)[0].item(), rel=1e-5)
    for options in ({"adaptive": True}, {"half_hop": 0.5}, {"neighbors": (2, 2), "half_hop": 0.5}):
        moved = objective_on(graph, **options | {"drop_edges": (0.3, 0.3), "head_start": 0.0})
        assert moved(nodes)[0].isfinite()


# The rule


def test_one_rule_gives_the_settings_of_any_graph():
    small, large, huge = rule(34, 156), rule(34_493, 495_924), rule(1_000_000, 10_000_000)
    assert (small.dims, large.dims, huge.dims) == (8, 256, 512)
    assert small.neighbors is None
    assert large.neighbors is None, "all nodes are negatives"
    assert huge.neighbors
    for nodes in (2, 100, 2_708, 10**7):
        settings = rule(nodes, 4 * nodes)
        assert settings.dims <= 512
        assert settings.dims < nodes or nodes < 80
        assert active(settings.dims) <= max(2, settings.dims / 20)


def test_what_is_given_goes_before_the_rule():
    filled = GraphConfig().for_graph(1000, 5000)
    assert (filled.for_rows(1000).batch_size, filled.neighbors) == (1000, None)
    given = GraphConfig(lr=0.5, epochs=3, batch_size=64).for_graph(1000, 5000)
    assert (given.lr, given.epochs, given.steps, given.batch_size) == (0.5, 3, None, 64)
    sampled = GraphConfig(neighbors=(3, 3)).for_graph(100_000, 500_000)
    assert (sampled.neighbors, sampled.batch_size, sampled.steps) == ((3, 3), 2048, None)


def test_fit_needs_no_settings_and_codes_nodes_that_were_not_there(graph):
    new = 5  # The first nodes of the first group are left out of training.
    kept = torch.arange(new, 30)
    inside = (graph.edge_index >= new).all(dim=0)
    seen = Data(x=graph.x[kept], edge_index=graph.edge_index[:, inside] - new, y=graph.y[kept])
    model = NonNegGraph(width=16).fit(seen, steps=30)
    assert model.dims == 8
    z = model.encode(graph, dense=True)
    assert z.shape == (30, 8)
    alike = F.normalize(z, dim=1) @ F.normalize(z, dim=1).T
    assert alike[:new, new:10].mean() > 2 * alike[:new, 10:].mean(), "they look like their group"


def test_rebuilding_teaches_the_head_and_not_the_features(graph):
    h = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    rebuilt = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    wanted = [row - h.mean(dim=0) for row in h]
    by_hand = sum(
        1 - (a @ b / (a.norm() * b.norm())).item() for a, b in zip(rebuilt, wanted, strict=True)
    )
    loss = reconstruction_loss(rebuilt, h)
    assert loss.item() == pytest.approx(by_hand / 9, rel=1e-9)
    loss.backward()
    assert h.grad is None
    assert rebuilt.grad.abs().sum() > 0


def test_a_model_comes_back_from_disk_as_it_was(graph, tmp_path):
    model = NonNegGraph(
        16, in_dim=150, encoder="gat", width=8, encoder_activation="prelu", density=0.2
    )
    model.save_pretrained(tmp_path)
    again = NonNegGraph.from_pretrained(tmp_path)
    assert torch.equal(again.encode(graph, dense=True), model.encode(graph, dense=True))
    assert again.head.density == 0.2
    assert "ncl.load" in (tmp_path / "README.md").read_text()


def test_an_encoder_of_ones_own_is_saved_and_must_be_given_again(graph, tmp_path):
    model = NonNegGraph(16, in_dim=150, encoder=OneLayer(), width=8)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder of your own"):
        NonNegGraph.from_pretrained(tmp_path)
    again = NonNegGraph.from_pretrained(tmp_path, encoder=OneLayer())
    assert torch.equal(again.encode(graph, dense=True), model.encode(graph, dense=True))


def test_push_to_hub_uploads_config_weights_and_card(graph, tmp_path, monkeypatch):
    sent = {}

    def upload_folder(self, *, folder_path, **options):
        sent.update({path.name: path.stat().st_size for path in Path(folder_path).iterdir()})

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi.upload_folder", upload_folder)
    monkeypatch.setattr(
        "huggingface_hub.hub_mixin.HfApi.create_repo",
        lambda self, repo_id, **options: type("Repo", (), {"repo_id": repo_id}),
    )
    NonNegGraph(16, in_dim=150, width=8).push_to_hub("someone/graph")
    assert {"config.json", "model.safetensors", "README.md"} <= set(sent)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_forward_mixes_no_devices(encoder):
    with FakeTensorMode(shape_env=ShapeEnv()):
        with torch.device("cuda"):
            model = NonNegGraph(8, in_dim=6, encoder=encoder, width=4, density=0.2)
        x = torch.rand(5, 6, device="cuda")
        edges = torch.zeros(2, 7, dtype=torch.int64, device="cuda")
        views = [view(x, edges, edges=0.0, features=0.3) for _ in range(2)]
        za, zb = model(*views, rows=torch.zeros(3, dtype=torch.int64, device="cuda"))
    assert za.device.type == zb.device.type == "cuda"


def test_encoding_leaves_the_mode_as_it_was(graph):
    model = NonNegGraph(16, in_dim=150, width=8).train()
    before = model.head.norm.mean.clone()
    model.encode(graph)
    assert model.training
    assert torch.equal(model.head.norm.mean, before)


# Bad graphs


def test_self_loops_directed_edges_and_isolated_nodes_are_taken_care_of(capsys):
    ready = prepare(Data(x=torch.ones(4, 2), edge_index=torch.tensor([[0, 1, 1], [1, 1, 2]])))
    assert sorted(map(tuple, ready.edge_index.T.tolist())) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert "both ways" in capsys.readouterr().err
    assert torch.equal(encoder_input(ready), torch.full((4, 2), 10.0))
    assert NonNegGraph(4, in_dim=2, width=4).encode(ready).shape == (4, 4)


def test_preparing_twice_changes_nothing(graph):
    once = prepare(graph)
    twice = prepare(once)
    assert torch.allclose(once.x, twice.x)
    assert torch.equal(once.edge_index, twice.edge_index)


def test_directed_edges_stay_where_that_is_asked():
    edges = torch.tensor([[0, 1], [1, 2]])
    data = Data(x=torch.ones(3, 2), edge_index=edges)
    assert torch.equal(prepare(data, directed=True).edge_index, edges)


def test_signed_features_are_left_alone():
    x = torch.tensor([[-1.0, 3.0], [2.0, 2.0]])
    assert torch.equal(encoder_input(prepare(Data(x=x, edge_index=line(2)))), x)


def test_double_edges_are_merged_and_their_weights_added(capsys):
    edges = torch.tensor([[0, 0, 1, 2, 2], [1, 1, 0, 2, 1]])
    data = Data(x=torch.ones(3, 2), edge_index=edges, edge_weight=torch.tensor([1.0, 2, 3, 9, 4]))
    ready = prepare(data)
    rows = (*ready.edge_index.tolist(), ready.edge_weight.tolist())
    pairs = set(zip(*rows, strict=True))
    # 0 to 1 weighs 3 both ways; the loop is gone; 2 to 1 now also runs back.
    assert pairs == {(0, 1, 3.0), (1, 0, 3.0), (1, 2, 4.0), (2, 1, 4.0)}
    assert "occur more than once" in capsys.readouterr().err
    again = prepare(ready)
    assert torch.equal(again.edge_weight, ready.edge_weight)


def test_encoders_use_weights_and_features_of_edges_where_they_take_them(graph, capsys):
    weight = torch.rand(graph.num_edges)
    plain, weighted = graph.clone(), graph.clone()
    weighted.edge_weight = weight
    for encoder, changes in (("gcn", True), ("sage", False)):
        model = NonNegGraph(8, in_dim=150, width=4, encoder=encoder, directed=True)
        codes = [model.embed(data) for data in (plain, weighted)]
        assert torch.allclose(*codes) is not changes
        assert ("edge_weight is not used" in capsys.readouterr().err) is not changes
    plain.edge_attr = torch.rand(graph.num_edges, 3)
    gat = NonNegGraph(8, width=4, encoder="gat").fit(plain, steps=2, device="cpu")
    assert gat.edge_dim == 3
    with pytest.raises(ValueError, match="takes 3 features per edge; got None"):
        gat.encode(graph)


def test_one_product_with_weights_is_the_sum_of_pygs_messages():
    torch.manual_seed(0)
    edges = torch.randint(40, (2, 200)).unique(dim=1)
    edges = edges[:, edges[0] != edges[1]]
    x, weight = torch.rand(40, 6).double(), torch.rand(edges.shape[1]).double()
    model = NonNegGraph(8, in_dim=6, width=4).double()
    messages = stock(model, "gcn")(x, edges, edge_weight=weight)
    torch.testing.assert_close(model._encode(x, edges, weight), messages, rtol=1e-9, atol=1e-9)


def test_features_that_are_all_zero_give_way_to_degrees(graph, capsys):
    ready = prepare(Data(x=torch.zeros(30, 4), edge_index=graph.edge_index))
    assert ready.x.shape == (30, 48)
    assert "features of all nodes are zero" in capsys.readouterr().err


def test_sparse_features_of_a_graph_are_those_of_the_dense_graph(graph):
    dense = prepare(graph)
    for x in (graph.x.to_sparse(), as_sparse(graph.x)):
        sparse = Data(x=x, edge_index=graph.edge_index)
        assert torch.equal(prepare(sparse).x, dense.x)
        assert sparse.x.layout == x.layout, "the user's graph is not changed"


def test_features_may_be_mapped_from_a_file(graph, tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(graph.x.numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=graph.x.numel()).view(30, -1)
    data = Data(x=mapped, edge_index=graph.edge_index)
    assert prepare(data).x.data_ptr() == mapped.data_ptr(), "not copied"
    model = NonNegGraph(8, width=4).fit(data, steps=2, neighbors=(2, 2), device="cpu")
    assert model.encode(data, batch_size=7).shape == (30, 8)


def test_a_multigraph_is_its_graph(capsys):
    networkx = pytest.importorskip("networkx")
    several = networkx.MultiGraph([(0, 1), (0, 1), (1, 2), (2, 2)])
    once = networkx.Graph([(0, 1), (1, 2)])
    assert torch.equal(prepare(several).edge_index, prepare(once).edge_index)
    assert "1 edges occur more than once" in capsys.readouterr().err
    alone = networkx.Graph()
    alone.add_node("a")
    with pytest.raises(ValueError, match="at least two nodes; got 1"):
        prepare(alone)


def test_a_graph_of_several_kinds_is_refused_with_what_to_do():
    data = HeteroData()
    data["paper"].x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"to_homogeneous\(\)"):
        prepare(data)


def test_a_graph_without_edges_is_coded_node_by_node():
    data = Data(x=torch.eye(3), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    assert NonNegGraph(4, in_dim=3, width=4).encode(data).shape == (3, 4)


NONE, EDGE = torch.zeros(2, 0, dtype=torch.int64), torch.tensor([[0], [1]])


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (Data(x=torch.zeros(0, 3), edge_index=NONE), "at least two nodes; got 0"),
        (Data(x=torch.ones(1, 3), edge_index=NONE), "at least two nodes; got 1"),
        (Data(edge_index=EDGE, num_nodes=2), "nodes need features"),
        (Data(x=torch.zeros(2, 0), edge_index=EDGE), "nodes need features"),
        (Data(x=torch.ones(2, 2)), "a graph is a torch_geometric.data.Data"),
        ([1, 2], "got list"),
        (Data(x=torch.tensor([[1.0], [float("nan")]]), edge_index=EDGE), "first node 1"),
        (Data(x=torch.ones(2, 1), edge_index=EDGE + 1), r"nodes 0..1; got 1..2"),
        (Data(x=torch.ones(2, 1), edge_index=EDGE - 1), r"got -1..0"),
        (Data(x=torch.ones(2, 1), edge_index=EDGE.float()), "must be int64"),
        (Data(x=torch.ones(2, 1), edge_index=EDGE[0]), r"\(2, edges\)"),
        (
            Data(x=torch.ones(2, 1), edge_index=EDGE, y=torch.zeros(3)),
            r"one per node, 2; got",
        ),
    ],
)
def test_a_bad_graph_is_refused_with_what_is_wrong(data, complaint):
    with pytest.raises(ValueError, match=complaint):
        check(data)


def test_a_graph_with_another_number_of_features_is_refused(graph):
    with pytest.raises(ValueError, match="takes 7 features per node; got 150"):
        NonNegGraph(4, in_dim=7).encode(graph)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"encoder": "mlp"}, "gcn, gat, sage, gin"),
        ({"width": 0}, "width must be at least 1"),
        ({"activation": "tanh"}, "activation must be one of"),
        ({"density": 0.9}, "density must lie in"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(options, complaint, unchecked):
    with pytest.raises(ValueError, match=complaint):
        NonNegGraph(8, in_dim=4, **options)


# Data from anywhere


def test_a_saved_graph_is_read_without_running_code(graph, tmp_path):
    torch.save(graph, tmp_path / "graph.pt")
    again = load_graph(str(tmp_path / "graph.pt"))
    assert torch.equal(again.x, graph.x)
    torch.save({"run": print}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="it was not read"):
        load_graph(str(tmp_path / "evil.pt"))
    (tmp_path / "cut.pt").write_bytes((tmp_path / "graph.pt").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"cut.pt was not written by torch.save, was cut short"):
        load_graph(str(tmp_path / "cut.pt"))
    with pytest.raises(FileNotFoundError, match="write one with"):
        load_graph(str(tmp_path / "missing.pt"))


def test_graphs_of_users_are_read_and_made_ready(tmp_path):
    networkx = pytest.importorskip("networkx")
    ring = networkx.cycle_graph(12)
    (tmp_path / "edges.csv").write_text("".join(f"{a},{b}\n" for a, b in ring.edges))
    networkx.write_graphml(ring, tmp_path / "ring.graphml")
    expected = prepare(ring)
    assert expected.x.shape == (12, 48)
    for name in ("edges.csv", "ring.graphml"):
        source = load_graph(str(tmp_path / name))
        ready = prepare(source)
        assert torch.equal(ready.x, expected.x)
        both_ways = {*map(tuple, expected.edge_index.T.tolist())}
        assert {*map(tuple, ready.edge_index.T.tolist())} == both_ways
        assert describe(name, ready, source)[0][3] == "node 3"
    matrix = csr_array(networkx.to_scipy_sparse_array(ring))
    assert torch.equal(prepare(matrix).x, expected.x)
    torch.save(Data(edge_index=expected.edge_index, num_nodes=12), tmp_path / "bare.pt")
    assert load_graph(str(tmp_path / "bare.pt")).x.shape == (12, 48)
    with pytest.raises(FileNotFoundError, match="does not exist; graphs are files that end in"):
        load_graph(str(tmp_path / "missing.csv"))


def test_any_pyg_dataset_is_found_by_name():
    assert load_graph("KarateClub").num_nodes == 34
    with pytest.raises(ValueError, match="KarateClub or Amazon:Photo"):
        load_graph("NoSuchGraph")
    with pytest.raises(ValueError, match="name one"):
        load_graph("Amazon")


def test_nodes_are_described_by_text_or_label(graph):
    items, classes, words = describe("mine", graph, graph)
    assert words is None
    assert items[10] == "class 1, node 10"
    assert classes == ["class 0", "class 1", "class 2"]
    graph.title = [f"paper {node}" for node in range(30)]
    assert describe("mine", graph, graph).items[3] == "paper 3"
    bare = Data(x=graph.x, edge_index=graph.edge_index)
    assert describe("mine", bare, bare) == ([f"node {n}" for n in range(30)], None, None)


def test_dimensions_are_named_by_features_else_classes_else_typical_nodes():
    y = torch.arange(2).repeat_interleave(6)
    x = torch.eye(2)[y]
    z = torch.eye(2)[y] * torch.linspace(1, 0.5, 12)[:, None]
    z = F.normalize(torch.cat([z, torch.full((12, 1), 0.01)], dim=1), dim=1)[:, :2]
    data = Data(x=x, edge_index=line(12), y=y)
    bare = Data(x=x, edge_index=line(12))
    assert node_names(z, y, describe("mine", data, data)) == ["class 0", "class 1"]
    assert node_names(z, None, describe("mine", bare, bare)) == [
        "like node 0, node 1", "like node 6, node 7",
    ]  # fmt: skip
    parts = torch.zeros(12, 3)
    parts[[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1]] = 1.0
    parts[6:, 2] = 1.0
    assert node_names(parts, y, describe("mine", data, data)) == [
        "class 0: node 0", "class 0: node 3", "class 1",
    ]  # fmt: skip
    data.feature_names = ["camera", "lens"]
    nodes = describe("mine", data, data)
    assert nodes.items[0] == "class 0, node 0: camera"
    assert node_names(z, y, nodes) == ["camera", "lens"]
    data.feature_names = ["camera"]
    with pytest.raises(ValueError, match="list of 2 names; got 1"):
        describe("mine", data, data)


def test_a_drawing_has_the_strongest_nodes_and_the_links_between_them(graph):
    z = torch.zeros(30, 3)
    z[:10, 0], z[10:, 1] = torch.linspace(1, 0.1, 10), 1.0
    first, second, silent = drawings(z, graph.edge_index, graph.y, nodes=8)
    real = set(map(tuple, graph.edge_index.T.tolist()))
    assert first["nodes"] == list(range(8))
    assert first["classes"] == graph.y[:8].tolist()
    expected = [[a, b] for a in range(8) for b in range(a + 1, 8) if (a, b) in real]
    assert first["links"] == expected
    assert len(second["nodes"]) == 8
    assert silent["nodes"] == []
    assert all(0 <= place <= 100 for place in first["x"] + first["y"])
    places = {*zip(first["x"], first["y"], strict=True)}
    assert len(places) == 8, "no node hides another"
    crowd = [(a, b) for a in range(11) for b in range(a)]
    places = _spring(12, np.array(crowd))  # The twelfth node has no links.
    apart = np.linalg.norm(places[:, None] - places[None], axis=2)[~np.eye(12, dtype=bool)]
    assert apart.min() > 0.25, "circles of radius .12 do not touch"
    assert drawings(z, graph.edge_index)[0]["classes"] == [-1] * 10
    assert drawings(torch.zeros(30, 4097), graph.edge_index) == []


def test_labels_may_be_missing_for_some_nodes():
    y = torch.tensor([[0.0], [float("nan")], [1.0]])
    ready = prepare(Data(x=torch.ones(3, 2), edge_index=line(3), y=y))
    assert ready.y.tolist() == [0, -1, 1]
    assert describe("mine", ready, ready)[0][1] == "unlabelled, node 1"


def test_mostly_empty_features_become_sparse_and_others_stay(graph):
    data = prepare(graph)
    words = encoder_input(data, sparse=True)
    assert words.layout == torch.sparse_csr
    assert torch.allclose(words.to_dense(), encoder_input(data))
    assert words.to_dense().sum(dim=1).unique().tolist() == pytest.approx([20.0])
    full = prepare(Data(x=torch.ones(4, 4), edge_index=line(4)))
    assert encoder_input(full, sparse=True).layout == torch.strided


# Scores


def test_a_random_split_is_two_tenths_and_the_rest_without_unlabelled_nodes():
    y = torch.cat([torch.zeros(50), torch.ones(50), torch.full((20,), -1.0)]).long()
    split = random_split(y, seed=3)
    assert [len(own) for own in split] == [10, 10, 80]
    assert sorted(torch.cat(split).tolist()) == list(range(100))
    assert torch.equal(random_split(y, seed=3).train, split.train)
    assert not torch.equal(random_split(y, seed=4).train, split.train)


def test_codes_that_are_the_class_are_classified_without_error():
    y = torch.arange(3).repeat(40)
    z = torch.eye(3)[y]
    right = {"validation": 1.0, "test": 1.0}
    assert node_accuracy(z, y, random_split(y, 0, share=0.3)) == right
    assert node_accuracy(csr_array(z.numpy() * 7), y, random_split(y, 0, share=0.3)) == right
    few = Split(torch.arange(6), torch.arange(6, 9), torch.arange(9, 120))
    assert node_accuracy(z * 7, y, few) == right
    with pytest.raises(ValueError, match="all have one label"):
        node_accuracy(z, y, Split(torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([2])))


def test_wide_codes_of_a_narrow_space_are_judged_in_fewer_columns():
    draw = torch.Generator().manual_seed(0)
    narrow = torch.randn(60, 20, generator=draw)
    wide = narrow @ torch.linalg.qr(torch.randn(100, 20, generator=draw)).Q.T
    fewer = _fewer_columns(wide, most=32)
    assert fewer.shape == (60, 32)
    torch.testing.assert_close(fewer @ fewer.T, wide @ wide.T, rtol=1e-4, atol=1e-4)
    y = (narrow[:, 0] > 0).long()
    split = Split(torch.arange(40), torch.arange(40, 50), torch.arange(50, 60))
    assert node_accuracy(fewer, y, split) == node_accuracy(narrow, y, split)
    rich, sparse = torch.randn(60, 100, generator=draw), torch.eye(60, 100)
    for z in (rich, sparse):
        assert _fewer_columns(z, most=32) is z


def test_the_strongest_dimension_is_the_cluster():
    y = torch.arange(3).repeat(40)
    z = torch.eye(5)[y] + 0.1 * torch.rand(120, 5, generator=torch.Generator().manual_seed(0))
    assert agreement(strongest_dimension(z), y) == {"clusters": 3, "nmi": 1.0, "ari": 1.0}
    assert agreement(k_means(z, 3, seed=0), y)["ari"] == pytest.approx(1.0)
    sparse = csr_array(z.numpy())
    assert torch.equal(strongest_dimension(sparse), strongest_dimension(z))
    assert torch.equal(k_means(sparse, 3, seed=0), k_means(z, 3, seed=0))


def test_dimensions_that_fire_together_are_one_group():
    y = torch.arange(3).repeat_interleave(20)
    z = torch.zeros(60, 10)  # The last dimension is silent.
    draw = torch.Generator().manual_seed(0)
    for group in range(3):
        z[y == group, 3 * group : 3 * group + 3] = torch.rand(20, 3, generator=draw)
    assert agreement(strongest_group(z, 3), y)["ari"] == pytest.approx(1.0)
    assert agreement(strongest_group(csr_array(z.numpy()), 3), y)["ari"] == pytest.approx(1.0)
    assert strongest_group(torch.zeros(4, 2), 3).tolist() == [0, 0, 0, 0]


def test_communities_of_dimensions_are_found_without_their_number():
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(300) % 4
    fires = torch.rand(300, 25, generator=draw) < 0.3
    z = (fires & (torch.arange(25) % 4 == y[:, None])).float()
    z[:, 24] = 0
    found = communities(z)
    assert len(np.unique(found)) == 5, "the silent dimension is a group of its own"
    assert all(len(np.unique(found[:24][kind::4])) == 1 for kind in range(4))
    fired = (z > 0).any(dim=1)
    assert agreement(strongest_group(z)[fired], y[fired])["nmi"] == pytest.approx(1.0)
    assert strongest_group(torch.zeros(5, 1)).tolist() == [0] * 5


def test_joining_groups_is_the_best_gain_of_modularity_by_hand():
    z = torch.rand(40, 6, generator=torch.Generator().manual_seed(1))
    z = F.normalize(z * (z > 0.6), dim=1)
    weight = (z.T @ z).double().fill_diagonal_(0)
    weight = weight / weight.sum()

    def modularity(groups):
        return sum(
            weight[i, j] - weight[i].sum() * weight[j].sum()
            for group in groups for i in group for j in group if i != j
        )  # fmt: skip

    groups = [[i] for i in range(6)]
    while len(groups) > 1:
        tried = {}
        for i in range(len(groups)):
            for j in range(i):
                rest = [group for k, group in enumerate(groups) if k not in (i, j)]
                merged = [*rest, groups[i] + groups[j]]
                tried[float(modularity(merged))] = merged
        if max(tried) <= float(modularity(groups)) + 1e-12:
            break
        groups = tried[max(tried)]
    found = communities(z)
    assert {frozenset(np.flatnonzero(found == g)) for g in found} == set(map(frozenset, groups))


def test_hidden_links_are_gone_in_both_directions_and_others_are_none(graph):
    data = prepare(graph)
    data.edge_weight = torch.arange(float(data.num_edges))
    hidden = hide_links(data, 0.2, seed=1)
    real = set(map(tuple, data.edge_index.T.tolist()))
    left = set(map(tuple, hidden.graph.edge_index.T.tolist()))
    gone = set(map(tuple, hidden.linked.T.tolist()))
    assert left | gone | {(b, a) for a, b in gone} == real
    assert left.isdisjoint(gone)
    assert len(gone) == round(0.2 * len(real) / 2)
    assert real.isdisjoint(map(tuple, hidden.others.T.tolist()))
    assert len(hidden.graph.edge_weight) == hidden.graph.num_edges


def test_links_within_groups_are_predicted_by_codes_of_groups():
    z = torch.eye(2).repeat_interleave(5, dim=0)
    linked, others = torch.tensor([[0, 5], [1, 6]]), torch.tensor([[0, 1], [5, 6]])
    for codes in (z, csr_array(z.numpy())):
        assert link_prediction(codes, linked, others) == {"link_auc": 1.0, "link_ap": 1.0}
    half = link_prediction(torch.ones(10, 1), linked, others)
    assert half["link_auc"] == 0.5


# The recipe


def short(tmp_path: Path, **options) -> graph_ncl.Config:
    small = {"steps": 4, "dims": 16, "width": 8, "density": 0.2, "device": "cpu", "batch_size": 20}
    return graph_ncl.Config(out=tmp_path / "run", **small | options)


def test_the_recipe_writes_a_whole_run_with_its_twin(graph, tmp_path):
    torch.save(graph, tmp_path / "graph.pt")
    rows = graph_ncl.main(short(tmp_path, data=str(tmp_path / "graph.pt")))
    assert set(rows) == {"ncl", "twin"}
    assert rows["twin"]["all"]["sparsity"] < 0.1 < rows["ncl"]["all"]["sparsity"]
    run = tmp_path / "run"
    assert json.loads((run / "metrics.json").read_text()) == rows
    for folder in (run, run / "twin"):
        for name in ("config.json", "train.jsonl", "model/model.safetensors"):
            assert (folder / name).exists(), name
        files = {path.stem for path in (folder / "features").iterdir()}
        assert files == {"all_encoder", "all_head"}
    assert (run / "atlas.html").exists()
    head = Features.load(run / "features" / "all_head.safetensors")
    assert head.items[10] == "class 1, node 10"
    assert head.about["output"] == "head"
    assert len(head.about["drawings"]) == len(head.about["names"]) == 16
    assert {"link_auc", "nmi", "group_nmi", "community_nmi", "k_means_nmi", "purity_at_10"} <= set(
        rows["ncl"]["all"]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "info_nce", "batch_size": None, "hidden_links": 0.0},
        {"neighbors": (3, 3), "model": "sage"},
        {"adaptive": True, "half_hop": 0.5},
        {"neighbors": (3, 3), "adaptive": True, "k": 4, "density": None},
    ],
)
def test_the_recipe_trains_every_way_it_offers(graph, tmp_path, options):
    torch.save(Data(x=graph.x, edge_index=graph.edge_index), tmp_path / "graph.pt")
    cfg = short(tmp_path, data=str(tmp_path / "graph.pt"), twin=False, **options)
    row = graph_ncl.main(cfg)["ncl"]["all"]
    assert "encoder_accuracy" not in row, "there are no labels"
    assert row["alive"] > 0.5


@pytest.mark.parametrize(("without", "classified"), [(slice(0, 2), True), (slice(4, 30), False)])
def test_the_recipe_measures_a_graph_where_some_nodes_have_labels(
    graph, tmp_path, without, classified, capsys
):
    graph.y = torch.arange(30) % 3
    graph.y[without] = -1
    graph.y[0] = -1
    torch.save(graph, tmp_path / "graph.pt")
    cfg = short(tmp_path, data=str(tmp_path / "graph.pt"), twin=False)
    row = graph_ncl.main(cfg)["ncl"]["all"]
    assert {"nmi", "group_nmi", "class_consistency"} <= set(row)
    assert ({"encoder_accuracy", "head_accuracy"} <= set(row)) is classified
    assert ("accuracy is left out" in capsys.readouterr().err) is not classified
    head = Features.load(tmp_path / "run" / "features" / "all_head.safetensors")
    assert head.items[0] == "unlabelled, node 0"


def test_a_killed_run_resumes_to_the_same_weights(graph, tmp_path):
    cfg = GraphConfig(steps=4, device="cpu", batch_size=20, neighbors=(2, 2), checkpoint_every=2)
    fresh = {"width": 8, "density": 0.2}
    whole = NonNegGraph(16, **fresh).fit(graph, cfg)

    class KilledError(Exception):
        pass

    calls = []

    def dies(*args, **options):
        calls.append(1)
        if len(calls) > 4:
            raise KilledError
        return view(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ncl_multi.adapters.graph.objective.view", dies)
        with pytest.raises(KilledError):
            NonNegGraph(16, **fresh).fit(graph, cfg, out=tmp_path / "run")
    NonNegGraph(16, **fresh).fit(graph, cfg, out=tmp_path / "run")
    again = NonNegGraph.from_pretrained(tmp_path / "run")
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_sparsity_left_open_is_a_twentieth_of_the_dimensions(graph):
    def sparsity(**options):
        model = NonNegGraph(60, width=8, **options).fit(graph, steps=1, device="cpu")
        return model.head.density, model.head.k

    assert sparsity() == (None, 3)
    assert sparsity(k=4) == (None, 4)
    assert sparsity(activation="none") == (None, None)
    assert sparsity(density=0.1) == (0.1, None)
