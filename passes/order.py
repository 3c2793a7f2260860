"""The order of passes, from what they require and ensure."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from chunkc.errors import PassError
from chunkc.passes.base import GraphPass


def order_passes(passes: Sequence[GraphPass]) -> tuple[GraphPass, ...]:
    """Sort passes so that each comes after those that ensure what it requires.

    Passes that nothing puts in order keep the order they were given in.

    Raises:
        PassError: two passes of one name, a fact that nothing ensures, an unknown name in ``before``, or a cycle
            (named).
    """
    by_name: dict[str, GraphPass] = {}
    for graph_pass in passes:
        if graph_pass.name in by_name:
            raise PassError("there are two passes of this name", pass_name=graph_pass.name)
        by_name[graph_pass.name] = graph_pass

    graph = nx.DiGraph()
    graph.add_nodes_from(by_name)
    for graph_pass in passes:
        for fact in graph_pass.requires:
            providers = [other.name for other in passes if fact in other.ensures]
            if not providers:
                raise PassError(f"requires the fact {fact!r}, which no pass ensures", pass_name=graph_pass.name)
            graph.add_edges_from((provider, graph_pass.name) for provider in providers)
        for later in graph_pass.before:
            if later not in by_name:
                raise PassError(f"is to run before {later!r}, which is not there", pass_name=graph_pass.name)
            graph.add_edge(graph_pass.name, later)

    position = {name: index for index, name in enumerate(by_name)}
    try:
        names = list(nx.lexicographical_topological_sort(graph, key=position.__getitem__))
    except nx.NetworkXUnfeasible:
        cycle = [edge[0] for edge in nx.find_cycle(graph)]
        raise PassError("passes wait for each other: " + " -> ".join([*cycle, cycle[0]])) from None
    return tuple(by_name[name] for name in names)
