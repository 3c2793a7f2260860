"""Read tokens as they are made, while a long prompt is being prefilled in chunks next to them.

python examples/streaming.py
"""

from __future__ import annotations

import chunkc


def main() -> None:
    engine = chunkc.compile("SmolLM2-135M-Instruct", budget=64)

    # One request: an iterator of token events. Leaving the block early would abort the request.
    chat = [{"role": "user", "content": "Name three colours."}]
    with engine.stream(chat, chunkc.SamplingParams(max_new_tokens=16)) as stream:
        for event in stream:
            print(event.text, end="", flush=True)
    print()

    # Several requests, by hand: a server's loop. The long prompt takes several steps of 64 tokens, and the
    # request that is decoding gets a token in each of them.
    short = engine.add_request("The quick brown fox", chunkc.SamplingParams(max_new_tokens=12, ignore_eos=True))
    engine.step()
    long = engine.add_request("one two three four five " * 50, chunkc.SamplingParams(max_new_tokens=2))
    while engine.has_unfinished():
        events = engine.step()
        step = engine.metrics.records[-1]
        got = ", ".join("short" if event.request_id == short else "long" for event in events)
        print(f"{step.decode_tokens:3d} decode + {step.prefill_tokens:2d} prefill tokens -> a token for: {got}")
    print("long prompt:", engine.completion(long).finish_reason)


if __name__ == "__main__":
    main()
