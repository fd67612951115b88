"""A folder in small parts is joined to what it was; damaged parts are refused."""
import parts
import pytest


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    (folder / "eagle3").mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(range(256)) * 900)
    (folder / "eagle3" / "costs.json").write_text("left behind")
    (folder / "eagle3" / "config.json").write_text("{}")
    return folder


def test_there_and_back(folder, tmp_path, capsys):
    made = parts.split(folder, tmp_path / "carry", 300)
    assert len(made) > 1 and all(part.stat().st_size <= 300 for part in made)
    joined = parts.join(tmp_path / "carry", tmp_path / "out")
    assert joined == tmp_path / "out" / "model"
    assert (joined / "weights").read_bytes() == (folder / "weights").read_bytes()
    files = sorted(str(file.relative_to(joined)) for file in joined.rglob("*") if file.is_file())
    assert files == ["eagle3/config.json", "weights"]
    assert parts.main(["split", str(folder), str(tmp_path / "carry"), "--size", "1"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "carry" / "part-00")]
    assert parts.main(["join", str(tmp_path / "carry"), str(tmp_path / "again")]) == 0


@pytest.mark.parametrize("harm", ["damaged", "missing", "there already", "no sums", "no folder", "not ours"])
def test_refusals(folder, tmp_path, capsys, harm):
    carry, out = tmp_path / "carry", tmp_path / "out"
    parts.split(folder, carry, 300)
    command = ["join", str(carry), str(out)]
    if harm == "damaged":
        (carry / "part-01").write_bytes(b"x" + (carry / "part-01").read_bytes()[1:])
    elif harm == "missing":
        (carry / "part-00").unlink()
    elif harm == "there already":
        (out / "model").mkdir(parents=True)
    elif harm == "no sums":
        (carry / "sums").unlink()
    else:
        command = ["split", str(tmp_path / "none" if harm == "no folder" else folder), str(folder)]
    assert parts.main(command) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert not list(out.glob("*/weights")) and (folder / "weights").is_file()
