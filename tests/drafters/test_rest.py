"""REST: the search finds what a plain search finds, the tree holds the most frequent continuations, the text
is plain text.
"""
import contextlib
import io
import json
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.decoding import load
from helpers.states import state_of

import generate
from common.errors import InputError
from drafters import rest, rest_store
from drafters.retrieval import Rest
from engine.decoder import Decoder
from sampling.options import Sampling
from tokens.tokenizer import Tokenizer

divsufsort = pytest.importorskip("pydivsufsort").divsufsort
PROMPTS = [[256, 104, 105], [256, *range(97, 120)], [256, 1]]


def drafter_of(tokens: list[int], vocab_size: int, **options) -> Rest:
    array = torch.tensor(tokens, dtype=torch.int32)
    return Rest(array, torch.from_numpy(divsufsort(array.numpy())), vocab_size, **options)


def counted(
    store: list[int], text: list[int], vocab_size: int, longest: int, shortest: int, depth: int
) -> dict[tuple, int]:
    """By a plain search: how often each beginning of a continuation follows the longest context that occurs.
    """
    for size in range(min(longest, len(text)), shortest - 1, -1):
        places = [i + size for i in range(len(store) - size + 1) if store[i : i + size] == text[-size:]]
        if places:
            found: dict[tuple, int] = {}
            for p in places:
                ahead = store[p : p + depth]
                ahead = ahead[: next((j for j, t in enumerate(ahead) if t >= vocab_size), len(ahead))]
                for n in range(1, len(ahead) + 1):
                    found[tuple(ahead[:n])] = found.get(tuple(ahead[:n]), 0) + 1
            return found
    return {}


@pytest.mark.parametrize(
    "vocab_size, size, nodes",
    [(3, 300, 20), (2, 900, 64), (40, 2000, 12), (3, 5, 6), (5, 17, 8), (151_936, 400, 12)]
)
def test_the_tree_is_that_of_a_plain_search(vocab_size, size, nodes):
    rng = random.Random(size)
    store = [rng.choice([*range(vocab_size)] * 5 + [vocab_size]) for _ in range(size)]
    drafter = drafter_of(store, vocab_size, nodes=nodes, longest=5, shortest=2, depth=4)
    drafter.allocate(4, 64, 16, torch.float32, "cpu")
    found_any = 0
    for _ in range(25):
        texts = []
        for _ in range(4):
            at = rng.randrange(max(1, size - 8))
            texts.append([t for t in store[at : at + rng.randint(1, 8)] if t < vocab_size] or [0])
        state = state_of(texts)
        tree = drafter.propose(state, None, None).tree
        expected = [counted(store, text, vocab_size, 5, 2, 4) for text in texts]
        assert bool(drafter.has_guess(state, None)) == any(
            e or any(store[i : i + s] == t[-s:] for s in range(2, 6) if s <= len(t) for i in range(size))
            for e, t in zip(expected, texts)
        )
        for b, (counts, text) in enumerate(zip(expected, texts)):
            tokens, parent = tree.tokens[b].tolist(), tree.parent[b].tolist()
            assert tokens[0] == text[-1] and len(tokens) == nodes and all(
                p < i for i, p in enumerate(parent) if i
            )
            path = {0: ()}
            for i in range(1, nodes):
                path[i] = (*path[parent[i]], tokens[i])
            live = [i for i in range(1, nodes) if tree.scores[b, i] > float("-inf")]
            drafted = [path[i] for i in live]
            assert len(set(drafted)) == len(drafted) == min(len(counts), nodes - 1)
            assert sorted(
                (counts[p] for p in drafted), reverse=True
            ) == sorted(counts.values(), reverse=True)[: nodes - 1]
            assert tree.depth[b].tolist() == [len(path[i]) for i in range(nodes)]
            total = max(1, sum(n for p, n in counts.items() if len(p) == 1))
            for i in live:
                assert tree.scores[b, i].exp() <= counts[path[i]] / total + 1e-5
            found_any += bool(drafted)
    assert found_any > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_plain_text(models, temperature):
    """Of a store made of the target's own texts nearly everything is found."""
    target, _ = models
    sampling = [Sampling(60, temperature, seed=s) for s in range(3)]
    plain = Decoder(target, batch=3, max_seq_len=200, compile=False).generate(PROMPTS, sampling)
    store = []
    for prompt, out in zip(PROMPTS, plain):
        store += [*prompt, *out.ids, target.args.vocab_size]
    drafter = drafter_of(store, target.args.vocab_size, nodes=24)
    fast = Decoder(target, drafter, batch=3, max_seq_len=200, compile=False).generate(PROMPTS, sampling)
    assert [o.ids for o in fast] == [o.ids for o in plain]
    lengths = [n for o in fast for n in o.accept_lengths]
    assert sum(lengths) / len(lengths) > 3
    # Of one that knows nothing, nothing, and no loss.
    other = drafter_of([5, 6, 7, 5, 6, 8], target.args.vocab_size, nodes=24)
    slow = Decoder(target, other, batch=3, max_seq_len=200, compile=False).generate(PROMPTS, sampling)
    assert [o.ids for o in slow] == [o.ids for o in plain]


def test_suffixes_that_point_before_the_store_are_no_places():
    """A sample of them is judged where a store is opened; of the others nothing may come that is no token."""
    tokens = torch.arange(20, dtype=torch.int32)
    drafter = Rest(tokens, torch.arange(20, dtype=torch.int32), 64)
    at = torch.tensor([-(2**31), -5, 3, 19, 2**31 - 1])
    assert drafter.follow(at, 2).tolist() == [[-1, -1], [-1, -1], [3, 4], [19, -1], [-1, -1]]


def test_more_hits_than_are_counted():
    """Evenly spread samples: the share of each continuation stays."""
    rng = random.Random(1)
    store = []
    for _ in range(4000):
        store += [1, 2, rng.choices([3, 4, 5], [6, 3, 1])[0], 9]
    drafter = drafter_of(store, 9, nodes=4, depth=1, hits=256)
    tree = drafter.propose(state_of([[0, 1, 2]]), None, None).tree
    assert tree.tokens[0].tolist() == [2, 3, 4, 5]
    assert torch.allclose(tree.scores[0, 1:].exp(), torch.tensor([0.6, 0.3, 0.1]), atol=0.03)


@pytest.fixture(scope="module")
def built(golden, tmp_path_factory) -> SimpleNamespace:
    """A store from two files in `folder`/store, and what building it said."""
    folder, out, err = tmp_path_factory.mktemp("rest"), io.StringIO(), io.StringIO()
    (folder / "a.txt").write_text("abc abd abe. " * 20)
    talk = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "abf"}]
    rows = [{"text": "abc"}, {"prompt": "what"}, {"messages": talk}, {"ids": [97, 98, 99]}, {"left_out": 5}]
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [*build(golden, folder / "store"), str(folder / "a.txt"), str(folder / "b.jsonl")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert rest.main(argv) == 0
    return SimpleNamespace(folder=folder, out=out.getvalue(), err=err.getvalue())


@pytest.fixture(scope="module")
def damaged(built) -> Path:
    """The folder of the store, of copies with something wrong, and of files that no store is made of."""
    folder = built.folder
    about = json.loads((folder / "store" / "store.json").read_text())
    suffixes = (folder / "store" / "suffixes.bin").stat().st_size
    for name, file, content in (
        ("vocabulary", "store.json", json.dumps(about | {"vocab_size": 7}).encode()),
        ("tokenizer", "store.json", json.dumps(about | {"tokenizer": "0" * 64}).encode()),
        ("fewer", "store.json", json.dumps(about | {"suffixes": ["int32"]}).encode()),
        ("random", "suffixes.bin", random.Random(0).randbytes(suffixes)),
        ("short", "tokens.bin", b"123"),
    ):
        shutil.copytree(folder / "store", folder / name)
        (folder / name / file).write_bytes(content)
    (folder / "nothing").mkdir()
    (folder / "empty.txt").write_text("")
    (folder / "wrong.jsonl").write_text('{"ids": [99999]}\n')
    return folder


def build(golden: Path, out: Path) -> list[str]:
    return ["build", "--checkpoint", str(golden), "--out", str(out)]


def decode(golden: Path, *options: str) -> list[str]:
    command = ["--checkpoint", str(golden), "--prompt", "abc abd abe.", "--raw", "--no-compile"]
    return [*command, "--max-new-tokens", "30", "--speculate", "rest", "--dtype", "fp32", *options]


def test_a_store_from_files_and_the_command_line(golden, built, capsys):
    store = built.folder / "store"
    assert "wrote" in built.out and "suffixes" in built.err
    about = json.loads((store / "store.json").read_text())
    assert about["tokens"] * 4 == (store / "tokens.bin").stat().st_size == (
        store / "suffixes.bin"
    ).stat().st_size
    options = ["--datastore", str(store), "--draft-tokens", "16", "--compare", "--json"]
    assert generate.main(decode(golden, *options)) == 0
    assert json.loads(capsys.readouterr().out)["equal"]


def check_refused(main, argv: list[str], words: str, capsys) -> None:
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and error.count("error: ") == 1, error


@pytest.mark.parametrize("words, options", [
    pytest.param("with --datastore", "", id="no-store-named"),
    pytest.param("holds no store.json", "--datastore {folder}/nothing", id="folder-without-a-store"),
    pytest.param("1: must be 2 to 1,024", "--datastore {folder}/store --draft-tokens 1", id="one-node"),
    pytest.param("vocabulary of 7", "--datastore {folder}/vocabulary", id="other-vocabulary"),
    pytest.param("another tokenizer", "--datastore {folder}/tokenizer", id="other-tokenizer"),
    pytest.param("suffixes is ['int32']; expected", "--datastore {folder}/fewer", id="fewer-suffix-files"),
    pytest.param("damaged", "--datastore {folder}/random", id="random-suffixes"),
    pytest.param("as store.json says", "--datastore {folder}/short", id="short-tokens"),
])
def test_stores_that_are_refused(golden, damaged, capsys, words, options):
    options = [word.format(folder=damaged) for word in options.split()]
    check_refused(generate.main, decode(golden, *options), words, capsys)


@pytest.mark.parametrize("words, text", [
    pytest.param("no text in there", "empty.txt", id="empty-text"),
    pytest.param("no such file", "none.txt", id="text-that-is-not-there"),
    pytest.param("outside the vocabulary", "wrong.jsonl", id="unknown-id"),
])
def test_texts_that_no_store_is_made_of_are_refused(golden, damaged, tmp_path, capsys, words, text):
    check_refused(rest.main, [*build(golden, tmp_path / "new"), str(damaged / text)], words, capsys)
    assert not (tmp_path / "new").exists()


def test_a_store_is_replaced_with_force_only(golden, damaged, tmp_path, capsys):
    """Also one that is damaged."""
    shutil.copytree(damaged / "short", tmp_path / "store")
    argv = [*build(golden, tmp_path / "store"), str(damaged / "a.txt")]
    check_refused(rest.main, argv, "--force", capsys)
    assert rest.main([*argv, "--force"]) == 0


def test_a_store_never_replaces_what_is_no_store(golden, tmp_path):
    (tmp_path / "a.txt").write_text("abc abd abe. " * 20)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("x")
    for out in (tmp_path / "mine", tmp_path / "mine" / "new" / ".."):
        for force in ([], ["--force"]):
            build = ["build", "--checkpoint", str(golden), "--out", str(out), *force]
            assert rest.main([*build, str(tmp_path / "a.txt")]) == 1
    assert (tmp_path / "mine" / "precious").read_text() == "x"


def test_a_store_is_mapped_into_memory(golden, tmp_path):
    (tmp_path / "a.txt").write_text("abc abd abe. " * 20)
    assert rest.main(
        ["build", "--checkpoint", str(golden), "--out", str(tmp_path / "store"), str(tmp_path / "a.txt")]
    ) == 0
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    model = load(
        golden, "rest", flags={"datastore": str(tmp_path / "store"), "draft-tokens": 8}, compile=False
    )
    assert model.decoder.drafter.tokens.numel()
    assert all(f"{tmp_path}/store/{name}.bin" in maps.read_text() for name in ("tokens", "suffixes"))


def test_what_is_read_of_a_row(golden, tmp_path):
    tokenizer = Tokenizer.load(golden)
    rows = [
        {"prompt": "ab", "completion": "cd"},
        {"prompt": "xx", "messages": [{"role": "user", "content": "ef"}]}, {"text": " \n"},
    ]
    (tmp_path / "a.JSONL").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfgh")
    found = [
        tokenizer.decode(ids) for name in ("a.JSONL", "b.txt")
        for ids in rest_store.texts(tmp_path / name, tokenizer)
    ]
    assert [text.removeprefix("<bos>") for text in found] == ["ab", "cd", "ef", "gh"]


def test_stores_that_cannot_be_built(golden, tmp_path, monkeypatch):
    """And what was there stays as it was."""
    text, out = tmp_path / "a.txt", tmp_path / "store"
    text.write_text("abc abd abe. " * 20)

    def refused(checkpoint: Path, words: str) -> None:
        with pytest.raises(InputError, match=words):
            rest_store.make(checkpoint, [text], out)
        assert not list(tmp_path.glob(".store*"))

    for name in ("config.json", "model.safetensors"):
        (tmp_path / "silent").mkdir(exist_ok=True)
        shutil.copy(golden / name, tmp_path / "silent")
    refused(tmp_path / "silent", "silent: has no tokenizer")
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "pydivsufsort", None)
        refused(golden, "pip install pydivsufsort")
    assert not out.exists()
    read = rest_store.texts

    def slow(path: Path, tokenizer: Tokenizer):
        out.mkdir()
        (out / "precious").touch()
        return read(path, tokenizer)

    monkeypatch.setattr(rest_store, "texts", slow)
    refused(golden, "store: exists and is no store; choose another --out")
    assert [path.name for path in out.iterdir()] == ["precious"]
