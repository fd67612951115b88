"""Decoder states and random trees."""
import torch

from engine.state import State
from tree import Tree, depth_and_ancestors


def state_of(sequences: list[list[int]], slots: int = 64) -> State:
    """Return a decoding state of these sequences. The last token of each is the root."""
    state = State(len(sequences), slots, 8)
    # Stale tokens after a sequence must not matter.
    state.tokens.random_(0, 4, generator=torch.Generator().manual_seed(0))
    for i, tokens in enumerate(sequences):
        state.tokens[i, : len(tokens)] = torch.tensor(tokens)
        state.length[i], state.root[i] = len(tokens) - 1, tokens[-1]
    state.done.fill_(False)
    return state


def random_tree(nodes: int, levels: int, seed: int) -> Tree:
    """Return two random trees over six token ids. Siblings are distinct; parents precede their children and
    have higher or equal scores.
    """
    g = torch.Generator().manual_seed(seed)
    trees = []
    for _ in range(2):
        tokens, parent, score, depth = [9], [0], [0.0], [0]
        while len(tokens) < nodes:
            node = int(torch.randint(len(tokens), (1,), generator=g))
            token = int(torch.randint(6, (1,), generator=g))
            siblings = {t for t, p in zip(tokens[1:], parent[1:]) if p == node}
            if depth[node] == levels or token in siblings:
                continue
            tokens.append(token), parent.append(node), depth.append(depth[node] + 1)
            score.append(score[node] - float(torch.rand(1, generator=g)))
        trees.append((tokens, parent, score))
    tokens, parent, scores = (torch.tensor(x) for x in zip(*trees))
    return Tree(tokens, parent, *depth_and_ancestors(parent, levels), scores)


def paths(tokens: list[int], parent: list[int]) -> list[tuple[int, ...]]:
    """Return the tokens from the root to each node. Fails if a child comes before its parent."""
    by_node = [()]
    for node in range(1, len(tokens)):
        assert parent[node] < node
        by_node.append((*by_node[parent[node]], tokens[node]))
    return by_node
