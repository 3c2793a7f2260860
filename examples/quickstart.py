"""Compile a model and let it answer: a chat, and several prompts at once.

python examples/quickstart.py
"""

from __future__ import annotations

import chunkc


def main() -> None:
    # A HuggingFace name or folder, a .gguf file, or a model object that you have loaded yourself.
    engine = chunkc.compile("SmolLM2-135M-Instruct", budget=256)

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = engine.generate(chat, chunkc.SamplingParams(max_new_tokens=24))
    print(answer.text)

    prompts = ["The sea is", "Once upon a time", "Two plus two is"]
    sampling = chunkc.SamplingParams(max_new_tokens=12, do_sample=True, temperature=0.8, seed=1)
    for prompt, completion in zip(prompts, engine.generate(prompts, sampling), strict=True):
        print(f"{prompt!r} -> {completion.text!r} ({completion.finish_reason})")
        print(f"    first token after {1e3 * completion.metrics.ttft:.0f} ms")


if __name__ == "__main__":
    main()
