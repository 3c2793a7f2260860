"""The passes that every model goes through, from a captured graph to a ragged, paged one."""

from __future__ import annotations

from chunkc.passes.base import GraphPass
from chunkc.passes.canonicalize import Canonicalize
from chunkc.passes.fuse_gates import FuseGates
from chunkc.passes.fuse_linears import FuseLinears
from chunkc.passes.fuse_norms import FuseNorms
from chunkc.passes.fuse_residuals import FuseResiduals
from chunkc.passes.fuse_rotary import FuseRotary
from chunkc.passes.gather_logits import GatherLogits
from chunkc.passes.pack_linears import PackLinears
from chunkc.passes.page_attention import PageAttention
from chunkc.passes.prove_token_parallel import ProveTokenParallel
from chunkc.passes.ragged_tokens import RaggedTokens
from chunkc.passes.recognize_attention import RecognizeAttention
from chunkc.passes.split_layers import SplitLayers
from chunkc.passes.widen_logits import WidenLogits


def core_passes() -> list[GraphPass]:
    """The core passes with their default options, in the order in which they are explained in the README."""
    return [
        Canonicalize(),
        RecognizeAttention(),
        ProveTokenParallel(),
        RaggedTokens(),
        FuseLinears(),
        PageAttention(),
        FuseRotary(),
        GatherLogits(),
        FuseGates(),
        PackLinears(),
        WidenLogits(),
        FuseNorms(),
        FuseResiduals(),
        SplitLayers(),
    ]
