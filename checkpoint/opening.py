"""From what a user names to an opened `Source`: local folders, GGUF files, hub repositories."""
from __future__ import annotations

import re
from pathlib import Path

from checkpoint.gguf import open_gguf
from checkpoint.huggingface import WEIGHT_FILES, open_folder, shards
from checkpoint.names import CONFIG, is_gguf
from checkpoint.source import Source
from common.errors import InputError, first_line

SMALL_FILES = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
)


def resolve_source(checkpoint: str | Path) -> Path:
    """The local path of a checkpoint: a folder, a .gguf file, or a download of the hub repository `org/name`.

    Local paths come first. Raises InputError if it is none of these, or if the download fails.
    """
    path = Path(checkpoint)
    if path.is_dir() or (is_gguf(path) and path.is_file()):
        return path
    if path.exists():
        raise InputError(f"{path}: not a folder (nor a .gguf file)")
    name = str(checkpoint)
    if is_gguf(path) or name.startswith(".") or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{path}: no such file or folder")
    return _download(name)


def open_source(path: Path) -> Source:
    """Open what `resolve_source` returned. Raises InputError if anything in it is missing or damaged."""
    return open_gguf(path) if is_gguf(path) else open_folder(path)


def _download(repo: str) -> Path:
    """Download the files that we need of a hub repository into the hub's cache -> the local folder.

    An interrupted download is resumed.
    """
    from huggingface_hub import errors

    try:
        return _snapshot(repo)
    except InputError:
        raise
    except errors.GatedRepoError:  # a kind of RepositoryNotFoundError, hence first
        raise InputError(f"{repo}: gated; accept its licence on the hub, then run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"{repo}: no such folder, and no such public repository on the hub") from None
    except Exception as e:  # the hub client raises its own, its HTTP library's and the system's errors
        raise InputError(f"{repo}: no such folder, and the hub did not send it ({first_line(e)})") from None


def _snapshot(repo: str) -> Path:
    """`_download`, with the errors of the hub client."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    def fetch(*names: str) -> Path:
        return Path(hub.snapshot_download(repo, allow_patterns=list(names)))

    try:
        # One request with a time limit. Listing the files page by page retries for half a minute without a
        # network.
        files = [file.rfilename for file in hub.HfApi().model_info(repo, timeout=20).siblings or ()]
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise
    except Exception as no_network:
        try:  # an earlier download may have left all that is needed
            return Path(hub.snapshot_download(repo, local_files_only=True))
        except Exception:
            raise no_network from None
    weights = next((name for name in WEIGHT_FILES if name in files), None)
    if weights is None or CONFIG not in files:
        lacks = CONFIG if weights else "weights we read (" + ", ".join(WEIGHT_FILES) + ")"
        raise InputError(f"{repo}: the hub repository has no {lacks}")
    small = [name for name in SMALL_FILES if name in files]
    folder = fetch(*small, weights)
    if not weights.endswith(".json"):
        return folder
    return fetch(*small, weights, *dict.fromkeys(shards(folder / weights).values()))
