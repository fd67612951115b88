"""Rows of text: how conversations become rows, and which of them are used."""
import pytest
from helpers.tokenizers import with_template

from common.errors import InputError
from common.files import digest
from tokens.tokenizer import Tokenizer
from training import data


def messages_of(*pairs: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_answers_of_a_conversation_are_marked(golden):
    tokenizer = Tokenizer.load(golden)
    messages = messages_of(("user", "hi"), ("assistant", "hello"), ("user", "and?"), ("assistant", "bye"))
    (row,) = data.of_conversation(tokenizer, messages, [ord("\n")])
    assert bytes(row["ids"]) == b"u:hi\na:hello\nu:and?\na:bye\n"
    assert [bytes(row["ids"][b:e]) for b, e in row["answers"]] == [b"hello\n", b"bye\n"]


def test_a_template_that_rewrites_what_was_said_gives_a_row_per_answer(golden, tmp_path):
    tokenizer = with_template(golden, tmp_path, (
        # Thoughts are kept in the last answer only, as reasoning models do.
        "{% for m in messages %}{{ m.role[0] }}:"
        "{{ m.content if loop.last else m.content.split('/')[-1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    ))
    messages = messages_of(("user", "hi"), ("assistant", "hm/hello"), ("user", "so"), ("assistant", "eh/bye"))
    rows = first, second = list(data.of_conversation(tokenizer, messages, [ord("\n")]))
    assert [bytes(r["ids"]) for r in rows] == [b"u:hi\na:hm/hello\n", b"u:hi\na:hello\nu:so\na:eh/bye\n"]
    answers = [bytes(r["ids"][b:e]) for r in rows for b, e in r["answers"]]
    assert answers == [b"hm/hello\n", b"eh/bye\n"]
    assert first["chat"] == second["chat"]  # one conversation: held out or trained on together


def test_a_template_that_moves_the_system_message_is_refused(golden, tmp_path):
    """Mistral writes it into the last user turn: the prompt is then no beginning of the conversation."""
    tokenizer = with_template(golden, tmp_path, (
        "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
        "[INST] {{ s + ' ' if loop.last and s else '' }}{{ m.content }}[/INST]{% else %}"
        " {{ m.content }}</s>{% endif %}{% endfor %}"
    ))
    messages = messages_of(("system", "Be brief."), ("user", "What?"), ("assistant", "That."))
    with pytest.raises(InputError, match="cannot be separated"):
        list(data.of_conversation(tokenizer, messages, []))


@pytest.mark.parametrize("line, words", [
    ('{"ids": [1, 2, 256], "answers": [[0, 3]]}', "is no row"), ('{"step": 1, "loss": 2.0}', "is no row"),
    ('{"ids": [1, 2, 3, 4, 5], "answers": [[4, 5], [1, 3]]}', "is no row"),
    ('{"ids": [1, 2, 3], "answers": [[0, 3]], "target": "other"}', "was written by another target"),
])
def test_a_line_that_is_no_row(tmp_path, line, words):
    good = '{"ids": [9, 1, 2, 3], "answers": [[1, 4]], "target": "this"}\n'
    shard = tmp_path / "a.jsonl"
    shard.write_text(good + good + '{"left_out": "too long"}\n')
    rows, left_out = data.training_rows(data.read_shards([shard], 256, "this"), 100)
    assert [row["ids"] for row in rows] == [[9, 1, 2, 3]] and left_out == {"too long": 1}
    shard.write_text(good + line + "\n")
    with pytest.raises(InputError, match=f"a.jsonl: line 2 {words}"):
        data.read_shards([shard], 256, "this")


def test_no_prompt_is_both_held_out_and_trained_on():
    rows = [
        {"ids": [i // 3, 0, i, 1, 2], "answers": [[2, 5]], "source": "x", "chat": digest([i // 3, 0])}
        for i in range(300)
    ]
    held_out, rest = data.hold_out(rows)
    assert len(held_out) == 15 and len(held_out) + len(rest) == 300  # 5 of 100 prompts, three rows each
    assert not {r["ids"][0] for r in held_out} & {r["ids"][0] for r in rest}
    assert data.hold_out(rows[::-1])[0] == held_out[::-1]
