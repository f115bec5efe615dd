"""Graphs of every kind become the same Data, or are refused in words."""

import tracemalloc

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array, csr_array, save_npz

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data

from ncl_multi.data.networks import as_data, degree_features, read_graph

RING = [(node, (node + 1) % 12) for node in range(12)]
EDGES = torch.tensor(RING).T


def edges_of(data):
    return sorted(map(tuple, data.edge_index.T.tolist()))


def listed(folder, lines, name="edges.csv"):
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


# Edge lists


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|", " ", ", "])
@pytest.mark.parametrize("header", ["source target", "From To", "u v", "one another", ""])
def test_an_edge_list_is_read_with_and_without_names(tmp_path, delimiter, header):
    lines = [delimiter.join(header.split())] if header else []
    lines += [f"{a}{delimiter}{b}" for a, b in RING]
    data = read_graph(listed(tmp_path, lines))
    assert edges_of(data) == sorted(RING)
    assert data.text == [f"node {node}" for node in range(12)]


def test_named_nodes_keep_their_names_and_comments_are_no_edges(tmp_path, capsys):
    lines = ["# friends", *(f"p{a},p{b},0.5" for a, b in RING)]
    data = read_graph(listed(tmp_path, lines))
    assert data.text == [f"p{node}" for node in range(12)]
    assert edges_of(data) == sorted(RING)
    output = capsys.readouterr().err
    assert "12 edges, 12 nodes; first edge ['p0', 'p1'] (weights are not used)" in output
    assert "have no features: those of their degree" in output


def test_ends_are_found_by_name_among_other_columns(tmp_path):
    lines = ["id,target,kind,source", *(f"{a},{b},friend,{a}" for a, b in RING)]
    assert edges_of(read_graph(listed(tmp_path, lines))) == sorted(RING)


def test_numbers_of_nodes_are_sorted_as_numbers(tmp_path):
    lines = [f"{100 - a},{100 - b}" for a, b in RING]
    assert read_graph(listed(tmp_path, lines)).text == [f"node {n}" for n in range(89, 101)]


def test_double_edges_are_merged_with_a_notice(tmp_path, capsys):
    lines = ["source,target", *(f"{a},{b}" for a, b in [*RING, *RING[:3]])]
    assert edges_of(read_graph(listed(tmp_path, lines))) == sorted(RING)
    assert "3 edges occur more than once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([""], "has no edges"),
        (["source,target"], "a header line but no edges"),
        (["a,b", "c,d"], "is the first line of .* an edge"),
        (["a", "b"], "must have two columns"),
        (["a,b,c,d", "e,f,g,h"], "must have two columns"),
        (["source,target", "1,2", "3,"], "line 3 of .* lacks one end"),
        (["1 2", "", "3 4 5"], "line 3 has 3 cells where the first line has 2"),
        (["1,2", "3,4,5"], "line 2 has 3 cells"),
        (["1,2", "2,3"], "has 3 nodes; at least 10"),
    ],
)
def test_edge_lists_that_are_wrong_are_refused_with_their_line(tmp_path, lines, complaint):
    path = listed(tmp_path, lines)
    with pytest.raises(ValueError, match=complaint):
        read_graph(path)


def test_files_that_are_wrong_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; graphs are files that end in"):
        read_graph(tmp_path / "edges.csv")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        read_graph(tmp_path)
    with pytest.raises(ValueError, match="must end in"):
        read_graph(listed(tmp_path, ["1,2"], "edges.doc"))
    for content in (b"", b"PK\x03\x04", b"nothing"):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(ValueError, match="not an adjacency matrix; write one with"):
            read_graph(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.eye(3))
    with pytest.raises(ValueError, match="not an adjacency matrix"):
        read_graph(tmp_path / "a.npz")


# Objects


def test_an_adjacency_matrix_is_read(tmp_path, capsys):
    matrix = coo_array((np.ones(12), tuple(EDGES.numpy())), shape=(13, 13))
    for graph in (matrix, csr_array(matrix), matrix.tocsc()):
        data = as_data(graph)
        assert edges_of(data) == sorted(RING)
        assert data.num_nodes == 13
    assert "weights" not in capsys.readouterr().err
    save_npz(tmp_path / "a.npz", csr_array(2 * matrix))
    assert edges_of(read_graph(tmp_path / "a.npz")) == sorted(RING)
    assert "weights of edges are not used" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"must be square; got \(2, 3\)"):
        as_data(csr_array(np.ones((2, 3))))
    with pytest.raises(ValueError, match="row 1 contains NaN"):
        as_data(csr_array(np.array([[0, 1.0], [np.nan, 0]])))


def test_a_stored_zero_is_no_edge():
    matrix = coo_array(([1.0, 0.0], ([0, 1], [1, 0])), shape=(2, 2))
    assert edges_of(as_data(matrix)) == [(0, 1)]


def test_networkx_graphs_are_read_with_features_labels_and_names(capsys):
    networkx = pytest.importorskip("networkx")
    both_ways = sorted([*RING, *((b, a) for a, b in RING)])
    assert edges_of(as_data(networkx.Graph(RING))) == both_ways
    assert edges_of(as_data(networkx.DiGraph(RING))) == sorted(RING)
    capsys.readouterr()
    assert edges_of(as_data(networkx.MultiGraph([*RING, (1, 0)]))) == both_ways
    assert "1 edges occur more than once" in capsys.readouterr().err
    graph = networkx.Graph([("b", "a"), ("a", "c")])
    for node, value in zip("abc", range(3), strict=True):
        graph.nodes[node].update(x=[value, 1.5], y="even" if value % 2 == 0 else "odd", age=3)
    data = as_data(graph)
    assert data.text == ["b", "a", "c"]
    assert data.x.tolist() == [[1, 1.5], [0, 1.5], [2, 1.5]]
    assert data.y.tolist() == [1, 0, 0]
    output = capsys.readouterr().err
    assert "not used of the nodes: age" in output
    assert "labels even, odd are numbered from 0" in output
    del graph.nodes["a"]["x"]
    with pytest.raises(ValueError, match="1 nodes have no x but others do, first 'a'"):
        as_data(graph)
    graph.nodes["a"]["x"] = [1.0]
    with pytest.raises(ValueError, match="as many for each node"):
        as_data(graph)


def test_graphml_is_read_as_the_graph_that_was_written(tmp_path):
    networkx = pytest.importorskip("networkx")
    graph = networkx.DiGraph(RING)
    networkx.set_node_attributes(graph, {node: f"person {node}" for node in graph}, "label")
    networkx.write_graphml(graph, tmp_path / "a.graphml")
    data = read_graph(tmp_path / "a.graphml")
    assert edges_of(data) == sorted(RING)
    assert data.text == [f"person {node}" for node in range(12)]
    content = (tmp_path / "a.graphml").read_bytes()
    for damaged in (b"", b"no xml", content[:200], b"<graphml/>"):
        (tmp_path / "a.graphml").write_bytes(damaged)
        with pytest.raises(ValueError, match="not a whole GraphML file"):
            read_graph(tmp_path / "a.graphml")


XML = """<graphml xmlns="http://graphml.graphdrawing.org/xmlns"
  xmlns:y="http://www.yworks.com/xml/graphml">
<key id="l" for="node" attr.name="kind" attr.type="string"/>
<key id="n" for="node" attr.name="y" attr.type="int"/>
<key id="s" for="node" yfiles.type="nodegraphics"/>
<key id="w" for="edge" attr.name="weight" attr.type="double"/>
<graph edgedefault="{default}">
{edges}
<node id="group"><data key="n">7</data><graph edgedefault="{default}">
{nodes}
</graph></node>
</graph></graphml>"""


def graphml(path, *, default="undirected", more=""):
    nodes = "".join(
        f'<node id="{n}"><data key="l">a</data><data key="n">{n % 3}</data>'
        f'<data key="s"><y:Shape><y:NodeLabel>Café {n}</y:NodeLabel> </y:Shape></data></node>'
        for n in range(12)
    )
    edges = "".join(
        f'<edge source="{a}" target="{b}"><data key="w">2</data></edge>' for a, b in RING
    )
    path.write_text(XML.format(default=default, nodes=nodes, edges=edges + more))
    return path


def test_graphml_with_groups_labels_and_types_is_read(tmp_path, capsys):
    data = read_graph(graphml(tmp_path / "a.graphml", default="directed"))
    # Edges come first, so nodes are numbered as edges name them.
    assert edges_of(data) == sorted(RING)
    assert data.y.tolist() == [*(n % 3 for n in range(12)), 7]
    assert data.text == [*(f"node {n}" for n in range(12)), "group"]
    assert data.num_nodes == 13
    said = capsys.readouterr().err
    assert "weights of edges are not used" in said
    assert "not used of the nodes: kind" in said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('<edge source="1" target="2" directed="true"/>', "some of its edges are directed"),
        ("<hyperedge/>", "it has hyperedges"),
        ('<node id="1"><data key="other">3</data></node>', "'other'"),
        ('<node id="1"><data key="n">three</data></node>', "invalid literal"),
        ('<edge source="1"/>', "'target'"),
        ('</graph><graph edgedefault="directed">', "more than one graph"),
    ],
)
def test_graphml_that_is_another_kind_of_graph_is_refused(tmp_path, more, words):
    read_graph(graphml(tmp_path / "a.graphml"))
    with pytest.raises(ValueError, match=f"is not a whole GraphML file: .*{words}"):
        read_graph(graphml(tmp_path / "a.graphml", more=more))


def test_graphml_takes_no_tree_of_the_document(tmp_path):
    path = tmp_path / "a.graphml"
    nodes = "".join(f'<node id="{n}"/>' for n in range(20_000))
    edges = "".join(f'<edge source="{n}" target="{n // 2}"/>' for n in range(20_000))
    path.write_text(f'<graphml><graph edgedefault="directed">{nodes}{edges}</graph></graphml>')
    tracemalloc.start()
    assert read_graph(path).num_nodes == 20_000
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10 * path.stat().st_size


def test_data_keeps_its_features_and_is_not_changed():
    double = torch.cat([EDGES, EDGES[:, :2]], dim=1)
    x = torch.rand(12, 3)
    graph = Data(x=x, edge_index=double, edge_attr=torch.ones(14))
    data = as_data(graph)
    assert edges_of(data) == sorted(RING)
    assert torch.equal(data.x, x)
    assert data.edge_attr is None
    assert graph.num_edges == 14
    assert len(as_data(Data(edge_index=EDGES)).x) == 12
    assert len(as_data(Data(edge_index=EDGES, num_nodes=20)).x) == 20
    assert len(as_data(Data(edge_index=EDGES, y=torch.zeros(15))).x) == 15
    with pytest.raises(ValueError, match=r"a graph is a .* got list"):
        as_data(RING)


# Features of the degree


def degrees_by_hand(edges, nodes):
    """Bins of the degrees, one node and one neighbour at a time."""
    around = [set() for _ in range(nodes)]
    for a, b in edges:
        if a != b:
            around[a].add(b)
            around[b].add(a)
    bins = [min(23, int(np.floor(2 * np.log2(1 + len(own))))) for own in around]
    x = np.zeros((nodes, 48))
    for node in range(nodes):
        x[node, bins[node]] = 1
        for other in around[node]:
            x[node, 24 + bins[other]] += 1 / len(around[node])
    return x


def test_degree_features_are_those_by_hand():
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(40, (2, 150), generator=draw)
    edges = torch.cat([edges, torch.tensor([[0] * 45, list(range(45))])], dim=1)
    by_hand = degrees_by_hand(edges.T.tolist(), 50)
    assert degree_features(edges, 50).numpy() == pytest.approx(by_hand, abs=1e-6)


def test_degree_features_do_not_depend_on_order_or_direction():
    shuffled = EDGES.flip(0)[:, torch.randperm(12)]
    assert torch.equal(degree_features(EDGES, 12), degree_features(shuffled, 12))


def test_a_graph_without_edges_has_degree_features():
    none = torch.zeros(2, 0, dtype=torch.int64)
    assert degree_features(none, 3).tolist() == degrees_by_hand([], 3).tolist()


# Files that claim more than they have


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"indptr": np.array([0, 10**7, *[12] * 11])}, "not an adjacency matrix"),
        ({"indptr": np.array([0, 12, 0, *[12] * 10])}, "not an adjacency matrix"),
        ({"indices": np.full(12, 12)}, "not an adjacency matrix"),
        ({"indices": np.full(12, -1)}, "not an adjacency matrix"),
        ({"format": np.array(b"bsr")}, "not an adjacency matrix"),
        ({"data": np.zeros(2**25)}, "its parts are larger than the file"),
    ],
)
def test_a_matrix_whose_numbers_lead_out_of_it_is_refused(tmp_path, change, complaint):
    whole = {"data": np.ones(12), "indices": np.arange(12), "indptr": np.arange(13)}
    whole |= {"shape": np.array([12, 12]), "format": np.array(b"csr")}
    np.savez_compressed(tmp_path / "g.npz", **whole)
    assert read_graph(tmp_path / "g.npz").num_nodes == 12
    np.savez_compressed(tmp_path / "g.npz", **whole | change)
    with pytest.raises(ValueError, match=complaint):
        read_graph(tmp_path / "g.npz")


@pytest.mark.parametrize(
    ("graph", "complaint"),
    [
        (Data(edge_index=EDGES, num_nodes=2**40), "1099511627776 nodes and only 12 edges"),
        (Data(edge_index=EDGES + 2**30), "nodes and only 12 edges"),
        (Data(edge_index=EDGES + 2**40), "nodes must be numbers below 2147483648"),
        (Data(edge_index=EDGES - 5), "nodes must be numbers below 2147483648; got -5 to 6"),
        (coo_array(([1], ([0], [1])), shape=(2**40, 2**40)), "nodes and only 1 edges"),
    ],
)
def test_a_graph_of_more_nodes_than_it_has_is_refused(graph, complaint):
    with pytest.raises(ValueError, match=complaint):
        as_data(graph)


def test_a_document_that_multiplies_itself_or_names_a_file_is_refused(tmp_path):
    entities = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    laughs = f'<!DOCTYPE x [<!ENTITY l0 "lol">{entities}]><graphml>&l9;</graphml>'
    secret = '<!DOCTYPE x [<!ENTITY l SYSTEM "file:///etc/passwd">]><graphml>&l;</graphml>'
    for text in (laughs, secret):
        (tmp_path / "g.graphml").write_text(f'<?xml version="1.0"?>{text}')
        with pytest.raises(ValueError, match=r"is not a whole GraphML file.*DOCTYPE"):
            read_graph(tmp_path / "g.graphml")
