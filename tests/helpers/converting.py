"""What the tests of conversion share."""
import torch

from convert_checkpoint import main
from helpers.sources import CONFIG


def fused(state: dict, config=CONFIG) -> dict[str, torch.Tensor]:
    """What the converter should write, spelled out independently of its tables."""
    out = {"embed.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    if "lm_head.weight" in state:
        out["lm_head.weight"] = state["lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        p, o = f"model.layers.{i}.", f"layers.{i}."
        out[o + "attn_norm.weight"] = state[p + "input_layernorm.weight"]
        out[o + "mlp_norm.weight"] = state[p + "post_attention_layernorm.weight"]
        out[o + "wqkv.weight"] = torch.cat([state[p + f"self_attn.{x}_proj.weight"] for x in "qkv"])
        out[o + "wo.weight"] = state[p + "self_attn.o_proj.weight"]
        out[o + "mlp.w_gate_up.weight"] = torch.cat(
            [state[p + f"mlp.{x}_proj.weight"] for x in ("gate", "up")])
        out[o + "mlp.w_down.weight"] = state[p + "mlp.down_proj.weight"]
    return out


def assert_same(state: dict, expected: dict) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name


def run(capsys, *argv) -> tuple[int, list[str]]:
    """(Exit status, lines on stderr) of convert_checkpoint.py."""
    code = main([str(a) for a in argv])
    return code, capsys.readouterr().err.splitlines()
