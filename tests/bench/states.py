"""States to save: of given sizes, of the models of the Portus paper, of a trained network."""

from __future__ import annotations

import torch

# Tensors and MiB of each. Source: Portus (ICDCS'24), the seven models of its Figures 11 and 12.
PAPER_MODELS = {
    "ResNet50": (161, 97),
    "AlexNet": (16, 233),
    "Swin_b": (329, 335),
    "ConvNeXt_base": (344, 338),
    "VGG19_bn": (70, 548),
    "ViT_l_32": (296, 1169),
    "BERT-large": (396, 1282),
}


def tensors(count: int, size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """``count`` float32 tensors of ``size`` bytes together: one in eight is big, as in networks."""
    torch.manual_seed(seed)
    weights = [8.0 if index % 8 == 0 else 1.0 for index in range(count)]
    unit = size / 4 / sum(weights)
    lengths = [max(1, int(weight * unit)) for weight in weights]
    lengths[0] += size // 4 - sum(lengths)
    return {f"layer{index}.weight": torch.randn(length) for index, length in enumerate(lengths)}


def change(state: dict[str, torch.Tensor]) -> None:
    """Change every byte (of the mantissas at least) of every tensor, as an update does."""
    for tensor in state.values():
        tensor.view(torch.int32).add_(0x01010101)


class Trained:
    """A network that takes steps, with the optimizer's state: what a trainer saves."""

    def __init__(self, layers: int, width: int, rows: int = 4) -> None:
        """rows: of a batch."""
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._input = torch.randn(rows, width)
        self.step()
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._input).pow(2).mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def size(self) -> int:
        """Bytes of the state: weights and two moments."""
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters())
