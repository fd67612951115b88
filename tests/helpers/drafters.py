"""Every drafter on small models, by name."""
from collections.abc import Callable

import pytest
import torch

from checkpoint.load import class_of
from drafters.block import BlockDrafter, PEagle
from drafters.draft_model import DraftModel
from drafters.lookahead import Lookahead
from drafters.medusa import HydraHeads, MedusaHeads, MultiToken, MultiTokenArgs
from drafters.mixed import Mixed
from drafters.ngram import NGram, TokenFile
from drafters.pard import Pard
from drafters.static import EAGLE1_TREE, StaticHeadDrafter, expected_tree
from engine.draft import Drafter, HeadDrafter
from head import Head
from helpers.decoding import prompts
from model import Transformer
from training.heads import HeadShape, new_head
from tree import TreeShape

NAMES = (
    "plain", "eagle3", "eagle2", "eagle1", "p-eagle", "dflash", "dspark", "medusa", "hydra", "hydra++",
    "draft-model", "pard", "lookahead", "lookup", "suffix", "rest", "lookup+eagle3", "eagle1+dspark",
    "eagle3 window", "dspark window",
)
# Similar to others in the state that they read and keep; `make test-fast` skips them.
SLOW = {"plain", "eagle2", "dflash", "hydra", "eagle1+dspark", "eagle3 window", "dspark window"}
STORED = list(b"the tide comes in and the tide goes out; the tide comes in again")


def cases(names=NAMES) -> list:
    """Return drafter names as test parameters."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in names]


def random_medusa_heads(target: Transformer, kind: str, draft_ids: torch.Tensor, prefix: bool) -> Head:
    """Return Medusa or Hydra heads in float32, with random blocks near the identity and the target's lm_head.

    prefix: with Hydra++'s layer, of the target's shape.
    """
    a = target.args
    sizes = {name: x for name, x in vars(a).items() if name in MultiTokenArgs.__dataclass_fields__}
    head = {"medusa": MedusaHeads, "hydra": HydraHeads}[kind](MultiTokenArgs(**sizes | {
        "num_layers": 1, "draft_vocab_size": len(draft_ids), "target_hidden_size": a.hidden_size,
        "aux_layers": (a.num_layers,), "guesses": 3, "blocks": 1, "prefix": prefix,
    })).requires_grad_(False)
    torch.manual_seed(0)
    for name, p in head.named_parameters():
        if not name.endswith("norm.weight"):
            p.normal_(std=0.02 if "prefix_layer" in name else 0.002 * (p.ndim == 2))
    for stack in head.stacks if kind == "hydra" else ():
        stack[0].skip.weight[:, : a.hidden_size] += torch.eye(a.hidden_size)
    head.lm_head.weight.copy_(target.output_layer.weight[draft_ids])
    head.draft_ids.copy_(draft_ids)
    head = head.to(target.embed.device)
    head.use_target(target)
    return head


def make_drafter(
    name: str, target: Transformer, eagle3: Head, eagle1: Head, prepare: Callable[[torch.nn.Module], None]
) -> Drafter:
    """Return a drafter of `NAMES` for a target and its heads. prepare: called with each new model."""
    size, weight = target.args.vocab_size, target.embed.weight
    ids, shared = torch.arange(min(300, size)), {id(p) for p in target.parameters()}

    def make(name: str) -> Drafter:
        return make_drafter(name, target, eagle3, eagle1, prepare)

    def prepared(head: Head, noise: float = 0.0) -> Head:
        """Add noise to a head's own weights, cast them to the target's dtype and prepare the head."""
        torch.manual_seed(1)
        for p in head.to(weight.device).parameters():
            if id(p) not in shared:
                p.data = (p.data + noise * torch.randn_like(p.data)).to(weight.dtype)
        prepare(head)
        return head

    def medusa(kind: str, prefix: bool = False) -> Head:
        """Return random Medusa or Hydra heads."""
        return prepared(random_medusa_heads(target, kind, ids, prefix))

    def block(kind: str, rank: int | None = None, window: int = 0) -> Head:
        """Return a random head for block drafting."""
        states = 2 if target.args.num_layers > 4 else 1
        head = new_head(target, kind, ids, HeadShape(2, states, 4, rank, mask_id=7), 0)
        head.set_sliding_window(window)
        return prepared(head, 0.02)

    return {
        "plain": Drafter,
        "eagle3": lambda: HeadDrafter(eagle3, TreeShape(8, 2, 3)),
        "eagle2": lambda: HeadDrafter(eagle1, TreeShape(8, 2, 3)),
        "eagle1": lambda: StaticHeadDrafter(eagle1, EAGLE1_TREE),
        "p-eagle": lambda: PEagle(block("p-eagle"), TreeShape(10, 3, 4)),
        "dflash": lambda: BlockDrafter(block("dflash"), TreeShape(10, 3, 4)),
        "dspark": lambda: BlockDrafter(block("dspark", 8), TreeShape(10, 3, 3)),
        "medusa": lambda: MultiToken(medusa("medusa"), expected_tree(12, 3)),
        "hydra": lambda: MultiToken(medusa("hydra"), expected_tree(12, 3)),
        "hydra++": lambda: MultiToken(medusa("hydra", True), expected_tree(12, 3)),
        "draft-model": lambda: DraftModel(target, TreeShape(4, 2, 1)),
        "pard": lambda: Pard(target, TreeShape(10, 3, 4), mask_id=7),
        "lookup+eagle3": lambda: Mixed(NGram(), make("eagle3")),
        "eagle1+dspark": lambda: Mixed(make("eagle1"), make("dspark"), 12),
        "eagle3 window": lambda: HeadDrafter(block("eagle3", window=12), TreeShape(8, 2, 3)),
        "dspark window": lambda: BlockDrafter(block("dspark", 8, 12), TreeShape(10, 3, 3)),
        "lookahead": lambda: Lookahead(size, 3, 3, 3),
        "lookup": NGram,
        "suffix": lambda: NGram(history=64),
        "rest": lambda: NGram(max_match=8, history=64, file=TokenFile(torch.tensor(STORED).int())),
    }[name]()


def model_of(kind: str = "target", **fields) -> Transformer | Head:
    """Return the randomly initialized target or head of a config.json with these fields."""
    model = class_of({"kind": kind, **fields})
    return model(model.Args(**fields))


def small_models(
    vocab_size: int = 12, width: int = 16, layers: int = 2, dtype: torch.dtype = torch.float32,
    of_head: dict | None = None, **of_target
) -> tuple[Transformer, Head]:
    """Return a random target and EAGLE-3 head. With the small default vocabulary many drafts are accepted.

    of_head, of_target: other fields of their configs.
    """
    torch.manual_seed(0)
    size = {"vocab_size": vocab_size, "hidden_size": width, "intermediate_size": 32, "num_heads": 2,
            "num_kv_heads": 1, "head_dim": width // 2}
    target = model_of(**size | {"num_layers": layers} | of_target).requires_grad_(False)
    for p in target.parameters():
        p.normal_(std=0.5)
    head = model_of("eagle3", **size | {
        "num_layers": 1, "draft_vocab_size": vocab_size, "target_hidden_size": width,
        "aux_layers": (0, layers // 2, layers)} | (of_head or {})).requires_grad_(False)
    for p in head.parameters():
        p.normal_(std=0.5)
    head.draft_ids = torch.randperm(vocab_size)[: head.args.draft_vocab_size].sort().values
    head.to(dtype).use_target(target.to(dtype))
    return target.eval(), head.eval()


def short_prompts(count: int, longest: int) -> list[list[int]]:
    """Return prompts for `small_models`."""
    return [[token % 12 for token in prompt] for prompt in prompts(count, seed=3, longest=longest)]
