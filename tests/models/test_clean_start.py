"""A start from a folder is used and kept in processes alone in which code is what its files say, each guard by itself.

Processes are dear, so one tries all that must keep it from a start from the folder, with a start from the model that
only says that it was asked for, and then starts from the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import build, save_tokenizer

from chunkc.kernels import native

_SERVE = """
import json
import sys
import chunkc

engine = chunkc.compile(sys.argv[1], num_pages=32)
heavy = ("transformers.models.llama.modeling_llama", "chunkc.capture", "chunkc.model_start", "torch._dynamo", "sympy")
imported = [name for name in heavy if name in sys.modules]
tokens = engine.generate("w5 w6 w7", {"max_new_tokens": 6})[0].token_ids
print(json.dumps({"said": engine.explain(), "tokens": list(tokens), "imported": imported}))
"""

_PATCH = "import torch; torch.nn.functional.silu = lambda x, inplace=False: torch._C._nn.silu(x)\n"

_LIVE_PATCH = """
import sys
import torch
torch.nn.functional.silu = torch.nn.functional.gelu
{serve}
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.tensor([[5, 6, 7]])
found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
print(json.dumps(found[0, 3:].tolist()))
"""

_CASES = """
import ast, builtins, contextlib, functools, importlib.machinery, json, os, pathlib, sys, threading, types
from unittest import mock
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
import chunkc

folder, beside = sys.argv[1:]
put = mock.patch.object

class TookTheModel(Exception):
    pass

def start(*arguments, **options):
    raise TookTheModel

sys.modules["chunkc.model_start"] = types.SimpleNamespace(start=start)

class Silu:
    def __call__(self, x, inplace=False):
        return x

class Linear(torch.nn.Linear):
    pass

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None

class Loader(importlib.machinery.SourceFileLoader):
    pass

def path_hook(path):
    raise ImportError

def imported(name):
    return mock.patch.dict(sys.modules, {name: types.ModuleType(name)})

def first_on_the_path(name):
    return put(sys, "path", [os.path.join(beside, name), *sys.path])

@contextlib.contextmanager
def kernel_in_python():
    library = torch.library.Library("aten", "IMPL")
    library.impl("silu", lambda x: x, "CPU")
    yield
    library._destroy()

@contextlib.contextmanager
def set_to(set_value, value, before):
    set_value(value)
    yield
    set_value(before)

@contextlib.contextmanager
def hook_on_all():
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *found: None)
    yield
    handle.remove()

def code_of_silu(code):
    F.silu.__code__ = code

def defaults_of_softmax(values):
    F.softmax.__defaults__ = values

python_imports, python_reads = builtins.__import__, importlib.machinery.SourceFileLoader.get_data

def import_as_ever(*arguments):
    return python_imports(*arguments)

def get_data(self, path):
    return python_reads(self, path)

hook = importlib.machinery.FileFinder.path_hook((Loader, [".py"]))
CASES = {
    "silu is a lambda": lambda: put(F, "silu", lambda x, inplace=False: x),
    "silu is gelu": lambda: put(F, "silu", F.gelu),
    "silu is a partial": lambda: put(F, "silu", functools.partial(F.silu, inplace=True)),
    "silu is an object": lambda: put(F, "silu", Silu()),
    "silu is a builtin's other": lambda: put(torch._C._nn, "silu", torch._C._nn.gelu),
    "silu has other code": lambda: set_to(code_of_silu, F.mish.__code__, F.silu.__code__),
    "softmax has other defaults": lambda: set_to(defaults_of_softmax, (None, 3, torch.float64), F.softmax.__defaults__),
    "attention is a lambda": lambda: put(F, "scaled_dot_product_attention", lambda q, k, v, **options: v),
    "functional has another torch": lambda: put(F, "torch", types.ModuleType("torch")),
    "rsqrt is a lambda": lambda: put(torch, "rsqrt", lambda x: x),
    "rsqrt is sqrt": lambda: put(torch, "rsqrt", torch.sqrt),
    "linalg is fft": lambda: put(torch, "linalg", torch.fft),
    "VF has one more": lambda: put(torch._VF, "rsqrt", torch.sqrt, create=True),
    "a method of tensors": lambda: put(torch.Tensor, "float", lambda self: self),
    "a method of tensors is another": lambda: put(torch.Tensor, "float", torch.Tensor.double, create=True),
    "a forward": lambda: put(torch.nn.Linear, "forward", torch.nn.Identity.forward),
    "a forward in a lambda": lambda: put(torch.nn.Linear, "forward", lambda self, x: x),
    "a call of modules": lambda: put(torch.nn.Module, "__call__", torch.nn.Module._call_impl),
    "a class": lambda: put(torch.nn, "Linear", Linear),
    "an operator": lambda: put(torch.ops.aten, "mm", torch.ops.aten.add),
    "json is read by a lambda": lambda: put(json, "loads", lambda text, **options: {}),
    "json is read by a partial": lambda: put(json, "loads", functools.partial(lambda text: {})),
    "json is read by an object": lambda: put(json, "loads", Silu()),
    "json is read by a mock": lambda: put(json, "loads", mock.Mock()),
    "json is read by another": lambda: put(json, "loads", ast.literal_eval),
    "a decoder's method": lambda: put(json.JSONDecoder, "decode", lambda self, text: {}),
    "modules are imported by a lambda": lambda: put(importlib, "import_module", lambda name, package=None: None),
    "calls are profiled": lambda: set_to(sys.setprofile, lambda *call: None, None),
    "calls are traced": lambda: set_to(sys.settrace, lambda *call: None, None),
    "calls of threads are profiled": lambda: set_to(threading.setprofile, lambda *call: None, None),
    "jit is another": lambda: put(torch.jit, "is_tracing", lambda: True),
    "transformers imported": lambda: imported("transformers"),
    "tokenizers imported": lambda: imported("tokenizers"),
    "safetensors imported": lambda: imported("safetensors"),
    "a finder": lambda: put(sys, "meta_path", [Finder, *sys.meta_path]),
    "a path hook": lambda: put(sys, "path_hooks", [path_hook, *sys.path_hooks]),
    "a path hook with a loader": lambda: put(sys, "path_hooks", [hook, *sys.path_hooks]),
    "a loader's method": lambda: put(importlib.machinery.SourceFileLoader, "get_data", get_data),
    "another import": lambda: put(builtins, "__import__", import_as_ever),
    "a package before": lambda: first_on_the_path("packages"),
    "another folder of packages": lambda: first_on_the_path("site-packages"),
    "another dtype": lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    "another device": lambda: torch.device("meta"),
    "a function mode": lambda: TorchFunctionMode(),
    "a dispatch mode": lambda: TorchDispatchMode(),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": lambda: torch.inference_mode(),
    "a hook on all modules": hook_on_all,
    "a kernel in Python": kernel_in_python,
    "another attention": lambda: set_to(torch.backends.cuda.enable_flash_sdp, False, True),
    "deterministic": lambda: set_to(torch.use_deterministic_algorithms, True, False),
    "a variable": lambda: mock.patch.dict(os.environ, HF_SOMETHING="1"),
    "untouched": lambda: put(sys, "excepthook", lambda *error: None),  # but for what is there for others
}

def try_all(names):
    for name in names:
        with CASES[name]():
            try:
                engine = chunkc.compile(folder, num_pages=32)
                yield name, engine.explain()
            except TookTheModel:
                yield name, "the model"

found = dict(try_all([name for name in CASES if name != "untouched"]))
import torch._dynamo, torch._inductor.compile_fx  # torch wraps functions of its own then, and nothing else changes
found.update(try_all(["untouched"]))
print(json.dumps(found))
"""


def run(cache: Path, script: str, *arguments: str, warnings: str = "error") -> Any:
    """What a process of its own prints last, as JSON. It may not warn that something is broken, unless told so."""
    environment = {**os.environ, "CHUNKC_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", f"{warnings}::RuntimeWarning", "-c", script, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def is_from_the_folder(said: str) -> bool:
    return said.startswith("prepared from what an earlier start kept of the folder in ")


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> tuple[Path, Path, dict[str, Any]]:
    """Folder of a tiny llama, the cache after a first start in a process of its own, and what that printed."""
    place = tmp_path_factory.mktemp("started")
    folder, cache = place / "model", place / "cache"
    build("llama", seed=1).save_pretrained(folder)
    save_tokenizer(folder)
    cache.mkdir()
    for library in native.cache_dir().glob("*-*"):
        if not library.name.startswith(("graph-", "model-", "start-")):
            (cache / library.name).symlink_to(library)
    time.sleep(3.1)  # what is younger is not kept
    return folder, cache, run(cache, _SERVE, str(folder))


@pytest.fixture
def without_start(started, tmp_path) -> Path:
    """A cache that has all but the folder's start."""
    return Path(
        shutil.copytree(started[1], tmp_path / "cache", ignore=shutil.ignore_patterns("start-*"), symlinks=True)
    )


def test_a_second_start_imports_neither_model_nor_passes(started):
    folder, cache, first = started
    assert not is_from_the_folder(first["said"])
    second = run(cache, _SERVE, str(folder))
    assert is_from_the_folder(second["said"])
    assert "checked against the model's logits, kept by an earlier start, in " in second["said"]
    assert (second["tokens"], second["imported"]) == (first["tokens"], [])


@pytest.fixture(scope="module")
def tried(started, tmp_path_factory) -> dict[str, str]:
    """What each of the cases was served from."""
    beside = tmp_path_factory.mktemp("beside")
    (beside / "packages" / "tokenizers").mkdir(parents=True)
    (beside / "packages" / "tokenizers" / "__init__.py").write_text("")
    (beside / "site-packages").mkdir()
    return run(started[1], _CASES, str(started[0]), str(beside))


def test_nothing_but_an_untouched_process_starts_from_the_folder(tried):
    assert [name for name, said in tried.items() if said != "the model"] == ["untouched"]
    assert is_from_the_folder(tried["untouched"])
    assert len(tried) > 50


def test_a_process_with_patched_functions_keeps_no_start(started, without_start):
    served = run(without_start, _PATCH + _SERVE, str(started[0]))
    assert served["tokens"] == started[2]["tokens"]
    assert not list(without_start.glob("start-*"))


@pytest.mark.slow
def test_a_process_that_imported_transformers_keeps_no_start(started, without_start):
    run(without_start, "import transformers\n" + _SERVE, str(started[0]))
    assert not list(without_start.glob("start-*"))
    run(without_start, _SERVE, str(started[0]))
    assert list(without_start.glob("start-*"))


@pytest.mark.slow
def test_a_live_patch_is_served_and_gone_with_its_process(started, tmp_path):
    """The prepared model is renewed, with a warning: its key tells torch's functions by their version."""
    folder, kept, first = started
    cache = Path(shutil.copytree(kept, tmp_path / "cache", symlinks=True))
    patched = _LIVE_PATCH.format(serve=_SERVE)
    expected = run(cache, patched, str(folder), warnings="ignore")
    assert expected != first["tokens"]
    served = run(cache, patched.partition("import transformers")[0], str(folder))
    assert served["tokens"] == expected  # perhaps from the folder, as a process with the same patch served it
    assert run(cache, _SERVE, str(folder), warnings="ignore")["tokens"] == first["tokens"]


@pytest.mark.slow
def test_two_processes_at_once(started, without_start):
    folder, _, first = started
    environment = {**os.environ, "CHUNKC_CACHE_DIR": str(without_start), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", _SERVE, str(folder)]
    for _ in range(2):
        processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        printed = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert [json.loads(lines)["tokens"] for lines in printed] == [first["tokens"]] * 2
    assert all(is_from_the_folder(json.loads(lines)["said"]) for lines in printed)
    assert len(list(without_start.glob("start-*"))) == 1
