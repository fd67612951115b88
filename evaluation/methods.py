"""The methods under comparison: plain decoding and those of --speculate, all on one target."""
from __future__ import annotations

import hashlib
from dataclasses import dataclass

from checkpoint.loading import identity
from common.errors import InputError
from drafters import grows
from engine.api import Drafting, Target
from engine.text_decoder import TextDecoder
from evaluation.settings import PLAIN, read_settings
from evaluation.table import label


def read_draftings(
    methods: list[str], drafts: list[str], trees: list[str], rules: list[str], flags: dict[str, dict],
    window: int = 0,
) -> dict[str, Drafting]:
    """How each method drafts, by its label, plain decoding first.

    drafts, trees, rules: the values of --draft, --tree and --accept, see `evaluation.settings.by_method`.
    flags: of each method its own, see `drafters.read_flags`. window: of all heads that take one. Raises
    InputError, ValueError on a bad tree.
    """
    draft_of, tree_of, rule_of = read_settings(methods, drafts, trees, rules)
    draftings = {PLAIN: Drafting()}
    for name in methods:
        rule = rule_of.get(name, "equal")
        if name != PLAIN:
            draft, tree = draft_of.get(name), tree_of.get(name)
            own = window if grows(name) else 0
            draftings[label(name, rule)] = Drafting(name, draft, tree, rule, flags=flags[name], window=own)
    return draftings


@dataclass(frozen=True)
class Contender:
    """A decoder under comparison."""

    model: TextDecoder
    identity: str  # of target, template, stop ids, drafter, tree and flags: what its answers depend on


def load_contenders(
    target: Target, draftings: dict[str, Drafting], max_seq_len: int | None
) -> dict[str, Contender]:
    """A decoder for each way of drafting, by its label, all on one target.

    Raises InputError if the target cannot hold a conversation, or if one of the drafters cannot be made.
    """
    if target.tokenizer is None or not target.tokenizer.has_template:
        raise InputError(
            f"{target.checkpoint}: questions need a tokenizer and a chat template, this folder lacks them"
        )
    models = {name: target.decoder(d, max_seq_len=max_seq_len) for name, d in draftings.items()}
    stop_ids = models[PLAIN].decoder.state.stop_ids.tolist()
    format_hash = hashlib.sha256(f"{target.tokenizer.template} {stop_ids}".encode()).hexdigest()[:16]
    target_identity = identity(target.model)
    contenders = {}
    for name, model in models.items():
        drafter, switch = model.decoder.drafter, model.decoder.switch
        flags, window = draftings[name].flags, draftings[name].window
        drafter_identity = identity(drafter) + drafter.made_of
        tree = switch.plan.trees if switch else drafter.shape
        known_by = f"{target_identity} {format_hash} {drafter_identity} {tree} {flags}"
        if window:
            known_by += f" {window}"
        if ranks := target.model.ranks:  # each knows its own part
            known_by = f"{ranks.count} ranks: {ranks.name(known_by, model.decoder.device)}"
        contenders[name] = Contender(model, known_by)
    return contenders
