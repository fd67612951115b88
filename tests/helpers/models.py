"""Models of any family or kind, by the fields of their config."""
from checkpoint.load import class_of
from head import Head
from model import Transformer


def model_of(kind: str = "target", **fields) -> Transformer | Head:
    """The target or head, with random weights, that a config.json with these fields describes."""
    model = class_of({"kind": kind, **fields})
    return model(model.Args(**fields))
