"""Shared fixtures: the golden target and head, converted once per test session, and a byte tokenizer for them."""
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

torch.set_num_threads(1)  # tiny models: threads would only wait for each other


def write_byte_tokenizer(folder: Path) -> None:
    """Ids 0..255 are bytes, 256 <bos>, 257 <eos>, with a chat template: what the golden target was made for."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from tokenizer import byte_alphabet

    tokenizer = Tokenizer(models.BPE(vocab=dict(byte_alphabet()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """The golden target, converted, with a byte tokenizer, and its heads in `eagle3` and `eagle`."""
    from convert_checkpoint import convert

    folder = tmp_path_factory.mktemp("golden") / "target"
    convert(GOLDEN / "target", folder, quiet=True)
    convert(GOLDEN / "eagle3", target=folder, quiet=True)
    convert(GOLDEN / "eagle1", target=folder, quiet=True)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def models(golden):
    """(target, EAGLE-3 head) in float32."""
    from checkpoint import load_head, load_target

    target, _ = load_target(golden)
    return target, load_head(golden / "eagle3", target, "eagle3")


@pytest.fixture(scope="session")
def models1(golden, models):
    """(target, EAGLE-1 head) in float32."""
    from checkpoint import load_head

    return models[0], load_head(golden / "eagle", models[0], "eagle")
