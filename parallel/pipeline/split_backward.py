"""A backward pass in two halves for any module: gradients of the inputs first, of the weights later.

Layers that can wait (TensorParallelLinear) leave their weights' gradients in the Deferral. For what other modules
record, the graph is cut: a product whose one operand leads to an input of the stage and whose other operand leads to
parameters alone is run for the first in the first half, and again, for the second alone, in the second. Every such cut
is an edge of the graph and carries its own gradient, so a weight used twice on one path gets the sum of its two uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from gridtron.core.torch_compat import gradient_shape
from gridtron.parallel.gradient_door import Deferral, Work, accumulate_gradient

_PRODUCTS = ("Addmm", "Mm", "Linear", "Addbmm", "Baddbmm", "Bmm", "Addmv", "Mv", "Convolution")
"""Nodes whose weight half is worth waiting for; the gradients of all others come with the input's."""


def backward_input(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
    deferral: Deferral,
) -> tuple[list[Tensor | None], list[Work]]:
    """The first half: gradients of ``inputs``, and of those parameters that are not worth waiting for.

    Args:
        outputs, gradients: where the pass begins, and what arrives there.
        inputs: leaves that require a gradient.
        parameters: of the module that was run.
        deferral: watches ``parameters``.

    Returns:
        The gradient of each input (None: it has no part in the outputs), and the work of the second half, in order.
    """
    assert not deferral.take(), "the work of an earlier pass was not taken"
    unable = [parameter for parameter in parameters if parameter.ndim > 1 and parameter not in deferral.able]
    graph = _Graph.of(outputs, inputs) if unable else None
    try:
        with deferral.splitting(True):
            if graph is not None and graph.late:
                return _cut(graph, outputs, gradients, inputs, deferral)
            torch.autograd.backward(list(outputs), list(gradients))
    except BaseException:
        deferral.take()
        raise
    found = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    return found, deferral.take()


@dataclass
class _Graph:
    """What is known of each node that a pass from ``roots`` can reach.

    Attributes:
        order: nodes, each after all that it leads to.
        leaves: the parameters that a node leads to.
        leads: nodes that lead to an input.
        late: parameters whose gradients wait for the second half.
    """

    order: list[Node]
    leaves: dict[Node, frozenset[nn.Parameter]]
    leads: set[Node] = field(default_factory=set)
    late: frozenset[nn.Parameter] = frozenset()

    @staticmethod
    def of(roots: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> _Graph:
        order = _postorder([edge.node for edge in roots])
        graph = _Graph(order, {})
        own = set(inputs)
        late: set[nn.Parameter] = set()
        computed: set[Node] = set()
        for node in order:
            leaf = getattr(node, "variable", None)
            children = [child for child, _ in node.next_functions if child is not None]
            if leaf in own or any(child in graph.leads for child in children):
                graph.leads.add(node)
            mine = frozenset({leaf}) if leaf is not None and leaf not in own else frozenset()
            graph.leaves[node] = mine.union(*(graph.leaves[child] for child in children))
            if _is_product(node):
                # Without an input to lead to, what comes out of another product is no weight either.
                weights = [c for c in children if c not in graph.leads and (inputs or c not in computed)]
                late.update(*(graph.leaves[child] for child in weights))
            if _is_product(node) or _defers(node) or any(child in computed for child in children):
                computed.add(node)
        graph.late = frozenset(late)
        return graph

    def settle(self, inputs: Sequence[Tensor]) -> tuple[list[nn.Parameter], set[Node]]:
        """Parameters whose gradients come with the first half, and the nodes that run for them and for ``inputs``.

        A layer that leaves its own weights' gradients in the Deferral must not run twice: where it runs in the first
        half, so does all that its input came from.
        """
        while True:
            early = self._early()
            running = self._running([*inputs, *early])
            forced = [
                child
                for node in self.order
                if node in running and _defers(node)
                for child, _ in node.next_functions
                if child is not None and child not in running and not hasattr(child, "variable")
            ]
            behind = frozenset[nn.Parameter]().union(*(self.leaves[child] for child in forced)) & self.late
            if not behind:
                return early, running
            self.late -= behind

    def _early(self) -> list[nn.Parameter]:
        every = frozenset().union(*(self.leaves[node] for node in self.order)) if self.order else frozenset()
        return [leaf for leaf in every if leaf not in self.late]

    def _running(self, targets: Sequence[Tensor]) -> set[Node]:
        """Nodes that a pass for ``targets`` alone runs."""
        wanted, found = set(targets), set()
        for node in self.order:
            leaf = getattr(node, "variable", None)
            if (leaf is not None and leaf in wanted) or any(child in found for child, _ in node.next_functions):
                found.add(node)
        return found


def _is_product(node: Node) -> bool:
    return node.name().removeprefix("torch::autograd::").startswith(tuple(f"{name}Backward" for name in _PRODUCTS))


def _defers(node: Node) -> bool:
    return getattr(getattr(node, "_forward_cls", None), "defers_weight_gradients", False)


def _postorder(roots: Sequence[Node]) -> list[Node]:
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in seen)
    return order


def _cut(
    graph: _Graph,
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    deferral: Deferral,
) -> tuple[list[Tensor | None], list[Work]]:
    early, running = graph.settle(inputs)
    cuts: dict[Node, list[int]] = {}
    arrived: dict[Node, Sequence[Tensor | None]] = {}
    handles = []
    for node in graph.order:
        if node not in running or (_defers(node) and _watched(node, deferral)):
            continue
        places = [
            place
            for place, (child, _) in enumerate(node.next_functions)
            if child is not None and child not in running and graph.leaves[child] & graph.late
        ]
        if places:
            cuts[node] = places
            handles.append(node.register_prehook(partial(_remember, arrived, node)))
    targets = [*inputs, *early]
    begin = [(edge, gradient) for edge, gradient in zip(outputs, gradients, strict=True) if edge.node in running]
    found: list[Tensor | None] = [None] * len(targets)
    try:
        if begin and targets:
            found = list(
                torch.autograd.grad(
                    [edge for edge, _ in begin],
                    targets,
                    [gradient for _, gradient in begin],
                    retain_graph=True,
                    allow_unused=True,
                )
            )
    finally:
        for handle in handles:
            handle.remove()
    for leaf, gradient in zip(early, found[len(inputs) :], strict=True):
        if gradient is not None:
            accumulate_gradient(leaf, gradient)
    roots = [(edge, grad) for edge, grad in zip(outputs, gradients, strict=True) if edge.node not in running]
    waiting = {node: (places, arrived[node]) for node, places in cuts.items() if node in arrived}
    return found[: len(inputs)], [*deferral.take(), partial(_finish, graph, running, waiting, roots, deferral)]


def _watched(node: Node, deferral: Deferral) -> bool:
    """Whether all parameters that ``node`` itself takes are watched, so that it has left their gradients there."""
    leaves = [getattr(child, "variable", None) for child, _ in node.next_functions if child is not None]
    return all(not isinstance(leaf, nn.Parameter) or getattr(leaf, "deferral", None) is deferral for leaf in leaves)


def _remember(arrived: dict[Node, Sequence[Tensor | None]], node: Node, gradients: Sequence[Tensor | None]) -> None:
    arrived[node] = tuple(gradients)


@torch.no_grad()
def _finish(
    graph: _Graph,
    running: set[Node],
    waiting: dict[Node, tuple[list[int], Sequence[Tensor | None]]],
    roots: list[tuple[GradientEdge, Tensor]],
    deferral: Deferral,
) -> None:
    """The second half: what crosses each cut, summed per edge, and from there to the parameters."""
    crossing: dict[tuple[Node, int], Tensor] = {}

    def add(node: Node, number: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            before = crossing.get((node, number))
            crossing[node, number] = gradient if before is None else before + gradient

    for edge, gradient in roots:
        add(edge.node, edge.output_nr, gradient)
    for node, (places, arrived) in waiting.items():
        values = _across(node, places, arrived, running)
        for place, value in zip(places, values, strict=True):
            child, number = node.next_functions[place]
            assert child is not None
            add(child, number, value)
    waiting.clear()
    leaves = list(graph.late)
    if not crossing:
        return
    begin = [GradientEdge(node, number) for node, number in crossing]
    with deferral.splitting(False):
        found = torch.autograd.grad(begin, leaves, list(crossing.values()), allow_unused=True)
    for work in deferral.take():
        work()
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            accumulate_gradient(leaf, gradient)


def _across(node: Node, places: list[int], arrived: Sequence[Tensor | None], running: set[Node]) -> list[Tensor | None]:
    """The gradients that leave ``node`` at ``places``, from what arrived at it."""
    edges = [GradientEdge(*node.next_functions[place]) for place in places]  # type: ignore[arg-type]
    ran = [child for child, _ in node.next_functions if child is not None and child in running]
    around = set(_postorder(ran)) & {edge.node for edge in edges}
    if around or len({(edge.node, edge.output_nr) for edge in edges}) < len(edges):
        # Another way leads there, over nodes that ran already: a pass to these edges would go that way once more.
        return _called(node, places, edges, arrived)
    seen: dict[Node, Sequence[Tensor | None]] = {}
    begin = [(GradientEdge(node, number), value) for number, value in enumerate(arrived) if value is not None]
    handle = node.register_prehook(partial(_remember, seen, node))
    try:
        found = torch.autograd.grad(
            [edge for edge, _ in begin], edges, [value for _, value in begin], retain_graph=True, allow_unused=True
        )
    finally:
        handle.remove()
    if any(
        a is not None and b is not None and a.data_ptr() != b.data_ptr()
        for a, b in zip(arrived, seen[node], strict=True)
    ):
        # A hook on the tensor changed what arrived once more; its change was in it already.
        return _called(node, places, edges, arrived)
    return list(found)


def _called(
    node: Node, places: list[int], edges: list[GradientEdge], arrived: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The same by calling the node, which computes all of its gradients."""
    call: Callable[..., Any] = node  # type: ignore[assignment]
    with torch.no_grad():
        result = call(*arrived)
    values = result if isinstance(result, tuple) else (result,)
    return [_reduced(values[place], edge) for place, edge in zip(places, edges, strict=True)]


def _reduced(gradient: Tensor | None, edge: GradientEdge) -> Tensor | None:
    """A gradient as autograd hands it on: summed where the forward pass broadcast."""
    shape = gradient_shape(edge.node, edge.output_nr)
    return gradient if gradient is None or shape is None else gradient.sum_to_size(shape)
