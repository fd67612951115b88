"""Targets of any family, by the fields of their config."""
from checkpoint.folder import class_of
from model import Transformer


def target_of(**fields) -> Transformer:
    """The target, with random weights, that a config.json with these fields describes."""
    model = class_of({"kind": "target", **fields})
    return model(model.Args(**fields))
