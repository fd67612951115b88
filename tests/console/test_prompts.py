"""The prompts of a command line."""
from argparse import Namespace

import pytest

from common.errors import InputError
from console.prompts import gather_prompts


def options(prompt=(), prompt_ids=(), prompt_file=()) -> Namespace:
    return Namespace(prompt=prompt, prompt_ids=prompt_ids, prompt_file=prompt_file)


def test_prompts_come_in_order(tmp_path):
    (tmp_path / "one.txt").write_text("\ufefftwo\nlines\n\n", encoding="utf-8")
    (tmp_path / "many.jsonl").write_text('{"turns": ["first", "unused"]}\n{"prompt": "second"}\n')
    files = [str(tmp_path / "one.txt"), str(tmp_path / "many.jsonl")]
    assert gather_prompts(options(["plain"], ["72, 105", "1"], files)) == [
        "plain", [72, 105], [1], "two\nlines\n", "first", "second",
    ]
    assert gather_prompts(options()) == []


def test_prompts_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    for ids in ("1,two", "", "1,,2"):
        with pytest.raises(InputError, match=f"--prompt-ids '{ids}': expected numbers separated by commas"):
            gather_prompts(options(prompt_ids=[ids]))
    for file, why in (
        (tmp_path / "none.txt", "no such file"), (tmp_path, "is a folder; expected a file"),
        (tmp_path / "binary.txt", "cannot be read, it is no UTF-8"),
    ):
        with pytest.raises(InputError, match=f"--prompt-file {file}: {why}"):
            gather_prompts(options(prompt_file=[str(file)]))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="holds no prompts"):
        gather_prompts(options(prompt_file=[str(tmp_path / "empty.jsonl")]))
