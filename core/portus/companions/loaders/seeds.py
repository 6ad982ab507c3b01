"""``SeededDataset``: a sample's random draws depend on the sample, not on its worker or the time.

**Theory.** Augmentations from the generators of a worker depend on the samples that it loaded
before, and a resumed run has other workers that loaded other samples. So here the generators
restart for each sample, at a seed made from the run's seed, the epoch and the sample's number, and
are restored after it. Any worker of any rank then draws the same for it, also in a run that
continues in the middle of an epoch, or with other numbers of ranks or workers.

The epoch is in memory shared with workers: persistent ones see it change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset

from portus.companions.loaders.randomness import SEED_BYTES, seed_inside
from portus.errors import UsageError

T = TypeVar("T", covariant=True)

_LAYERS_MAX: Final = 8
"""The most datasets inside of datasets that are searched."""


class SeededDataset(Dataset[T]):
    """A map-style dataset whose random numbers depend on (seed, epoch, index) alone.

    Before each sample it seeds Python's ``random``, numpy's legacy functions, and torch on the CPU.
    It does not seed generators that the dataset has itself, nor what ``collate_fn`` draws. Samples
    are loaded one by one, even if the dataset has ``__getitems__``. Other attributes are those of
    the dataset.

    Args:
        dataset: Has ``__getitem__``, and usually ``__len__``.
        seed: The seed of the run: the same after a restart, and on all ranks.

    It does not work with loaders that use several threads of one process, which share these
    generators. Raises ``UsageError`` for an ``IterableDataset``, and for a seed that is not a whole
    number.
    """

    def __init__(self, dataset: Dataset[T], seed: int) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise UsageError(
                "dataset: expected one with samples that have numbers, found "
                f"{type(dataset).__name__}: an IterableDataset must keep its random numbers in "
                "its own state_dict"
            )
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise UsageError(f"seed: expected a whole number, found {seed!r}")
        self.dataset: Final = dataset
        self.seed: Final = seed
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()

    @property
    def epoch(self) -> int:
        """Return the epoch that the random numbers depend on; 0 until ``set_epoch`` is called."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that begins, before the loader's iterator is made. Under Lightning and
        Accelerate, Portus calls it. In a loop of your own, call it as for a
        ``DistributedSampler``."""
        self._epoch.fill_(epoch)

    @staticmethod
    def why_not_told(dataset: object) -> str:
        """Return why the adapters do not set the epoch of a ``SeededDataset`` inside of
        ``dataset``, such as a ``Subset`` or a ``ConcatDataset``, which others may share; "" if
        there is none."""
        if isinstance(dataset, SeededDataset) or not any(map(_has_seeded, _parts_of(dataset))):
            return ""
        return (
            f"a SeededDataset inside of {type(dataset).__name__} gets no epoch, so all epochs "
            f"draw the same numbers: put SeededDataset around {type(dataset).__name__}, or "
            "call its set_epoch(epoch) before each epoch"
        )

    def __getitem__(self, index: Any) -> T:
        number = index.__index__() if hasattr(index, "__index__") else index
        told = f"{self.seed} {self.epoch} {number!r}".encode()
        with seed_inside(blake2b(told, digest_size=SEED_BYTES).digest()):
            return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._epoch.share_memory_()  # a copy has its own memory


def _has_seeded(dataset: object, layer: int = 1) -> bool:
    if isinstance(dataset, SeededDataset) or layer == _LAYERS_MAX:
        return isinstance(dataset, SeededDataset)
    return any(_has_seeded(each, layer + 1) for each in _parts_of(dataset))


def _parts_of(dataset: object) -> list[object]:
    """Return the datasets inside of torch's wrappers; call nothing that might do work."""
    own = getattr(dataset, "__dict__", {})
    many = own.get("datasets")
    parts = many.values() if isinstance(many, dict) else many
    return [*(parts if isinstance(parts, Collection) else ()), own.get("dataset")]
