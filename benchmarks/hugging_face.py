"""Our LLaMA targets in transformers: for comparison, and as a folder for other programs' converters.

    python benchmarks/hugging_face.py --checkpoint DIR --out DIR      (writes a Hugging Face folder)
"""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import bench  # first: it makes the modules below importable
import torch
from bench import Decoded

from checkpoint.load import load_model
from common.errors import InputError, read_json
from common.writing import staging
from model import Transformer, meta_modules
from tokens.convert import copy_files


def as_llama(target: Transformer):
    """Return a LlamaForCausalLM of transformers on the target's own tensors.

    Raise InputError if the target is not a LLaMA with RoPE that is unscaled or scaled like Llama 3.1's.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    a = target.args
    if a.rope_scaling and a.rope_scaling.get("rope_type") != "llama3":
        raise InputError("transformers: the RoPE scaling of this target is not supported here")
    if type(target) is not Transformer or a.qkv_bias or a.qk_norm or any(a.windows):
        raise InputError("transformers: this target is not a LLaMA, or has sliding windows")
    weights = {
        "model.embed_tokens.weight": target.embed.weight, "model.norm.weight": target.norm.weight,
        "lm_head.weight": target.output_layer.weight,
    }
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    for i, layer in enumerate(target.layers):
        parts = {f"self_attn.{n}_proj": w for n, w in zip("qkv", layer.wqkv.weight.split((q, kv, kv)))}
        parts |= {f"mlp.{n}_proj": w for n, w in zip(("gate", "up"), layer.mlp.w_gate_up.weight.chunk(2))}
        parts |= {
            "self_attn.o_proj": layer.wo.weight, "mlp.down_proj": layer.mlp.w_down.weight,
            "input_layernorm": layer.attn_norm.weight, "post_attention_layernorm": layer.mlp_norm.weight,
        }
        weights |= {f"model.layers.{i}.{name}.weight": weight for name, weight in parts.items()}
    config = LlamaConfig(
        vocab_size=a.vocab_size, hidden_size=a.hidden_size, intermediate_size=a.intermediate_size,
        num_hidden_layers=a.num_layers, num_attention_heads=a.num_heads, num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim, rms_norm_eps=a.norm_eps, tie_word_embeddings=a.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": a.rope_base, **(a.rope_scaling or {})},
        max_position_embeddings=a.max_seq_len, eos_token_id=None,
    )
    with meta_modules():
        llama = LlamaForCausalLM(config)
    llama.load_state_dict(weights, assign=True)  # keeps the weights' dtype, and float32 for RoPE
    llama.model.rotary_emb = LlamaRotaryEmbedding(config).to(target.embed.device)
    return llama.eval()


class HuggingFace:
    """Greedy `generate` of a transformers model. options: more arguments of `generate`."""

    def __init__(self, model, stop_ids: list[int], **options):
        self.model, self.stop_ids, self.options = model, stop_ids, options
        self.pad = stop_ids[0] if stop_ids else 0

    @torch.no_grad()
    def decode_batch(self, prompts: list[list[int]], limits: list[int]) -> tuple[list[list[int]], float]:
        """Decode a batch of left-padded prompts, each up to its limit of tokens.

        Return the answers, and the tokens per second of a sequence after the first.
        """
        from transformers import StoppingCriteriaList

        longest, device, step_times = max(map(len, prompts)), self.model.device, []
        rows = torch.tensor([[self.pad] * (longest - len(ids)) + ids for ids in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        max_new = torch.tensor(limits, device=device)

        def reached_limit(input_ids, scores, **_) -> torch.Tensor:
            step_times.append((time.perf_counter(), input_ids.shape[1]))
            return input_ids.shape[1] - longest >= max_new

        out = self.model.generate(
            rows, attention_mask=mask, max_new_tokens=max(limits), do_sample=False, pad_token_id=self.pad,
            eos_token_id=self.stop_ids or None, stopping_criteria=StoppingCriteriaList([reached_limit]),
            **self.options,
        )
        seconds, later = time.perf_counter() - step_times[0][0], out.shape[1] - step_times[0][1]
        answers = [self._cut_after_stop(ids[:n]) for ids, n in zip(out[:, longest:].tolist(), limits)]
        return answers, later / seconds if later else 0.0

    def decode(self, ids: list[int], tokens: int) -> Decoded:
        """Decode a prompt. Timing starts at the first token."""
        (answer,), rate = self.decode_batch([ids], [tokens])
        return Decoded(answer, rate)

    def _cut_after_stop(self, ids: list[int]) -> list[int]:
        """Remove padding after a stop id."""
        return next((ids[: i + 1] for i, token in enumerate(ids) if token in self.stop_ids), ids)


def write_folder(args) -> None:
    """Write a target and its tokenizer as a Hugging Face folder. Raise InputError if it exists."""
    checkpoint, out = Path(args.checkpoint), Path(args.out)
    if out.exists():
        raise InputError(f"--out {out}: exists; choose another folder")
    target, config = load_model(checkpoint)
    model, stop_ids = as_llama(target), config["stop_ids"]
    model.generation_config.eos_token_id = stop_ids
    model.config.eos_token_id, model.config.bos_token_id = stop_ids[0], config["bos_id"]
    with staging(out) as part:
        model.save_pretrained(part)
        copy_files(checkpoint, part)
        if (part / "tokenizer.json").exists():
            # Otherwise transformers treats a LLaMA's tokenizer as SentencePiece, and adds tokens.
            file = part / "tokenizer_config.json"
            settings = read_json(file) if file.exists() else {}
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            file.write_text(json.dumps(settings, indent=1) + "\n")
    print(f"wrote {out}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "")
    p.add_argument("--checkpoint", required=True, help="converted target")
    p.add_argument("--out", required=True, help="output folder")
    return bench.run(p, write_folder, argv)


if __name__ == "__main__":
    sys.exit(main())
