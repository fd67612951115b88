"""Small files that nobody should trust, in a table: what is wrong with each, and what is said of it.

A row of the tables of keys is one file for each value: KEY holds it in an otherwise good file, and is refused
with the words "KEY is VALUE; expected WORDS". `...` stands for a key that is missing.
"""
from __future__ import annotations

import json
import math
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from helpers.sources import CONFIG, HEAD_CONFIG, head_state, target_state, write_gguf, write_source

HUGE, DIGITS = 10**30, "a whole number of 31 digits"
NAN, INF = math.nan, math.inf
WIDTH, MANY = "a whole number from 1 to 4,194,304", "a whole number from 1 to 65,536"
IDS, FLAG = "a whole number from 1 to 16,777,216", "true or false"
EPS, BASE = "a number above 0 to 1", "a number above 1 to 1e+15"
BAD_SIZES = ..., None, 0, -1, 2.0, "64", True, [1], 2**62, HUGE
BAD_FLAGS = None, 1, "64", []
BAD_EPS = 0, -1.0, NAN, INF, "small", None, 3

# config.json of a converted target.
TARGET = [
    ("vocab_size", IDS, BAD_SIZES), ("hidden_size", WIDTH, BAD_SIZES),
    ("intermediate_size", WIDTH, BAD_SIZES),
    ("num_heads", MANY, BAD_SIZES), ("num_kv_heads", MANY, BAD_SIZES), ("head_dim", MANY, BAD_SIZES),
    ("num_layers", "a whole number from 1 to 10,000", (*BAD_SIZES, 10_001)),
    ("num_layers", "at most 8, which is what model.safetensors holds", (9, 10_000)),
    ("num_kv_heads", "a divisor of num_heads, 4", (3, 5)), ("head_dim", "an even number: rotary", (7,)),
    ("norm_eps", EPS, BAD_EPS), ("rope_base", BASE, (0, 1, NAN, INF, HUGE, "x", None)),
    ("rope_scaling", "null or the parameters of a rope scaling", (-1, "yarn", [], True)),
    ("max_seq_len", "a whole number from 1 to 2,147,483,647", (0, "1024", 2**62, HUGE)),
    *((name, FLAG, BAD_FLAGS) for name in ("tie_embeddings", "qkv_bias", "qk_norm", "renormalise_experts")),
    ("num_experts", "a whole number from 0 to 10,000", (-1, 2**62, "4")),
    ("stop_ids", "a list; in it a whole number from 0 to 2,147,483,647", (..., None, 3, "x", {})),
    ("bos_id", "an id below vocab_size, 96", (96, 2**31 - 1)),
    ("kind", "'target' or 'eagle' or 'eagle3' or", ([], {}, None, "eagle9", 3)),
    ("quantization", "an object", (None, 3, [], "int8")),
    ("sha256", "a sha256, 64 of the digits 0 to 9 and a to f", (3, None, [], "", "ab12", "sha256:ab12")),
    ("name", "a text", (3, None, ["x"])),
]
# config.json of a converted EAGLE-3 head.
HEAD = [
    *((name, words, BAD_SIZES) for name, words in (
        ("hidden_size", WIDTH), ("vocab_size", IDS), ("draft_vocab_size", IDS), ("target_hidden_size", WIDTH),
    )),
    ("aux_layers", "a list of 1 to 1,000, ascending; in it", (..., None, 3, [], [3, 2], [2, 2], "2,3")),
    ("draft_vocab_size", "at most vocab_size, 96", (97, 5000)),
    ("num_layers", "at most 1, which is what model.safetensors holds", (2, 10_000)),
    *((name, FLAG, BAD_FLAGS) for name in ("own_lm_head", "own_embedding", "fc_bias", "recycle_normed")),
    ("feature_norm", "'' or 'each' or 'all'", ("some", None, 1, [])),
]
# config.json of Hugging Face: null is as if a key was absent.
PUBLISHED_SIZES = 0, -1, 2.0, "64", True, [1], 2**62, HUGE
PUBLISHED = [
    *((name, f"null or {words}", PUBLISHED_SIZES) for name, words in (
        ("vocab_size", IDS), ("hidden_size", WIDTH), ("intermediate_size", WIDTH),
        ("num_attention_heads", MANY), ("num_key_value_heads", MANY), ("head_dim", MANY),
        ("num_hidden_layers", "a whole number from 1 to 10,000"),
    )),
    *((name, words, (...,)) for name, words in (
        ("vocab_size", IDS), ("hidden_size", WIDTH), ("intermediate_size", WIDTH),
        ("num_attention_heads", MANY),
    )),
    ("num_hidden_layers", "at most 8, the layers among the tensors", (9, 10_000)),
    ("rms_norm_eps", f"null or {EPS}", [v for v in BAD_EPS if v is not None]),
    ("rope_theta", f"null or {BASE}", (0, 1, NAN, INF, HUGE, "x")),
    ("rope_scaling", "null or an object", (-1, "yarn", [], True)),
    ("architectures", "null or a list", ("LlamaForCausalLM", 3, {})),
    ("tie_word_embeddings", f"null or {FLAG}", (1, "64", [])),
    ("max_position_embeddings", "null or a whole number from 1", (0, "1024", 2**62, HUGE)),
    ("eos_token_id", "null or a whole number from -1", ("x", 2.0, {}, HUGE)),
]


def found(value: object) -> str:
    """The words for a value of the tables."""
    if value is ...:
        return "is missing"
    return "is " + (DIGITS if value is not True and value == HUGE else json.dumps(value) if value is None or
                    isinstance(value, bool) else repr(value))


def rows(table: list) -> list[tuple[str, object, str]]:
    """(Key, value, what is said) of each file of a table."""
    return [(key, value, f"{key} {found(value)}; expected {words}")
            for key, words, values in table for value in values]


def with_key(file: Path, key: str, value: object) -> None:
    """Put a value into a JSON file, or take the key out."""
    data = json.loads(file.read_text())
    if value is ...:
        data.pop(key, None)
    else:
        data[key] = value
    file.write_text(json.dumps(data))


# Files that hold something else than what a key says -- (maker of a source in a folder, what is said).


def text_of(name: str, content: bytes):
    """A source one of whose files holds this."""
    def make(folder: Path) -> Path:
        write_source(folder, target_state())
        (folder / name).write_bytes(content)
        return folder
    return make


def header(change):
    """A source whose safetensors header was changed by a function."""
    def make(folder: Path) -> Path:
        write_source(folder, target_state())
        file = folder / "model.safetensors"
        content = file.read_bytes()
        size, = struct.unpack("<Q", content[:8])
        head = json.dumps(change(json.loads(content[8 : 8 + size]))).encode()
        file.write_bytes(struct.pack("<Q", len(head)) + head + content[8 + size :])
        return folder
    return make


def state(**changes):
    """A source with other tensors; None takes one out."""
    def make(folder: Path) -> Path:
        tensors = target_state() | {name.replace("__", "."): t for name, t in changes.items()}
        return write_source(folder, {name: t for name, t in tensors.items() if t is not None})
    return make


def gguf_with(name: str, *shape: int):
    """A GGUF that has one more tensor."""
    def make(folder: Path) -> Path:
        more = np.zeros(shape, np.float32)
        return write_gguf(folder / "m.gguf", target_state(), extra=lambda w: w.add_tensor(name, more))
    return make


def gguf_bytes(at: int | bytes, value: bytes, **options):
    """A GGUF with these bytes at a place, or behind the first occurrence of some text."""
    def make(folder: Path) -> Path:
        file = write_gguf(folder / "m.gguf", target_state(), **options)
        content = bytearray(file.read_bytes())
        place = at if isinstance(at, int) else content.index(at) + len(at)
        content[place : place + len(value)] = value
        file.write_bytes(content)
        return file
    return make


def packed_pickle(folder: Path) -> Path:
    """A small archive that unpacks to a gigabyte."""
    write_source(folder, target_state(), form="bin")
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as part:
            for _ in range(64):
                part.write(bytes(1 << 20))
    return folder


def stretched_pickle(folder: Path) -> Path:
    """One number that is said to be a matrix of terabytes."""
    tensors = target_state() | {"model.norm.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}
    write_source(folder, {}, form="bin")
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def nonfinite(value: float, count: int):
    def make(folder: Path) -> Path:
        tensors = target_state()
        tensors["model.layers.2.mlp.up_proj.weight"].view(-1)[:count] = value
        return write_source(folder, tensors)
    return make


def first(header_: dict, **changes) -> dict:
    """A header whose first tensor is described otherwise."""
    name = next(name for name in header_ if name != "__metadata__")
    return header_ | {name: header_[name] | changes}


ONE_TOKEN = lambda writer: writer.add_token_list(["a"])  # noqa: E731


def no_merges(writer) -> None:
    """The words of a tokenizer without the rule that joins them."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b"])


def few_types(writer) -> None:
    """A tokenizer one of whose tokens has no type."""
    no_merges(writer)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1])


U64, U32 = struct.Struct("<Q").pack, struct.Struct("<I").pack
SOURCES = {
    "5,000 digits": (
        text_of("config.json", b'{"vocab_size": ' + b"9" * 5000 + b"}"),
        "config.json: vocab_size holds a number of 5,000 digits; expected one that fits 64 bits"),
    "5,000 digits in a list": (
        text_of("config.json", b'{"eos_token_id": [1, ' + b"9" * 5000 + b"]}"),
        "holds a number of 5,000 digits"),
    "nested too deeply": (text_of("config.json", b'{"a":' * 100_000), "config.json: cannot be read as JSON"),
    "a byte order mark": (text_of("config.json", b"\xef\xbb\xbf{}"), "config.json: cannot be read as JSON"),
    "UTF-16": (text_of("config.json", "{}".encode("utf-16")), "config.json: cannot be read as JSON"),
    "a list": (text_of("config.json", b"[1]"), "config.json: expected a JSON object, found list"),
    "half a character": (
        text_of("config.json", b'{"architectures": ["\\uD800"]}'),
        "config.json: holds \\ud800, half of a character; expected whole ones"),
    "many small values": (
        text_of("config.json", b'{"a": [' + b"[]," * (8 << 20) + b"[]]}"),
        "config.json: is JSON of 16,777,219 values; expected what takes"),
    "an index without a map": (
        text_of("generation_config.json", b'{"eos_token_id": "x"}'),
        "generation_config.json: eos_token_id is 'x'"),
    "tokens without ids": (
        text_of("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        "tokenizer_config.json: a name in added_tokens_decoder is 'x'; expected"),
    "tokens without text": (
        text_of("tokenizer_config.json", b'{"added_tokens_decoder": {"1": {}}}'),
        "tokenizer_config.json: added_tokens_decoder.1.content is missing; expected a text"),
    "an end token that is none": (
        text_of("tokenizer_config.json", b'{"eos_token": [1]}'),
        "tokenizer_config.json: eos_token is [1]; expected"),
    "a vocabulary without ids": (
        text_of("tokenizer.json", b'{"model": {"vocab": {"a": "x"}}}'),
        "tokenizer.json: model.vocab.a is 'x';"),
    "a header of 2^63 bytes": (
        text_of("model.safetensors", U64(2**63)),
        "a header of 9,223,372,036,854,775,808 bytes; expected at most"),
    "a header that is text": (text_of("model.safetensors", U64(4) + b"x" * 4), "model.safetensors: damaged"),
    "a shape of 2^62": (header(lambda h: first(h, shape=[2**62, 4])), "model.safetensors: damaged"),
    "a negative shape": (header(lambda h: first(h, shape=[-1, 4])), "model.safetensors: damaged"),
    "an unknown type": (header(lambda h: first(h, dtype="X")), "model.safetensors: damaged"),
    "offsets beyond the file": (
        header(lambda h: first(h, data_offsets=[0, 2**40])), "model.safetensors: damaged"),
    "an architecture in red": (
        text_of("config.json", b'{"architectures": ["\\u001b[31mred"]}'),
        r"unknown architecture \x1b[31mred (known"),
    "a name in red": (
        header(lambda h: {"\x1b[31mx": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}} | h),
        r"\x1b[31mx"),
    "not a number": (
        nonfinite(NAN, 3), "tensor model.layers.2.mlp.up_proj.weight holds 3 numbers that are not finite"),
    "infinite": (
        nonfinite(-INF, 1), "tensor model.layers.2.mlp.up_proj.weight holds 1 numbers that are not finite"),
    "a missing tensor": (state(model__norm__weight=None), "tensor model.norm.weight [32] is missing"),
    "another shape": (
        state(model__norm__weight=torch.zeros(33)), "model.norm.weight has shape [33], expected [32]"),
    "a tensor too many": (state(x=torch.zeros(1)), "unexpected tensor x [1]"),
    "an archive that grows": (
        packed_pickle, "archive/data.pkl is compressed; expected what torch.save writes"),
    "a matrix of one number": (stretched_pickle, "tensor model.norm.weight [1048576, 1048576] is"),
    # Of a GGUF: 4 bytes, its version, the number of tensors, the number of keys.
    "a tokenizer without merges": (
        lambda folder: write_gguf(folder / "m.gguf", target_state(), extra=no_merges),
        "tokenizer.ggml.merges is missing; expected a list"),
    "a token without a type": (
        lambda folder: write_gguf(folder / "m.gguf", target_state(), extra=few_types),
        "tokenizer.ggml.token_type is [1]; expected a list of 2, as many as there are tokens"),
    "more experts in a GGUF than it says": (
        gguf_with("blk.0.ffn_gate_exps.weight", 300_000, 1, 1),
        "tensor blk.0.ffn_gate_exps.weight has 300,000 matrices; expected 0, llama.expert_count"),
    "a rope of a GGUF that is too long": (
        gguf_with("rope_freqs.weight", 200_000), "rope_freqs.weight has 200,000 numbers; expected one per"),
    "no GGUF": (gguf_bytes(0, b"GGML"), "it begins with b'GGML'; expected b'GGUF'"),
    "a GGUF of tomorrow": (gguf_bytes(4, U32(9)), "its version is 9; expected 2 or 3"),
    "2^62 tensors": (
        gguf_bytes(8, U64(2**62)), "the list of tensors is said to be 4,611,686,018,427,387,904 long"),
    "2^40 keys": (
        gguf_bytes(16, U64(2**40)), "the list of keys is said to be 1,099,511,627,776 long; expected"),
    "a key of 2^60 bytes": (
        gguf_bytes(24, U64(2**60)), "the name of key 0 is said to be 1,152,921,504,606,846,976"),
    "a value of type 99": (
        gguf_bytes(b"llama.block_count", U32(99)), "llama.block_count is of type 99; expected 0 to 12"),
    "an array of 2^50 tokens": (
        gguf_bytes(b"tokenizer.ggml.tokens", U32(9) + U32(8) + U64(2**50), extra=ONE_TOKEN),
        "tokenizer.ggml.tokens is said to be 1,125,899,906,842,624 long; expected at most"),
    "an array of arrays": (
        gguf_bytes(b"tokenizer.ggml.tokens", U32(9) + U32(9), extra=ONE_TOKEN),
        "tokenizer.ggml.tokens is an array of type 9; expected numbers or texts"),
    "no layers in a GGUF": (
        gguf_bytes(b"llama.block_count", U32(4) + U32(0)), "llama.block_count is 0; expected a whole number"),
    "layers that a GGUF has not": (
        gguf_bytes(b"llama.block_count", U32(4) + U32(9999)),
        "llama.block_count is 9999; expected at most 8"),
    "an epsilon that is no number": (
        gguf_bytes(b"llama.attention.layer_norm_rms_epsilon", U32(6) + b"\0\0\xc0\x7f"),
        "llama.attention.layer_norm_rms_epsilon is nan; expected a number above 0"),
    "a tensor of 2^32 dimensions": (
        gguf_bytes(b"output_norm.weight", U32(2**32 - 1)),
        "tensor output_norm.weight has 4294967295 dimensions"),
    "a tensor of 2^60 rows": (
        gguf_bytes(b"output_norm.weight", U32(1) + U64(2**60)), "tensor output_norm.weight ends at byte"),
    "a tensor of no type": (
        gguf_bytes(b"output_norm.weight", U32(1) + U64(32) + U32(999)), "is of type 999, which is not known"),
    "a tensor behind the end": (
        gguf_bytes(b"output_norm.weight", U32(1) + U64(32) + U32(0) + U64(2**50)), "ends at byte 1,125,"),
}

# tree files, calibration.json, answers.jsonl: what they hold, and what is said.
TREES = {
    "{}": "paths is {}; expected a list", "[]": "paths is []; expected a list of 1 to 4,096",
    "[[]]": "paths[0] is []; expected a list of 1 to 64",
    "[[-1]]": "paths[0][0] is -1; expected a whole number",
    "[[0.5]]": "paths[0][0] is 0.5; expected", "[[NaN]]": "paths[0][0] is nan; expected",
    "[[true]]": "paths[0][0] is true; expected", '[["0"]]': "paths[0][0] is '0'; expected",
    "[[0], [0]]": "a path is given twice", "[[0, 1]]": "path [0, 1] has no parent [0]",
    "[[99999999999999999999999]]": "paths[0][0] is 99999999999999999999999; expected",
    '[["\\udfff"]]': "holds \\udfff, half of a character",
    "[" * 100_000: "cannot be read as JSON", "[[" + "9" * 5000 + "]]": "holds a number of 5,000 digits",
}
CALIBRATION = {"format": 1, "ease": [1.0], "tau": {t: {"8/2/4": 1.5} for t in "01"}}
CALIBRATIONS = [
    ("format", "1, which this version reads", (2, 10**9)), ("ease", "a list of 1 or more; in it",
    (..., None, [], "x")),
    ("tau", "an object", (..., None, [], 3)), ("far", "an object", (None, [], 3)),
    ("confidence", "an object", (None, [], 3)),
]


def save_ids(folder: Path, ids: list[int]) -> None:
    """Write other draft ids into the weights of a head."""
    from safetensors.torch import load_file

    file = folder / "model.safetensors"
    save_file(load_file(file) | {"draft_ids": torch.tensor(ids)}, file)


def head_source(folder: Path) -> Path:
    """A head that can be converted for the target of `target_source`."""
    return write_source(folder, head_state(), HEAD_CONFIG)


def target_source(folder: Path) -> Path:
    """A target that can be converted."""
    return write_source(folder, target_state(), CONFIG)
