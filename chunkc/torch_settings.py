"""torch's settings in this process: what decides, beside code, what a model computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

import torch

from chunkc.clean_process import NotClean

#: dispatch keys for which torch itself has Python kernels of its operators; none of them serves the CPU
_OTHER_DEVICES = ("Meta", "CUDA", "MPS", "XPU")
#: operators whose kernels are told by where they were registered: what replaces kernels replaces one of these
_OPERATORS = (
    *("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "einsum", "embedding", "index_select", "cat"),
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "pow.Tensor_Scalar", "rsqrt", "tanh", "sigmoid"),
    *("silu", "gelu", "relu", "softmax.int", "_softmax", "mean.dim", "sum.dim_IntList", "cos", "sin", "exp"),
    *("native_layer_norm", "rms_norm", "layer_norm", "scaled_dot_product_attention", "_to_copy", "copy_", "topk"),
)
_KEYS = ("CPU", "Autograd", "Autocast", "Composite", "BackendSelect", "ADInplaceOrView", "Python", "catchall")
_PREFIXES = ("TRANSFORMERS_", "HF_", "USE_", "TORCH_", "PYTORCH_", "ATEN_", "ONEDNN_", "DNNL_", "MKL_")
#: variables that say where things are kept, or how many threads there are (which is looked at by itself)
_OF_NO_ACCOUNT = ("_HOME", "_CACHE", "_CACHE_DIR", "_NUM_THREADS")


def torch_settings(environment: Mapping[str, str] = os.environ) -> str:
    """All settings that may differ, in one text.

    Raises:
        NotClean: hooks, modes or kernels make torch's functions do more than they say, or a default is not torch's.
    """
    modules = torch.nn.modules.module
    for name, hooks in vars(modules).items():
        if name.startswith("_global_") and isinstance(hooks, dict) and hooks:
            raise NotClean("there are hooks on all modules")
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise NotClean("there is a mode that torch's functions go through")
    if not torch._C._is_torch_function_enabled():
        raise NotClean("torch's functions do not go through subclasses")
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled():
        raise NotClean("autocast or inference mode is on")
    if torch.get_default_dtype() is not torch.float32 or torch.get_default_device().type != "cpu":
        raise NotClean(f"tensors are made as {torch.get_default_dtype()} on {torch.get_default_device()}")
    for kernel in torch.library._impls:
        if kernel.startswith("aten/") and kernel.rpartition("/")[2] not in _OTHER_DEVICES:
            raise NotClean(f"{kernel} is a kernel in Python")
    return "\n".join([*_flags(), *_kernels(), *_variables(environment)])


def _flags() -> Iterator[str]:
    yield f"optimize {sys.flags.optimize}"
    yield f"matmul precision {torch.get_float32_matmul_precision()}"
    mkldnn = torch.backends.mkldnn
    for part in ("matmul", "conv", "rnn"):
        yield f"mkldnn {part} {getattr(getattr(mkldnn, part, None), 'fp32_precision', None)}"
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    yield f"deterministic {torch.are_deterministic_algorithms_enabled()} {warned_only} {torch.is_grad_enabled()}"
    for name in ("mkldnn_enabled", "flash_sdp_enabled", "math_sdp_enabled", "mem_efficient_sdp_enabled"):
        yield f"{name} {getattr(torch._C, f'_get_{name}')()}"


def _kernels() -> Iterator[str]:
    for name in _OPERATORS:
        for line in torch._C._dispatch_dump(f"aten::{name}").splitlines():
            if line.startswith(_KEYS):
                yield f"{name} {line}"


def _variables(environment: Mapping[str, str]) -> Iterator[str]:
    for name, text in sorted(environment.items()):
        if name.startswith(_PREFIXES) and not name.endswith(_OF_NO_ACCOUNT):
            yield f"{name}={text}"
