"""Decoder states and random trees."""
import torch

from engine.state import State
from tree import Tree, depth_and_ancestors


def state_of(texts: list[list[int]], slots: int = 64) -> State:
    """Return a decoder state of these sequences; each one's last token is the root."""
    state = State(len(texts), slots, 8)
    # Stale tokens behind the text must not matter.
    state.tokens.random_(0, 4, generator=torch.Generator().manual_seed(0))
    for i, text in enumerate(texts):
        state.tokens[i, : len(text)] = torch.tensor(text)
        state.length[i], state.root[i] = len(text) - 1, text[-1]
    state.done.fill_(False)
    return state


def random_tree(nodes: int, levels: int, seed: int) -> Tree:
    """Return two random trees of few tokens: siblings distinct, parents before children and never scored
    lower.
    """
    g = torch.Generator().manual_seed(seed)
    trees = []
    for _ in range(2):
        tokens, parent, score, depth = [9], [0], [0.0], [0]
        while len(tokens) < nodes:
            above = int(torch.randint(len(tokens), (1,), generator=g))
            token = int(torch.randint(6, (1,), generator=g))
            taken = {t for t, p in zip(tokens[1:], parent[1:]) if p == above}
            if depth[above] == levels or token in taken:
                continue
            tokens.append(token), parent.append(above), depth.append(depth[above] + 1)
            score.append(score[above] - float(torch.rand(1, generator=g)))
        trees.append((tokens, parent, score))
    tokens, parent, scores = (torch.tensor(x) for x in zip(*trees))
    return Tree(tokens, parent, *depth_and_ancestors(parent, levels), scores)


def paths(tokens: list[int], parent: list[int]) -> list[tuple[int, ...]]:
    """Return the tokens from the root to each node. Fails if a child comes before its parent."""
    found = [()]
    for node in range(1, len(tokens)):
        assert parent[node] < node
        found.append((*found[parent[node]], tokens[node]))
    return found
