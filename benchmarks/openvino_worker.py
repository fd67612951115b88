"""Worker process of `processes.py: OpenVino`, run in OpenVINO's own environment.

    python openvino_worker.py TARGET HEAD PROPERTIES     (HEAD: "" for plain decoding)

PROPERTIES: of the CPU plugin, as JSON: {"INFERENCE_NUM_THREADS": 2}.

A request is a line of JSON on stdin: {"ids": [...], "tokens": 128, "stop_ids": [...], "drafting": {}}.
drafting has fields of GenerationConfig, such as {"num_assistant_tokens": 3}; {}: plain decoding. The answer
is a line on stdout: {"steps": [[...], ...], "seconds": 1.2}: the tokens of each step, that of the prompt
first, and the time from the first step to the last.
"""
import json
import os
import sys
import time

import numpy as np
import openvino
import openvino_genai

# The library may print; the protocol keeps stdout for itself.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


class Steps(openvino_genai.StreamerBase):
    """The tokens of each step, and when they came."""

    def __init__(self):
        super().__init__()
        self.steps, self.times = [], []

    def write(self, tokens):
        """Called by the library after each step, and without tokens at the end."""
        if tokens := [tokens] if isinstance(tokens, int) else list(tokens):
            self.times.append(time.perf_counter())
            self.steps.append(tokens)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self):
        """Called by the library at the end of the text."""


def generate(pipeline, ids, tokens, stop_ids, drafting) -> dict:
    """Decode greedily -> the answer."""
    options = {
        "max_new_tokens": tokens, "do_sample": False, "eos_token_id": stop_ids[0],
        "stop_token_ids": set(stop_ids), "apply_chat_template": False,
    }
    config = openvino_genai.GenerationConfig()
    for name, value in (options | drafting).items():
        setattr(config, name, value)
    prompt, seen = np.array([ids], np.int64), Steps()
    inputs = (openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
    pipeline.generate(openvino_genai.TokenizedInputs(*inputs), config, seen)
    return {"steps": seen.steps, "seconds": seen.times[-1] - seen.times[0]}


def main(target: str, head: str, properties: str) -> None:
    """Load the models, then answer until stdin ends."""
    options = json.loads(properties)
    pipelines = {False: openvino_genai.LLMPipeline(target, "CPU", **options)}
    if head:
        draft = openvino_genai.draft_model(head, "CPU", **options)
        pipelines[True] = openvino_genai.LLMPipeline(target, "CPU", draft_model=draft, **options)
    write_line({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        write_line(generate(pipelines[bool(request["drafting"])], **request))


def write_line(answer: dict) -> None:
    """Write a line of JSON."""
    print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
