"""What a pass is: a frozen dataclass that says what it needs, what it makes true, and rewrites the graph.

    @dataclass(frozen=True)
    class DropDropout(GraphPass):
        name = "drop_dropout"
        requires = ("canonical",)

        def run(self, graph_module, context):
            ...
            return PassReport(matches=3)

A pass changes ``graph_module.graph`` in place and does not recompile, lint or time itself: the pipeline does that
for every pass, and checks afterwards that every fact claimed so far still holds.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from chunkc.passes.reports import PassReport, Skipped

__all__ = ["GraphPass", "PassContext", "PassReport", "Skipped"]


@dataclass
class PassContext:
    """What the passes of one compilation share.

    Attributes:
        config: the model's configuration object, or None for a module without one. Read only.
        route: how the model was captured, one of ``chunkc.capture.ROUTES``, or None where that is not known.
        max_positions: longest sequence the model is defined for, in tokens, or None where it does not say.
        proven_length: longest sequence up to which the graph is the model and the meaning of every mask is proven, or
            None for no limit.
        attention_layers: one entry per attention call, in graph order; page_attention fills it.
        resources: objects that must live as long as the graph may run (packed weights behind handles).
        made: how tensors that passes made come from the model's own, by name (``passes.made_tensors``).
        deferred: whether tensors are made later: the graph then holds fake ones in their place.
        ingredients: where deferred, the tensors that will be needed to make them, by name.
        facts: the facts that hold now; kept by the pipeline.
        options: free space for passes of users.
    """

    config: Any = None
    route: str | None = None
    max_positions: int | None = None
    proven_length: int | None = None
    attention_layers: list[Any] = field(default_factory=list)
    resources: list[Any] = field(default_factory=list)
    made: dict[str, Any] = field(default_factory=dict)
    deferred: bool = False
    ingredients: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: set[str] = field(default_factory=set)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphPass(abc.ABC):
    """One graph-to-graph rewrite (or proof).

    Class attributes:
        name: what ``explain()``, ``stop_after`` and error messages call it.
        requires: facts that must hold before it runs.
        ensures: facts that hold after it ran; each needs a checker (``passes.facts.register_fact``).
        before: names of passes that must run later than this one, where no fact says so.
        expects_matches: whether zero matches is an error (a pass that is reported as on and never matches).
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()
    before: ClassVar[tuple[str, ...]] = ()
    expects_matches: ClassVar[bool] = False

    @abc.abstractmethod
    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Rewrite ``graph_module.graph`` in place.

        Raises:
            UnsupportedModelError: the graph holds something that the pass does not understand.
        """
