"""Downloads from the hub, without a hub."""
from pathlib import Path

from helpers.converting import assert_same, fused
from helpers.sources import target_state, write_source
from safetensors.torch import load_file

from checkpoint.convert import convert
from checkpoint.folder import read_config


class Hub:
    """Stands for huggingface_hub: a repository with these files. It records which are downloaded."""

    def __init__(self, folder: Path, monkeypatch):
        import huggingface_hub

        self.folder, self.downloaded = folder, []
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def model_info(self, repo, timeout):
        names = [p.name for p in self.folder.iterdir()]
        return type("Info", (), {"siblings": [type("File", (), {"rfilename": n}) for n in names]})

    def download(self, repo, allow_patterns=None, local_files_only=False):
        if local_files_only:
            raise FileNotFoundError("not in the cache")
        self.downloaded += [n for n in allow_patterns if n not in self.downloaded]
        return str(self.folder)


def test_hub_downloads_only_what_is_needed(tmp_path, monkeypatch):
    folder = write_source(tmp_path / "repo", target_state(), form="safetensors-sharded")
    for extra in ("pytorch_model.bin", "consolidated.safetensors", "modeling_evil.py", "README.md"):
        (folder / extra).write_text("not needed")
    hub = Hub(folder, monkeypatch)
    out = convert("org/some-model", tmp_path / "out", quiet=True)
    assert sorted(hub.downloaded) == [
        "config.json", "model-part0.safetensors", "model-part1.safetensors", "model.safetensors.index.json"
    ]
    assert_same(load_file(out / "model.safetensors"), fused(target_state()))
    assert read_config(out)["name"] == "some-model" and read_config(out)["source"] == "org/some-model"
