"""transformers as a peer: `generate` on our weights."""
from __future__ import annotations

import time

import torch
from bench import Decoded  # first: it makes the modules below importable

from common.errors import InputError
from model import Transformer, blank


def as_llama(target: Transformer):
    """The target as a LlamaForCausalLM of transformers, on the same tensors.

    Raises InputError if it is no LLaMA whose rotary embeddings are plain or scaled as Llama 3.1's.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    a = target.args
    if a.rope_scaling and a.rope_scaling.get("rope_type") != "llama3":
        raise InputError("transformers: this target scales its rotary embeddings; that is not handed over")
    if a.qkv_bias or a.qk_norm or a.num_experts:
        raise InputError("transformers: this target is no LLaMA; only a LLaMA is handed over")
    weights = {
        "model.embed_tokens.weight": target.embed.weight, "model.norm.weight": target.norm.weight,
        "lm_head.weight": target.lm_rows,
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
    with blank():
        llama = LlamaForCausalLM(config)
    llama.load_state_dict(weights, assign=True)  # the weights keep their dtype, the rotary embeddings float32
    llama.model.rotary_emb = LlamaRotaryEmbedding(config).to(target.embed.weight.device)
    return llama.eval()


class HuggingFace:
    """`generate` of a model of transformers, greedy.

    slots: keys and values go into a static cache of so many, and on a GPU transformers compiles the model.
    """

    def __init__(self, model, stop_ids: list[int], slots: int | None = None, **options):
        self.model, self.stop_ids, self.options, self.cache = model, stop_ids, options, None
        if slots:
            from transformers import StaticCache

            self.cache = StaticCache(config=model.config, max_cache_len=slots)

    @torch.no_grad()
    def decode(self, ids: list[int], tokens: int) -> Decoded:
        """Decode a prompt. The clock starts when the first tokens are there."""
        from transformers import StoppingCriteriaList

        marks: list[tuple[float, int]] = []

        def mark(input_ids, scores, **_) -> torch.Tensor:
            marks.append((time.perf_counter(), input_ids.shape[1]))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        prompt, options = torch.tensor([ids], device=self.model.device), dict(self.options)
        if self.cache:
            self.cache.reset()
            options["past_key_values"] = self.cache
        out = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False,
            eos_token_id=self.stop_ids or None, pad_token_id=self.stop_ids[0] if self.stop_ids else 0,
            stopping_criteria=StoppingCriteriaList([mark]), **options,
        )
        began, first = marks[0]
        seconds, decoded = time.perf_counter() - began, out.shape[1] - first
        return Decoded(out[0, len(ids) :].tolist(), decoded / seconds if decoded else 0.0, [])

    @torch.no_grad()
    def decode_together(self, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """The answers to prompts that are padded to one length, each of at most so many tokens."""
        from transformers import StoppingCriteriaList

        longest, pad = max(map(len, prompts)), self.stop_ids[0] if self.stop_ids else 0
        rows = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts], device=self.model.device)
        seen = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        most = torch.tensor(limits, device=self.model.device)

        def full(input_ids, scores, **_) -> torch.Tensor:
            return input_ids.shape[1] - longest >= most

        out = self.model.generate(
            rows, attention_mask=seen.to(self.model.device), max_new_tokens=max(limits), do_sample=False,
            eos_token_id=self.stop_ids or None, pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([full]), **self.options,
        )
        return [self._to_its_end(ids[:limit]) for ids, limit in zip(out[:, longest:].tolist(), limits)]

    def _to_its_end(self, ids: list[int]) -> list[int]:
        """An answer without the padding after its stop id."""
        return next((ids[: i + 1] for i, token in enumerate(ids) if token in self.stop_ids), ids)
