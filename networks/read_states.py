"""Which of a target's states a head reads, unless its config says otherwise. Known before torch is there."""
from __future__ import annotations


def eagle3_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs feed an EAGLE-3 head unless its config says otherwise: low, middle, high.

    Inputs of layers 2, L//2 and L-3 (SafeAILab/EAGLE, modeling_llama_kv.py); SpecForge writes the same states
    as "outputs of layers 1, L//2-1, L-4".
    """
    return 2, num_layers // 2, num_layers - 3


def spread_layers(num_layers: int, states: int) -> tuple[int, ...]:
    """The layers whose inputs a block head reads: evenly from the third to the last but one.

    They are those of the published heads: outputs of layers 1, 9, 17, 25, 33 of 36 (z-lab/dflash). Raises
    ValueError if there are too few.
    """
    first, last = min(2, num_layers), max(num_layers - 2, min(2, num_layers))
    steps = max(states - 1, 1)
    layers = tuple(sorted({round(first - 1 + i * (last - first) / steps) + 1 for i in range(states)}))
    if len(layers) < states:
        raise ValueError(f"{states} states of a target of {num_layers} layers: at most {len(layers)}")
    return layers
