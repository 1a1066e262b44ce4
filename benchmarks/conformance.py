"""The public memory layers through our own conformance suite: who is causal, who survives a ragged split, who keeps streams apart.

    python benchmarks/conformance.py            # needs the benchmark extra (make bench)

Every layer is built as its authors build it by default (width 32, chunk 16), with random weights, and asked in float64 where it can run
there, else float32. Each property is a number; a layer passes when the number is within the tolerance:

    causal      the largest change of outputs 0..j-1 when token j changes, j inside a chunk and on its border (0 is causal)
    ragged      one call over 64 tokens beside calls of 7, 1, 24, 19, 13 tokens with the state carried: relative difference, or the error
    aligned     the same with calls of one chunk each
    apart       a row of a batch beside the row alone
    inference   under `torch.inference_mode()` and `eval()` beside training mode
    learns      the same token early and late in a stream gets different answers: the memory is alive (here larger is better, > 1e-6)
    finite      16,384 tokens of a near-constant stream: every output finite

The reading of the results is `docs/conformance.md`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import report

WIDTH, CHUNK, TOKENS = 32, 16, 64
RAGGED, ALIGNED = (7, 1, 24, 19, 13), (16, 16, 16, 16)
PEERS = ("titans_pytorch", "titans_pytorch_default", "python_titans_miras", "titans_unofficial")
OURS = ("tethys exact", "tethys stale", "tethys deep", "tethys omega")
Run = Callable[[Any, Any], tuple[Any, Any]]


def main() -> None:
    parser = report.arguments("The public memory layers through our conformance suite.")
    options = parser.parse_args()
    report.limit_threads(options.threads)

    import torch

    torch.set_flush_denormal(True)
    figures: dict[str, dict[str, float | str]] = {}
    for name in (*OURS, *PEERS):
        torch.manual_seed(options.seed)
        figures[name.replace(" ", "_")] = examine(name)
        report.progress(f"{name:24} " + "  ".join(f"{k} {_short(v)}" for k, v in figures[name.replace(" ", "_")].items()))
    # The line holds numbers only: -1 stands for a call that raised; the error is on standard error.
    numbers = {name: {k: v if isinstance(v, float) else -1.0 for k, v in row.items()} for name, row in figures.items()}
    report.finish("conformance", numbers, libraries=("torch", "titans-pytorch", "python-titans-miras", "titans-unofficial"))


def _short(value: float | str) -> str:
    return f"{value:.1e}" if isinstance(value, float) else value


def build(name: str) -> tuple[Any, Run]:
    """A module and a function (x, state or None) -> (y, state)."""
    import torch

    if name.startswith("tethys"):
        from titans_core.config import MemoryConfig
        from titans_core.memory import NeuralMemory

        rule = name.split()[1]
        form: dict[str, Any] = {"rule": "stale", "window": 4} if rule == "omega" else {"rule": rule}
        module: Any = NeuralMemory(MemoryConfig(dim=WIDTH, chunk=CHUNK, **form))
        with torch.no_grad():  # away from its symmetric start, as the peers are
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return module, lambda x, state: module(x, module.initial_state(x.shape[0]) if state is None else state)
    from benchmarks.memory import peer

    module = peer(name, WIDTH, CHUNK)
    if name == "titans_unofficial":
        return module, lambda x, state: module(x, state)
    return module, lambda x, state: module(x, state=state)


def examine(name: str) -> dict[str, float | str]:
    """All properties of one layer; a text instead of a number is the error it raised."""
    import torch

    module, run = build(name)
    try:
        module.double()
        x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
        run(x, None)
    except Exception:  # a layer that holds float32 constants
        module.float()
        x = torch.randn(2, TOKENS, WIDTH)

    def whole(tokens: Any) -> Any:
        return run(tokens, None)[0].detach()

    def causal() -> float:
        worst = 0.0
        for j in (5, 16, 17, 32, 63):
            changed = x.clone()
            changed[:, j] += 1.0
            worst = max(worst, float((whole(x)[:, :j] - whole(changed)[:, :j]).abs().max()))
        return worst

    def pieces(sizes: Sequence[int]) -> float:
        state, out = None, []
        for part in x.split(list(sizes), dim=1):
            y, state = run(part, state)
            out.append(y.detach())
        return _relative(torch.cat(out, 1), whole(x))

    def apart() -> float:
        return _relative(whole(x)[1:], whole(x[1:]))

    def inference() -> float:
        trained = whole(x)
        module.eval()
        with torch.inference_mode():
            served = run(x, None)[0].clone()
        module.train()
        return _relative(served, trained)

    def learns() -> float:
        token = x[:, :1]
        stream = torch.cat((token, x[:, 1:40], token, x[:, 40:]), 1)[:, :TOKENS]
        return float((whole(stream)[:, 40] - whole(stream)[:, 0]).abs().max())

    def finite() -> float:
        module.float()
        near = 1.0 + 1e-3 * torch.randn(1, 16_384, WIDTH)
        state, good = None, True
        with torch.no_grad():
            for part in near.split(1024, 1):
                y, state = run(part, state)
                good = good and bool(torch.isfinite(y).all())
        return float(good)

    checks: dict[str, Callable[[], float]] = {
        "causal": causal, "aligned": lambda: pieces(ALIGNED), "ragged": lambda: pieces(RAGGED), "apart": apart, "inference": inference,
        "learns": learns, "finite": finite,
    }  # fmt: skip
    found: dict[str, float | str] = {}
    saved = copy.deepcopy(module.state_dict())
    for check, measure in checks.items():
        module.load_state_dict(saved)
        try:
            found[check] = measure()
        except Exception as error:
            found[check] = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    return found


def _relative(a: Any, b: Any) -> float:
    """Largest difference over the largest value."""
    return float((a - b).abs().max() / b.abs().max())


if __name__ == "__main__":
    main()
