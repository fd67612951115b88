"""Chat templates for targets whose files carry none."""
from pathlib import Path

import pytest
from helpers.families import make_target

from checkpoint.convert import convert
from convert_checkpoint import main

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful,"
    " detailed, and polite answers to the user's questions."
)

TALK = [
    {"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
]


def with_sentencepiece(folder: Path) -> Path:
    import sentencepiece

    make_target(folder, "Llama-2")
    text = folder.parent / "text.txt"
    text.write_text("\n".join(f"some words to learn {i} {VICUNA}" for i in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=110, byte_fallback=False,
        hard_vocab_limit=False, minloglevel=2, model_type="bpe", character_coverage=1.0,
    )
    return folder


@pytest.mark.parametrize("source,chat,expected", [
    ("vicuna-7b-v1.3", TALK[:1], f"<s>{VICUNA} USER: q1 ASSISTANT:"),
    ("vicuna-7b-v1.3", TALK, f"<s>{VICUNA} USER: q1 ASSISTANT: a1</s>USER: q2 ASSISTANT:"),
    ("vicuna-7b-v1.3", [{"role": "system", "content": "Be."}, *TALK[:1]], "<s>Be. USER: q1 ASSISTANT:"),
    ("Llama-2-7b-chat-hf", [{"role": "system", "content": "Be."}, *TALK],
     "<s>[INST] <<SYS>>\nBe.\n<</SYS>>\n\nq1 [/INST] a1 </s><s>[INST] q2 [/INST]"),
    ("Llama-2-7b-chat-hf", [{"role": "system", "content": ""}, *TALK[:1]], "<s>[INST] q1 [/INST]"),
])
def test_built_in_templates(tmp_path, source, chat, expected):
    """Chosen by the published name, rendered to FastChat's strings."""
    from tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(convert(with_sentencepiece(tmp_path / source), tmp_path / "out", quiet=True))
    assert tokenizer.render(chat) == expected
    ids = tokenizer.chat(chat)
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == expected.count("<s>")


def test_templates_by_flag(tmp_path, capsys):
    from tokens.tokenizer import Tokenizer

    source = with_sentencepiece(tmp_path / "mystery")
    (source / "tool_use.jinja").write_text("T")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    command = ["--checkpoint", str(source), "--out"]
    for name, flags in (
        ("without", []), ("vicuna", ["--template", "vicuna"]),
        ("mine", ["--template", str(tmp_path / "mine.jinja")]),
    ):
        assert main([*command, str(tmp_path / name), *flags]) == 0
        tokenizer = Tokenizer.load(tmp_path / name)
        # One for tools alone is for all chats, and so is one that is chosen.
        assert tokenizer.template == tokenizer.tool_template
        assert (tokenizer.template == "T") is not bool(flags)
    assert main([*command, str(tmp_path / "bad"), "--template", "nonsense"]) == 1
    assert "--template nonsense" in capsys.readouterr().err and not (tmp_path / "bad").exists()
