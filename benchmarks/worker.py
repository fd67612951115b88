"""Worker process of `processes.py: Worker`, run in OpenVINO's or vLLM's own environment.

    python worker.py openvino TARGET OPTIONS     (properties of the CPU plugin; "head": a folder, or null)
    python worker.py vllm MODEL OPTIONS          (arguments of vllm.LLM; "threads")

OPTIONS is JSON: {"INFERENCE_NUM_THREADS": 2}.

A request is a line of JSON on stdin: {"ids": [...], "tokens": 128, "stop_ids": [...], "drafting": {}}.
drafting has fields of OpenVINO's GenerationConfig, such as {"num_assistant_tokens": 3}; {}: plain decoding.
The answer is a line on stdout: {"steps": [[...], ...], "seconds": 1.2}: the tokens of each step, that of the
prompt first, and the time from the first step to the last.
"""
import json
import os
import sys
import time

# The libraries may print; the protocol keeps stdout for itself.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def openvino(target, head=None, **properties):
    """Load the models -> function that decodes a request greedily and passes the tokens of each step on."""
    import numpy as np
    import openvino
    import openvino_genai

    class Steps(openvino_genai.StreamerBase):
        """Called by the library after each step, and without tokens at the end."""

        def __init__(self, passed_on):
            super().__init__()
            self.passed_on = passed_on

        def write(self, tokens):
            self.passed_on([tokens] if isinstance(tokens, int) else list(tokens))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self):
            pass

    pipelines = {False: openvino_genai.LLMPipeline(target, "CPU", **properties)}
    if head:
        draft = openvino_genai.draft_model(head, "CPU", **properties)
        pipelines[True] = openvino_genai.LLMPipeline(target, "CPU", draft_model=draft, **properties)

    def generate(passed_on, ids, tokens, stop_ids, drafting):
        options = {
            "max_new_tokens": tokens, "do_sample": False, "eos_token_id": stop_ids[0],
            "stop_token_ids": set(stop_ids), "apply_chat_template": False,
        }
        config = openvino_genai.GenerationConfig()
        for name, value in (options | drafting).items():
            setattr(config, name, value)
        prompt = np.array([ids], np.int64)
        inputs = (openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        pipeline = pipelines[bool(drafting)]
        pipeline.generate(openvino_genai.TokenizedInputs(*inputs), config, Steps(passed_on))

    return generate


def vllm(model, threads, **options):
    """Load the model -> as `openvino`. One process: with its default of three it was slower on two cores."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    }
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options |= {"max_num_seqs": 1, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    engine = LLM(model, **options).llm_engine

    def generate(passed_on, ids, tokens, stop_ids, drafting):
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, stop_token_ids=stop_ids, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request("0", {"prompt_token_ids": ids}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                passed_on(list(output.outputs[0].token_ids))

    return generate


def main(program: str, model: str, options: str) -> None:
    """Load the model, then answer until stdin ends."""
    generate = {"openvino": openvino, "vllm": vllm}[program](model, **json.loads(options))
    write_line({"ready": True})
    steps = []
    for line in sys.stdin:
        steps.clear()
        generate(lambda tokens: steps.append((time.perf_counter(), tokens)), **json.loads(line))
        times, answer = zip(*(step for step in steps if step[1]))
        write_line({"steps": answer, "seconds": times[-1] - times[0]})


def write_line(answer: dict) -> None:
    """Write a line of JSON."""
    print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
