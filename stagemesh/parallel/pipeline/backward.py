"""A backward in two halves: first the gradient of the inputs, later those of the weights.

    loss <- N3 <- N2 <- N1 <- x          the first half walks this line, to x only, and notes what
            |     |     |                arrives at each node that also leads to weights;
            w3    w2    w1               the second goes from each such node down, to its weights

A node gives only those of its gradients that are asked for, so the halves together do the work of
one backward: no product is computed twice, and nothing of the forward again. A weight that is
used at several places of the line cannot be told apart that way; it gets its gradient by a walk of
its own from the outputs, which is right, but repeats the line.

A hook that was put on an activation runs in both halves. Source of the split: Qi et al. 2023,
"Zero Bubble Pipeline Parallelism".
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """Where a line to the inputs has weights beside it."""

    node: Node
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    """Of the node's outputs; filled by the first half."""


class WeightHalf:
    """What is left of a backward after its first half."""

    def __init__(
        self,
        branches: Sequence[_Branch],
        *,
        shared: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        self._branches = branches
        self._shared = shared
        self._outputs = outputs
        self._gradients = gradients

    def run(self) -> None:
        """Add the weights' gradients to them. Once; it frees the graph."""
        if self._shared:
            torch.autograd.backward(
                self._outputs, self._gradients, inputs=self._shared, retain_graph=True
            )
        for branch in self._branches:
            there = [(i, g) for i, g in enumerate(branch.gradients) if g is not None]
            if there and branch.parameters:
                torch.autograd.backward(
                    [GradientEdge(branch.node, index) for index, _ in there],
                    [gradient for _, gradient in there],
                    inputs=branch.parameters,
                )
        self._branches = self._outputs = self._gradients = ()


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    *,
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> tuple[Gradients, WeightHalf]:
    """The first half.

    Args:
        outputs: of a forward; each requires a gradient.
        gradients: theirs.
        inputs: leaves of that forward; each requires a gradient. At least one.

    Returns:
        The inputs' gradients, None where an output does not depend on an input; and the second
        half.
    """
    graph = _Graph([output.grad_fn for output in outputs if output.grad_fn is not None])
    on_line = graph.leading_to({get_gradient_edge(tensor).node for tensor in inputs})
    branches = _branches(graph, on_line, outputs=outputs, gradients=gradients)
    uses = Counter(id(p) for branch in branches for p in branch.parameters)
    shared = {id(p): p for b in branches for p in b.parameters if uses[id(p)] > 1}
    for branch in branches:
        branch.parameters[:] = [p for p in branch.parameters if id(p) not in shared]
    with contextlib.ExitStack() as stack:
        for branch in branches:
            if branch.node in on_line:
                hook = branch.node.register_prehook(partial(_note, branch.gradients))
                stack.callback(hook.remove)
        found = torch.autograd.grad(
            outputs, inputs, gradients, retain_graph=True, allow_unused=True
        )
    half = WeightHalf(branches, shared=list(shared.values()), outputs=outputs, gradients=gradients)
    return found, half


def _note(into: list[torch.Tensor | None], arrived: Sequence[torch.Tensor | None]) -> None:
    into[:] = arrived


def _branches(
    graph: "_Graph",
    on_line: set[Node],
    *,
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> list[_Branch]:
    branches = []
    for node in graph.nodes:
        if node in on_line:
            beside = [child for child in graph.children[node] if child not in on_line]
            if beside:
                parameters = graph.leaves_below(beside)
                branches.append(_Branch(node=node, parameters=parameters, gradients=[]))
    for output, gradient in zip(outputs, gradients, strict=True):
        # An output that does not depend on the inputs: all of it is left to the second half.
        edge = get_gradient_edge(output)
        if edge.node not in on_line:
            at: list[torch.Tensor | None] = [None] * edge.output_nr
            branches.append(
                _Branch(
                    node=edge.node,
                    parameters=graph.leaves_below([edge.node]),
                    gradients=[*at, gradient],
                )
            )
    return branches


class _Graph:
    """The nodes of a backward, each after all that it leads to."""

    def __init__(self, roots: Sequence[Node]) -> None:
        self.children: dict[Node, list[Node]] = {}
        self.nodes: list[Node] = []
        stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                self.nodes.append(node)
            elif node not in self.children:
                children = [child for child, _ in node.next_functions if child is not None]
                self.children[node] = children
                stack.append((node, True))
                stack += [(child, False) for child in children]

    def leading_to(self, targets: set[Node]) -> set[Node]:
        """The nodes from which a way leads to a target, and the targets."""
        found = set(targets)
        for node in self.nodes:
            if any(child in found for child in self.children[node]):
                found.add(node)
        return found

    def leaves_below(self, nodes: Sequence[Node]) -> list[torch.Tensor]:
        """The tensors that gather gradients below some nodes, each once."""
        seen: set[Node] = set()
        leaves: list[torch.Tensor] = []
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            variable: Any = getattr(node, "variable", None)
            if variable is not None:
                leaves.append(variable)
            stack += self.children[node]
        return leaves
