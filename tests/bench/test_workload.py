from __future__ import annotations

import json

import pytest

from chunkc.bench.workload import Request, Workload, WorkloadError, builtin_workload, load_workloads

GOOD = {"arrival_s": 0.5, "prompt_token_ids": [1, 2, 3], "max_new_tokens": 4}


def write(tmp_path, content) -> object:
    file = tmp_path / "load.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_list_is_one_workload_named_after_its_file_and_sorted_by_arrival(tmp_path):
    (workload,) = load_workloads(write(tmp_path, [GOOD, {**GOOD, "arrival_s": 0}]))
    assert workload.name == "load"
    assert [request.arrival_s for request in workload.requests] == [0.0, 0.5]
    assert (workload.prompt_tokens, workload.new_tokens, workload.is_mixed) == (6, 8, True)


def test_named_lists_come_in_the_order_asked_for(tmp_path):
    file = write(tmp_path, {"a": [GOOD], "b": [GOOD], "c": [GOOD]})
    assert [workload.name for workload in load_workloads(file)] == ["a", "b", "c"]
    assert [workload.name for workload in load_workloads(file, ["c", "a"])] == ["c", "a"]


@pytest.mark.parametrize(
    "content, which, said",
    [
        ("{", None, "not JSON"),
        (b"\xff".decode("latin-1") + "[", None, "not JSON"),
        (3, None, "must hold a list"),
        ({}, None, "must hold a list"),
        ([], None, "at least one request"),
        ({"a": "x"}, None, "at least one request"),
        ([1], None, "request 0 of 'load' must be an object"),
        ([GOOD, {"arrival_s": 1}], None, "request 1 of 'load' lacks prompt_token_ids, max_new_tokens"),
        ([{**GOOD, "arrival_s": -1}], None, "arrival_s must be"),
        ([{**GOOD, "arrival_s": True}], None, "arrival_s must be"),
        ([{**GOOD, "arrival_s": "soon"}], None, "arrival_s must be"),
        ('[{"arrival_s": NaN, "prompt_token_ids": [1], "max_new_tokens": 1}]', None, "arrival_s must be"),
        ([{**GOOD, "prompt_token_ids": []}], None, "prompt_token_ids must be"),
        ([{**GOOD, "prompt_token_ids": "text"}], None, "prompt_token_ids must be"),
        ([{**GOOD, "prompt_token_ids": [1.5]}], None, "prompt_token_ids must be"),
        ([{**GOOD, "prompt_token_ids": [-1]}], None, "prompt_token_ids must be"),
        ([{**GOOD, "max_new_tokens": 0}], None, "max_new_tokens must be"),
        ([{**GOOD, "max_new_tokens": None}], None, "max_new_tokens must be"),
        ([GOOD], ["a"], "nothing to choose with --which"),
        ({"a": [GOOD]}, ["b"], "no workload 'b'; it has a"),
    ],
)
def test_a_malformed_file_is_told_in_one_line(tmp_path, content, which, said):
    with pytest.raises(WorkloadError) as error:
        load_workloads(write(tmp_path, content), which)
    assert said in str(error.value)
    assert "load.json" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_told(tmp_path, name):
    with pytest.raises(WorkloadError, match="cannot read the workload"):
        load_workloads(tmp_path / name)


def test_the_builtin_workload_is_the_same_every_time_and_long_prompts_arrive_late():
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return [hash_free(word) for word in text.split()]

    def hash_free(word: str) -> int:
        return sum(map(ord, word)) % 997

    for tokenizer in (Tokenizer(), None):
        workload = builtin_workload(tokenizer, vocab_size=997)
        assert workload == builtin_workload(tokenizer, vocab_size=997)
        assert workload.is_mixed
        early = [request for request in workload.requests if request.arrival_s == 0]
        late = [request for request in workload.requests if request.arrival_s > 0]
        assert min(len(r.prompt_token_ids) for r in late) > 10 * max(len(r.prompt_token_ids) for r in early)
        assert len({request.prompt_token_ids for request in workload.requests}) == len(workload.requests)
        assert all(0 <= token < 997 for request in workload.requests for token in request.prompt_token_ids)


def test_the_warm_up_holds_the_shortest_and_the_longest_prompt():
    requests = (Request(0, (1,) * 5, 9), Request(1, (2,), 1), Request(2, (3,) * 7, 9))
    warm_up = Workload("x", requests).warm_up()
    assert [len(request.prompt_token_ids) for request in warm_up.requests] == [1, 7]
    assert [request.max_new_tokens for request in warm_up.requests] == [1, 4]
    assert {request.arrival_s for request in warm_up.requests} == {0.0}
