"""``RowwiseAdagrad``: Adagrad with one number of state for each row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class RowwiseAdagrad(Optimizer):
    """Row-wise Adagrad, as in fbgemm's embedding tables (``EXACT_ROWWISE_ADAGRAD``, without weight
    decay). For each row with a gradient g:

        s <- s + mean(g ** 2)
        row <- row - lr * g / (sqrt(s) + eps)

    Gradients must be sparse. The sum s has shape (rows,) and dtype float32, on the weight's device.
    """

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float = 1e-2, *, eps: float = 1e-8
    ) -> None:
        if not lr >= 0 or not eps >= 0:
            raise ValueError(
                f"RowwiseAdagrad: expected lr and eps of at least 0, found {lr} and {eps}"
            )
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.zeros(
                    weight.shape[0], dtype=torch.float32, device=weight.device
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters once. Raises ``RuntimeError`` for a dense gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not weight.grad.is_sparse:
                    raise RuntimeError(
                        "RowwiseAdagrad: expected a sparse gradient, found a dense one"
                    )
                gradient = weight.grad.coalesce()
                number, values = gradient.indices()[0], gradient.values()
                total = self.state[weight]["sum"]
                total.index_add_(0, number, values.float().pow(2).flatten(1).mean(1))
                scale = group["lr"] / (total[number].sqrt() + group["eps"])
                shape = (-1, *([1] * (values.ndim - 1)))
                weight.index_add_(0, number, -(values * scale.reshape(shape)).to(weight.dtype))
        return loss
