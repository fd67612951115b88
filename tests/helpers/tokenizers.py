"""The byte tokenizer of the golden models."""
import json
from pathlib import Path


def write_byte_tokenizer(folder: Path) -> None:
    """Ids 0..255 are bytes, 256 <bos>, 257 <eos>, with a chat template: what the golden target was made for.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from tokens.backends import byte_alphabet

    tokenizer = Tokenizer(models.BPE(vocab=dict(byte_alphabet()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}a:{% endif %}"
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
