"""Second-order products of a causal language model that store no graph between products and no full logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.probes.hessian.dual import DualBody
from sharpscope.probes.hessian.head import HeadPoint, HeadProduct, squash
from sharpscope.probes.hessian.operators import Operator
from sharpscope.probes.surface import common_dtype, flatten, size_of, unflatten

if TYPE_CHECKING:
    from sharpscope.probes.hessian.causal_lm import LmSurface


class StreamedHessian(Operator):
    """Hessian or Gauss-Newton products: a forward-mode pass, the output layer in closed form, and one backward pass."""

    def __init__(self, surface: LmSurface, *, checkpoint: bool, gauss_newton: bool) -> None:
        parameters = surface.parameters
        super().__init__(size_of(parameters), common_dtype(parameters), parameters[0].device)
        self._surface, self._gauss_newton = surface, gauss_newton
        self._body = DualBody(surface.backbone, parameters, checkpoint=checkpoint)

    def product(self, vector: Tensor) -> Tensor:
        """H v or G v for v (P,).

        Raises:
            UserError: an operation of the model has no forward-mode derivative, or one without a backward pass.
        """
        surface = self._surface
        like = surface.parameters
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        direction = {id(p): part for p, part in zip(like, unflatten(vector, like), strict=True)}
        parts = unflatten(total, like)
        for index in surface.microbatches:
            ids, scored, target = surface.inputs(index)
            back = _HeadBack(
                surface,
                index,
                scored,
                target,
                direction,
                dict(zip(map(id, like), parts, strict=True)),
                self._gauss_newton,
            )
            try:
                self._body.product(ids, direction, back.out, back)
            except RuntimeError as problem:
                # PyTorch has no exception type for values overwritten in place (the router of DBRX).
                unknown = isinstance(problem, NotImplementedError)
                if not (unknown or "inplace operation" in str(problem)):
                    raise
                missing = "forward-mode derivative" if unknown else "backward pass through the forward-mode derivative"
                reason = str(problem).partition(":")[0].partition(". ")[0]
                raise UserError(
                    f"model, {type(surface.model).__name__}: no {missing} ({reason}); use mode='graph' with more memory "
                    "(graph_mb), or another attention implementation"
                ) from problem
        # The parts are views of `total` if dtype and device agree, else copies.
        return total if parts[0].data_ptr() == total.data_ptr() and _uniform(like) else flatten(parts, like)


class _HeadBack:
    """Maps h and ḣ to their cotangents, through the output layer and the objective."""

    def __init__(
        self,
        surface: LmSurface,
        index: Tensor,
        scored: Tensor,
        target: Tensor,
        direction: dict[int, Tensor],
        out: dict[int, Tensor],
        gauss_newton: bool,
    ) -> None:
        self.surface, self.index, self.scored, self.target = surface, index, scored, target
        self.direction, self.out, self.gauss_newton = direction, out, gauss_newton

    def __call__(self, hidden: Tensor, hidden_dot: Tensor) -> tuple[Tensor, Tensor | None]:
        surface, head = self.surface, self.surface.head
        point = HeadPoint(
            hidden[:, :-1][self.scored],
            hidden_dot[:, :-1][self.scored],
            head.weight.detach(),
            self._of(self.direction, head.weight),
            None if head.bias is None else head.bias.detach(),
            self._of(self.direction, head.bias),
            self.target,
            squash(head, surface.objective.temperature),
        )
        with torch.no_grad():
            product = HeadProduct(point, surface.head_mb)
            logp, logp_dot = product.tangent()
        first, second = self._objective(logp.double(), logp_dot.double())
        with torch.no_grad():
            back, back_dot = product.cotangents(
                first.to(logp.dtype),
                second.to(logp.dtype),
                self._of(self.out, head.weight),
                self._of(self.out, head.bias),
                gauss_newton=self.gauss_newton,
            )
        return self._spread(hidden, back), None if back_dot is None else self._spread(hidden, back_dot)

    def _objective(self, logp: Tensor, logp_dot: Tensor) -> tuple[Tensor, Tensor]:
        """C = ∂φ/∂ℓ (M,) and its derivative along ℓ̇ (M,); the objective couples the tokens of a row."""
        given = logp.requires_grad_()
        spread = scatter(given, self.scored)
        share = self.surface.objective.share(self.index, spread, width=spread.shape[1])
        (first,) = torch.autograd.grad(share, given, create_graph=True)
        if not first.requires_grad:  # linear in ℓ, such as nll
            return first.detach(), torch.zeros_like(logp_dot)
        (second,) = torch.autograd.grad(first, given, logp_dot, allow_unused=True)
        return first.detach(), torch.zeros_like(logp_dot) if second is None else second

    def _spread(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """`rows` (M, d) placed at the positions that predict a scored token, (n, width, d)."""
        full = torch.zeros_like(hidden)
        full[:, :-1][self.scored] = rows
        return full

    @staticmethod
    def _of(table: dict[int, Tensor], tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else table.get(id(tensor))


def scatter(values: Tensor, scored: Tensor) -> Tensor:
    """`values` (M,) placed at the scored tokens, (n, width); `place` (n, width − 1) is shifted by one."""
    grid = torch.zeros(scored.shape, dtype=values.dtype, device=values.device).masked_scatter(scored, values)
    return torch.nn.functional.pad(grid, (1, 0))


def _uniform(tensors: Sequence[Tensor]) -> bool:
    return len({(t.dtype, t.device) for t in tensors}) == 1
