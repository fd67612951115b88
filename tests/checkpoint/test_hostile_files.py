"""Files that lie: each is refused in one line that names file, key, what was found and what is expected."""
import json
import os
import socket
import time

import pytest
from helpers import hostile
from helpers.hostile import with_key

from checkpoint.convert import convert
from checkpoint.loading import load_head, load_model
from common.errors import InputError
from drafters import read_tree
from engine.calibration import Calibration

MOST_SECONDS = 5


def refused(action) -> str:
    """The one line that an action is refused with, in little time of this process."""
    began = time.process_time()
    with pytest.raises(InputError) as error:
        action()
    line = str(error.value)
    assert line.isprintable() and time.process_time() - began < MOST_SECONDS, line
    return line


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A converted target with its head inside, and their sources. Each test leaves them as they were."""
    place = tmp_path_factory.mktemp("hostile")
    convert(hostile.target_source(place / "source"), place / "target", quiet=True)
    convert(hostile.head_source(place / "head"), target=place / "target", quiet=True)
    target, _ = load_model(place / "target")
    load_head(place / "target" / "eagle3", target)
    return place, target


def changed(file, key, value, action) -> str:
    """What an action is refused with while a key of a JSON file has a value."""
    before = file.read_bytes()
    try:
        with_key(file, key, value)
        return refused(action)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("key, value, words", hostile.rows(hostile.TARGET))
def test_configs_of_targets(folders, key, value, words):
    folder = folders[0] / "target"
    file = folder / "config.json"
    line = changed(file, key, value, lambda: load_model(folder))
    assert line.startswith(f"{file}: {words}"), line


@pytest.mark.parametrize("key, value, words", hostile.rows(hostile.HEAD))
def test_configs_of_heads(folders, key, value, words):
    folder = folders[0] / "target" / "eagle3"
    file = folder / "config.json"
    line = changed(file, key, value, lambda: load_head(folder, folders[1]))
    assert line.startswith(f"{file}: {words}"), line


@pytest.mark.parametrize("key, value, words", hostile.rows(hostile.PUBLISHED))
def test_published_configs(folders, tmp_path, key, value, words):
    source = folders[0] / "source"
    line = changed(source / "config.json", key, value, lambda: convert(source, tmp_path / "out", quiet=True))
    assert line.startswith(f"{source}/config.json: {words}"), line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", hostile.SOURCES)
def test_sources(tmp_path, case):
    make, words = hostile.SOURCES[case]
    source = make(tmp_path / "in")
    line = refused(lambda: convert(source, tmp_path / "out", quiet=True))
    assert line.startswith(str(source)) and words in line, line
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("ids, words", [
    ([-1, *range(23)], "holds the id -1; expected ids from 0, below vocab_size, 96"),
    ([*range(23), 96], "holds the id 96; expected"), ([*range(23), 2**40],
    "holds the id 1099511627776; expected"),
    ([0] * 24, "holds an id twice; expected each once"),
])
def test_draft_ids_that_are_none(folders, ids, words):
    folder = folders[0] / "target" / "eagle3"
    file = folder / "model.safetensors"
    before = file.read_bytes()
    try:
        hostile.save_ids(folder, ids)
        line = refused(lambda: load_head(folder, folders[1]))
        assert line.startswith(f"{file}: tensor draft_ids {words}"), line
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("content", hostile.TREES, ids=lambda content: content[:30])
def test_trees(tmp_path, content):
    file = tmp_path / "tree.json"
    file.write_text(content)
    line = refused(lambda: read_tree(str(file)))
    assert line.startswith(f"--tree {file}: ") and hostile.TREES[content] in line, line


@pytest.mark.parametrize("key, value, words", hostile.rows(hostile.CALIBRATIONS))
def test_calibrations(tmp_path, key, value, words):
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(hostile.CALIBRATION))
    assert Calibration.read(tmp_path)
    line = changed(file, key, value, lambda: Calibration.read(tmp_path))
    assert line.startswith(f"{file}: damaged: {words}"), line


def make_pipe(path) -> None:
    os.mkfifo(path)


def make_socket(path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may not be long
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path.name)
    os.chdir(here)


NO_FILES = {
    "a pipe": make_pipe, "a socket": make_socket, "a folder": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", ("config.json", "model.safetensors", "eagle3/config.json",
                                  "eagle3/model.safetensors", "eagle3/calibration.json"))
def test_what_is_no_file_is_never_opened(folders, tmp_path, kind, name):
    """Neither of ours: a pipe would wait for ever, a device never end."""
    place, target = folders
    file = place / "target" / name
    aside = tmp_path / "aside"
    if file.exists():
        file.rename(aside)
    try:
        NO_FILES[kind](file)
        head = place / "target" / "eagle3"
        read = {"eagle3/calibration.json": lambda: Calibration.read(head)}.get(
            name, (lambda: load_head(head, target)) if "/" in name else lambda: load_model(place / "target")
        )
        assert refused(read).startswith(f"{file}: ") and f"is {kind}; expected a file" in refused(read)
    finally:
        file.rmdir() if file.is_dir() else file.unlink()
        if aside.exists():
            aside.rename(file)


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", ("config.json", "model.safetensors", "tokenizer_config.json", "x.gguf"))
def test_nor_of_others(tmp_path, kind, name):
    source = hostile.target_source(tmp_path / "in")
    (source / name).unlink(missing_ok=True)
    NO_FILES[kind](source / name)
    gguf = name.endswith("gguf")
    line = refused(lambda: convert(source / name if gguf else source, tmp_path / "out", quiet=True))
    assert line.startswith(f"{source}/{name}: "), line
    assert gguf or f"is {kind}; expected a file" in line


@pytest.mark.skipif(not os.path.exists("/proc/kmsg"), reason="no /proc/kmsg here")
def test_files_that_are_larger_than_they_are(folders, tmp_path):
    """Sparse ones, of terabytes."""
    place, _ = folders
    file = place / "target" / "config.json"
    before = file.read_bytes()
    try:
        os.truncate(file, 1 << 42)
        line = refused(lambda: load_model(place / "target"))
        assert line == f"{file}: is 4,398,046,511,104 bytes; expected at most 536,870,912"
    finally:
        file.write_bytes(before)


def test_the_corpus_is_large_enough():
    """300 files, none of them twice."""
    tables = hostile.TARGET, hostile.HEAD, hostile.PUBLISHED, hostile.CALIBRATIONS
    rows = [(i, key, repr(value)) for i, table in enumerate(tables) for key, value, _ in hostile.rows(table)]
    assert len(set(rows)) == len(rows)
    assert len(rows) + len(hostile.SOURCES) + len(hostile.TREES) >= 300
