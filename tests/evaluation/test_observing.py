"""Statistics of drafted trees, and one tree as text."""
import torch

from evaluation.observing import TreeStatistics
from evaluation.pictures import text_tree
from tree import Tree, chain


def test_steps_are_counted_where_a_node_had_a_chance():
    scores = torch.log(torch.tensor([[1.0, 0.65, 0.25, 0.65 * 0.55, 0.65 * 0.15, 0.25 * 0.85]]))
    parent, depth = torch.tensor([[0, 0, 0, 1, 1, 2]]), torch.tensor([[0, 1, 1, 2, 2, 2]])
    tree = Tree(torch.arange(6)[None], parent, depth, torch.eye(6)[None].bool(), scores)
    statistics = TreeStatistics()
    statistics.add(tree, torch.tensor([[0, 1, 0]]))
    assert statistics.depth == {1: [1, 1], 2: [1, 0]} and statistics.rank == {1: [2, 1], 2: [2, 0]}
    tried = {i: cell[:2] for i, cell in enumerate(statistics.confidence) if cell[0]}
    assert tried == {6: [1, 1], 2: [1, 0], 5: [1, 0], 1: [1, 0]}
    lines = text_tree(statistics.best, lambda token: f"w{token}").splitlines()
    assert lines[:3] == ["● 'w0'", "├─● 'w1' 0.65", "│  ├─○ 'w3' 0.55"]
    statistics.add(chain(torch.tensor([[5]])), torch.tensor([[0]]))  # a bare root has nothing to count
    assert statistics.depth == {1: [1, 1], 2: [1, 0]}
