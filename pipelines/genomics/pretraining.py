"""Pretraining of a DNA language model, in this process or on Ray: counts an order a task, and each step's windows over workers.

Both ways draw the same windows and add up the same gradients, so they make the same model up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from connectors.errors import UserError
from connectors.sequences import read
from titans_core.config import ConfigError
from titans_core.dna_model import Codes, ContextCounts, DnaModel, DnaModelConfig, Training, train, window_gradients
from titans_core.tokenizers import encode_bases

Progress = Callable[[int, int, float], None]


def read_contigs(sources: Sequence[str]) -> list[Codes]:
    """Every record of some sequence files, encoded."""
    contigs = [encode_bases(record.sequence) for source in sources for record in read(source) if record.sequence]
    if not contigs:
        raise UserError(f"{', '.join(sources)}: no base to learn from")
    return contigs


def pretrain(
    contigs: Sequence[Codes],
    config: DnaModelConfig,
    training: Training,
    *,
    executor: Literal["local", "ray"] = "local",
    workers: int = 2,
    progress: Progress | None = None,
) -> tuple[DnaModel, ContextCounts, list[float]]:
    """A language model of these contigs, its counts, and the bits per base of every step."""
    torch.manual_seed(training.seed)
    model = DnaModel(config)
    try:
        if executor == "local":
            counts = ContextCounts.of(contigs, config.orders)
            return model, counts, train(model, counts, contigs, training, progress=progress)
        return _on_ray(model, contigs, training, workers, progress)
    except ConfigError as error:
        raise UserError(str(error)) from None


def _on_ray(
    model: DnaModel, contigs: Sequence[Codes], training: Training, workers: int, progress: Progress | None
) -> tuple[DnaModel, ContextCounts, list[float]]:
    from pipelines.windows import ray_cluster

    ray_cluster()
    import ray

    orders = model.config.orders
    shared: Any = ray.put(list(contigs))
    count = ray.remote(num_cpus=1)(_count)
    parts = ray.get([count.remote(shared, k) for k in orders])
    direct = {k: table for part in parts for k, table in part.direct.items()}
    sparse = {k: table for part in parts for k, table in part.sparse.items()}
    counts = ContextCounts(orders, direct, sparse)
    worker: Any = ray.remote(num_cpus=1)(_Worker)
    held = ray.put(counts)
    actors = [worker.remote(model.config, shared, held, training.window) for _ in range(workers)]

    def gradients(now: DnaModel, places: list[tuple[int, int]]) -> tuple[float, int, list[torch.Tensor]]:
        weights = ray.put([p.detach().numpy() for p in now.parameters()])
        shares = [places[i::workers] for i in range(workers)]
        found = ray.get([actor.gradients.remote(weights, share) for actor, share in zip(actors, shares, strict=True) if share])
        sums = [torch.from_numpy(np.sum(each, axis=0)) for each in zip(*(part[2] for part in found), strict=True)]
        return sum(part[0] for part in found), sum(part[1] for part in found), sums

    try:
        return model, counts, train(model, counts, contigs, training, gradients=gradients, progress=progress)
    finally:
        for actor in actors:
            ray.kill(actor)


def _count(contigs: Sequence[Codes], order: int) -> ContextCounts:
    return ContextCounts.of(contigs, (order,))


class _Worker:
    """A process that computes the gradients of its share of each step's windows."""

    def __init__(self, config: DnaModelConfig, contigs: Sequence[Codes], counts: ContextCounts, window: int) -> None:
        torch.set_num_threads(1)
        self._model, self._contigs, self._counts, self._window = DnaModel(config).train(), contigs, counts, window

    def gradients(self, weights: Sequence[NDArray[Any]], places: list[tuple[int, int]]) -> tuple[float, int, list[NDArray[Any]]]:
        with torch.no_grad():
            for parameter, value in zip(self._model.parameters(), weights, strict=True):
                parameter.copy_(torch.from_numpy(value.copy()))
        loss, known, found = window_gradients(self._model, self._counts, self._contigs, places, self._window)
        return loss, known, [each.numpy() for each in found]
