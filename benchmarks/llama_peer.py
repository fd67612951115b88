"""llama.cpp as a peer: its own server, or its Python package."""
from __future__ import annotations

import http.client
import json
import time
from pathlib import Path

from bench import Decoded  # first: it makes the modules below importable
from peer_process import HttpPeer

from common.errors import InputError

CONTEXT = 4096


class LlamaServer(HttpPeer):
    """llama-server, for so many texts at a time; with a head it drafts chains of `chain` by EAGLE-3."""

    def __init__(
        self, binary: str, file: Path, threads: int, stop_ids: list[int], head: str | None = None,
        chain: int = 0, parallel: int = 1,
    ):
        self.stop_ids = stop_ids
        command = [binary, "--model", str(file), "--ctx-size", str(CONTEXT * parallel)]
        command += ["--threads", str(threads), "--parallel", str(parallel)]
        if head:
            command += ["--model-draft", head, "--spec-type", "draft-eagle3"]
            command += ["--spec-draft-n-max", str(chain)]
        super().__init__("--llama-server", command)

    def _ask(self, method: str, path: str, body: dict | None = None) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def decode(self, ids: list[int], tokens: int) -> Decoded:
        """Decode a prompt. The time is the server's own, from the first token to the last.

        What a stop id cuts off counts as accepted there, so that steps can be a few too few. Raises
        InputError if the server fails, or if the GGUF has other stop ids.
        """
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
        try:
            status, answer = self._ask("POST", "/completion", {**body, "return_tokens": True})
        except (OSError, http.client.HTTPException):
            raise self.failed("gave no answer") from None
        if status != 200:
            raise self.failed(f"answered a prompt of {len(ids)} tokens with status {status}")
        new, timings = answer["tokens"], answer["timings"]
        stops = [i for i, token in enumerate(new) if token in self.stop_ids]
        if stops != ([len(new) - 1] if answer["stop_type"] == "eos" else []):
            raise InputError("--llama-server: the GGUF has other stop ids than the checkpoint")
        later = len(new) - 1
        rate = 1000 * later / timings["predicted_ms"] if later else 0.0
        return Decoded(new, rate, [], later - timings.get("draft_n_accepted", 0))


class LlamaCpp:
    """llama-cpp-python through its C interface: one token after the other, the largest logit each time."""

    def __init__(self, file: Path, threads: int, stop_ids: list[int]):
        import llama_cpp

        self.api, self.stop_ids = llama_cpp, set(stop_ids)
        # All layers on the GPU if llama.cpp was built for one.
        self.llama = llama_cpp.Llama(
            str(file), n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, n_gpu_layers=-1,
            verbose=False,
        )

    def _next(self, ids: list[int]) -> int:
        import numpy as np

        self.llama.eval(ids)
        logits = self.api.llama_get_logits_ith(self.llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self.llama.n_vocab(),)).argmax())

    def decode(self, ids: list[int], tokens: int) -> Decoded:
        """Decode a prompt."""
        self.llama.reset()
        new = [self._next(ids)]
        began = time.perf_counter()
        while len(new) < tokens and new[-1] not in self.stop_ids:
            new.append(self._next(new[-1:]))
        seconds = time.perf_counter() - began
        return Decoded(new, (len(new) - 1) / seconds if len(new) > 1 else 0.0, [])
