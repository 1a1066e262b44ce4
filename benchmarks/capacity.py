"""What a matrix memory can hold: exactly stored pairs against the feature width, and what an Omega window adds in a stream.

Capacity: m random pairs can be stored with zero error up to m = binom(d + p, p) (ATLAS Prop. 2) and not beyond; on unit-norm keys up to
binom(d + p, p) - binom(d + p - 2, p - 2), because there sum x_i^2 = 1. Stored means: the least-squares memory has no error left. Beside it,
the error that the online delta rule reaches over many passes.

Recall: a stream of 160 random unit pairs, written once each; squared error of reading back the last 8, 16 and 48 (1: nothing stored).
Per rule the step with the least last-16 error of a grid, as a tuned user would find it. No outer training anywhere.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=8, help="streams in the recall experiment")
    options = parser.parse_args()
    report.limit_threads(options.threads)

    import torch

    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    figures = {
        "capacity": {f"d{d}_p{p}": capacity(d, p, options.seed) for d, p in ((8, 1), (8, 2), (8, 3), (16, 1), (16, 2))},
        "recall": recall(options.seeds, options.seed),
    }
    report.finish("capacity", figures, libraries=("torch",))


def capacity(d: int, degree: int, seed: int) -> dict[str, float]:
    """Pairs stored exactly, with free and with unit-norm keys, and the width the papers predict."""
    import torch

    from kernels.features import feature_width, polynomial, taylor_coefficients
    from kernels.linear import linear_exact, matrix_state

    width = feature_width(d, degree)
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(width + 8, d, generator=generator, dtype=torch.float64)
    values = torch.randn(width + 8, d, generator=generator, dtype=torch.float64)
    c = taylor_coefficients(degree, torch.float64)

    def stored(x: torch.Tensor) -> int:
        phi = polynomial(x, c)
        for m in range(1, len(x) + 1):
            solution = torch.linalg.lstsq(phi[:m], values[:m], driver="gelsd").solution
            if (phi[:m] @ solution - values[:m]).abs().max() > 1e-6:
                return m - 1
        return len(x)

    unit = torch.nn.functional.normalize(keys, dim=-1)
    half = width // 2  # half full: the online rule converges in a bounded number of passes
    passes = 200
    phi = polynomial(unit, c)[:half].repeat(passes, 1)[None, None]
    step = torch.ones(1, 1, half * passes, dtype=torch.float64)
    _, state = linear_exact(
        phi, phi, values[:half].repeat(passes, 1)[None, None], step, None, None,
        matrix_state(torch.zeros(1, d, width, dtype=torch.float64), 1), chunk=half,
    )  # fmt: skip
    online = (phi[0, 0, :half] @ state.W[0, 0].mT - values[:half]).square().mean()
    found = {
        "predicted": width,
        "stored": stored(keys),
        "stored_unit_keys": stored(unit),
        "online_error_half_full": float(online),
    }
    report.progress(f"capacity d={d} p={degree}: {found}")
    return found


def recall(seeds: int, seed: int) -> dict[str, dict[str, float]]:
    """Squared read-back error by rule."""
    import torch

    from kernels.features import polynomial, taylor_coefficients
    from kernels.linear import linear_stale, stale_state
    from kernels.muon import atlas, atlas_state
    from kernels.network import MATRIX

    d, T = 16, 160
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.nn.functional.normalize(torch.randn(2, seeds, 1, T, d, generator=generator), dim=-1)
    lifted = polynomial(keys, taylor_coefficients(2))
    ones = torch.ones(seeds, 1, T)

    def run(theta: float, c: int, eta: float, alpha: float, muon: bool, phi: torch.Tensor) -> torch.Tensor:
        gamma = ones.unsqueeze(-1).expand(seeds, 1, T, c)
        init = torch.zeros(1, d, phi.shape[-1])
        gates = (theta * ones, eta * ones if eta else None, alpha * ones if alpha else None)
        if muon:
            _, state = atlas(
                phi, phi, values, *gates, atlas_state([init], seeds, c), init=None, chunk=1, network=MATRIX, gamma=gamma
            )  # fmt: skip
            W = state.W[0]
        else:
            _, stale = linear_stale(phi, phi, values, *gates, stale_state(init, seeds, c), chunk=1, gamma=gamma)
            W = stale.W
        error = (phi @ W.mT - values).square().sum(-1)
        return torch.nan_to_num(error, nan=1e9, posinf=1e9)  # a diverged step loses the choice of theta

    rules = {
        "delta": (1, 0.0, 0.0, False, keys),
        "delta, forgetting": (1, 0.0, 0.02, False, keys),
        "momentum 0.5": (1, 0.5, 0.0, False, keys),
        "omega c=4": (4, 0.0, 0.0, False, keys),
        "omega c=16": (16, 0.0, 0.0, False, keys),
        "omega c=16, forgetting": (16, 0.0, 0.02, False, keys),
        "atlas c=16, eta 0.9": (16, 0.9, 0.02, True, keys),
        "atlas c=16, eta 0.5": (16, 0.5, 0.0, True, keys),
        "delta, degree 2": (1, 0.0, 0.0, False, lifted),
        "omega c=16, degree 2": (16, 0.0, 0.0, False, lifted),
        "omega c=48, degree 2": (48, 0.0, 0.0, False, lifted),
    }
    table = {}
    for name, (c, eta, alpha, muon, phi) in rules.items():
        errors = {theta: run(theta, c, eta, alpha, muon, phi) for theta in (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)}
        theta = min(errors, key=lambda x: float(errors[x][..., -16:].mean()))
        table[name] = {"theta": theta} | {f"last_{n}": round(float(errors[theta][..., -n:].mean()), 3) for n in (8, 16, 48)}
        report.progress(f"{name:<26} {table[name]}")
    return table


if __name__ == "__main__":
    main()
