"""Runs passes in order and keeps them honest.

Between any two passes the graph is linted, shapes are propagated anew, and every fact claimed so far is checked.
Dumps, snapshots and the bisect are callbacks between passes; no pass knows of them.
"""

from __future__ import annotations

import copy
import difflib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import fx

from chunkc.errors import ChunkcError, PassError
from chunkc.passes.base import GraphPass, PassContext
from chunkc.passes.facts import check_fact, has_checker
from chunkc.passes.order import order_passes
from chunkc.passes.propagate import propagate
from chunkc.passes.reports import PassRecord, PassReport

#: called as ``callback(name, graph_module)`` for the captured graph (name "captured") and after every pass
Callback = Callable[[str, fx.GraphModule], None]


class PassPipeline:
    """An ordered set of passes.

    Args:
        passes: in any order; what they require and ensure decides.

    Raises:
        PassError: see ``order_passes``; also a pass that ensures a fact without a checker.
    """

    def __init__(self, passes: Sequence[GraphPass]) -> None:
        self.passes = order_passes(passes)
        for graph_pass in self.passes:
            for fact in graph_pass.ensures:
                if not has_checker(fact):
                    raise PassError(f"ensures {fact!r}, which has no checker", pass_name=graph_pass.name)

    def run(
        self,
        graph_module: fx.GraphModule,
        context: PassContext,
        *,
        stop_after: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> list[PassRecord]:
        """Run all passes on ``graph_module`` in place.

        Args:
            stop_after: name of the last pass to run, or None for all.
            callbacks: called between passes.

        Raises:
            UnsupportedModelError: a pass does not understand the graph.
            PassError: a pass left a broken graph or a fact that does not hold, or matched nothing where matches
                were expected, or ``stop_after`` names no pass.
        """
        names = [graph_pass.name for graph_pass in self.passes]
        if stop_after is not None and stop_after not in names:
            raise PassError(f"stop_after={stop_after!r} names no pass; there are: {', '.join(names)}")
        records: list[PassRecord] = []
        _notify(callbacks, "captured", graph_module)
        for graph_pass in self.passes:
            records.append(self._run_one(graph_pass, graph_module, context))
            _notify(callbacks, graph_pass.name, graph_module)
            if graph_pass.name == stop_after:
                break
        graph_module.recompile()
        return records

    def _run_one(self, graph_pass: GraphPass, graph_module: fx.GraphModule, context: PassContext) -> PassRecord:
        missing = [fact for fact in graph_pass.requires if fact not in context.facts]
        if missing:
            raise PassError(f"required facts do not hold: {', '.join(missing)}", pass_name=graph_pass.name)
        before = len(graph_module.graph.nodes)
        start = time.perf_counter()
        try:
            report = graph_pass.run(graph_module, context)
        except ChunkcError:
            raise
        except Exception as error:
            raise PassError(f"failed ({type(error).__name__}: {error})", pass_name=graph_pass.name) from error
        if not isinstance(report, PassReport):
            raise PassError(f"returned {report!r} instead of a PassReport", pass_name=graph_pass.name)
        middle = time.perf_counter()
        if report.matches == 0 and graph_pass.expects_matches:
            reasons = "; ".join(f"{s.what}: {s.why}" for s in report.skipped) or "no candidate was seen"
            raise PassError(f"found nothing to do where something was expected ({reasons})", pass_name=graph_pass.name)
        context.facts.update(graph_pass.ensures)
        self._verify(graph_pass, graph_module, context)
        return PassRecord(
            graph_pass.name,
            report,
            before,
            len(graph_module.graph.nodes),
            middle - start,
            time.perf_counter() - middle,
        )

    def _verify(self, graph_pass: GraphPass, graph_module: fx.GraphModule, context: PassContext) -> None:
        try:
            graph_module.graph.lint()
            propagate(graph_module)
        except Exception as error:
            raise PassError(f"left a graph that does not run: {error}", pass_name=graph_pass.name) from error
        for fact in sorted(context.facts):
            try:
                check_fact(fact, graph_module, context)
            except ChunkcError as error:
                raise PassError(
                    f"after it, the fact {fact!r} does not hold: {error}", pass_name=graph_pass.name
                ) from error


def _notify(callbacks: Sequence[Callback], name: str, graph_module: fx.GraphModule) -> None:
    if callbacks:
        graph_module.recompile()
    for callback in callbacks:
        callback(name, graph_module)


class Snapshots:
    """Callback that keeps a runnable copy of the graph after every pass; parameters are shared, not copied.

    Attributes:
        graphs: name of the stage ("captured", then each pass) -> GraphModule.
    """

    def __init__(self) -> None:
        self.graphs: dict[str, fx.GraphModule] = {}

    def __call__(self, name: str, graph_module: fx.GraphModule) -> None:
        self.graphs[name] = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))


class DumpGraphs:
    """Callback that writes the graph after every pass, and what the pass changed, into a folder.

    Writes ``00_captured.py``, ``01_canonicalize.py``, ``01_canonicalize.diff`` and so on.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._count = 0
        self._previous: list[str] = []

    def __call__(self, name: str, graph_module: fx.GraphModule) -> None:
        text = graph_module.print_readable(print_output=False)
        stem = f"{self._count:02d}_{name}"
        (self.folder / f"{stem}.py").write_text(text)
        lines = text.splitlines(keepends=True)
        if self._count:
            diff = difflib.unified_diff(self._previous, lines, "before", f"after {name}", n=2)
            (self.folder / f"{stem}.diff").write_text("".join(diff))
        self._previous = lines
        self._count += 1
