# SPDX-License-Identifier: BSD-3-Clause
"""BatchNorms' counters of batches, all of them moved on by one kernel."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .._ops import ops
from ._graph import example, is_counter, only_user


def _is_count(node: Node) -> bool:
    """`counter.add_(1)`, whose counter nothing else in the graph reads."""
    if node.target != "add_" or node.args[1:] != (1,) or node.kwargs or node.users:
        return False
    counter = node.args[0]
    found = counter.op == "placeholder" and only_user(counter) is node
    return found and is_counter(example(counter))


def rewrite(graph: Graph) -> None:
    """Counts of one device, if there are several, become one node."""
    counts: dict[torch.device, list[Node]] = {}
    for node in graph.nodes:
        if _is_count(node):
            counts.setdefault(example(node.args[0]).device, []).append(node)
    for nodes in counts.values():
        if len(nodes) < 2:
            continue
        with graph.inserting_before(nodes[-1]):
            graph.call_function(ops.count_batches_.default, ([n.args[0] for n in nodes],))
        for node in nodes:
            graph.erase_node(node)
