"""A million tokens of adversarial streams through every rule: nothing becomes NaN or infinite, and the state stays bounded.

Eight streams meant to hurt (constant, all zero, one repeated token, scale 1e-6 to 1e6, sudden jumps, slow drift, alternating sign, spikes
of 1e6), each with random gates and with gates at their caps, run as one batch. Keys have unit norm and the steps obey the defaults of the
memory layer (E.2 of the tests' stability limits):

    exact matrix forms      theta = (1 - eta) * sigmoid(.)
    chunk-start forms       ... / C, and / c under an Omega window of c tokens
    deep memories           ... / d besides, keys scaled by sqrt(d), decay towards the initial weights

`non_finite` counts streams in which a number of the output or of the state was not finite, over all rules. For the worst stream of each
rule, `state_over_value` is the largest number of its state over the largest value written to it (or over 1), `growth` that number in the
last tenth of the stream over all before. `remembers_1e-5` counts the streams whose outputs still differ by more than 1e-3 after 4096
tokens because their first 64 values were larger by 1e-5: there the memory is finite and bounded, but its path is chaotic, and two
machines that round differently do not give the same forecasts.
Kernel memories over phi* (DeepTransformer, SWDT, Dot) are left out: their state grows by one row a token by definition.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

D, CHUNK, WINDOW = 16, 16, 4


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens a rule, over all of its streams")
    parser.add_argument("--call", type=int, default=1024, help="tokens a call")
    parser.add_argument("--rules", nargs="*", help="only these rules")
    options = parser.parse_args()
    report.limit_threads(options.threads)

    import torch

    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    every_rule = rules(options.seed)
    wanted = options.rules or list(every_rule)
    non_finite, by_rule = 0, {}
    with torch.inference_mode():
        for name in wanted:
            began = time.process_time()
            by_rule[name] = survive(*every_rule[name], options.tokens, options.call, options.seed)
            by_rule[name] |= sensitivity(*every_rule[name], options.seed)
            non_finite += by_rule[name]["non_finite"]
            report.progress(f"{name:<28} {by_rule[name]}  {time.process_time() - began:.0f} s")
    figures = {
        "non_finite": non_finite,
        "rules": len(by_rule),
        "tokens_a_rule": options.tokens,
        "largest_state_over_value": max(x["state_over_value"] for x in by_rule.values()),
        "largest_growth": max(x["growth"] for x in by_rule.values()),
        "chaotic_rules": sorted(name for name, x in by_rule.items() if x["remembers_1e-5"]),
        "by_rule": by_rule,
    }
    report.finish("stability", figures, libraries=("torch",))


def streams(tokens: int, seed: int) -> tuple[Any, Any]:
    """x (16, T, D) of the eight kinds twice, and 0/1 (16,): 1 where the gates stand at their caps."""
    import torch

    g = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    once, ramp = noise(D), torch.arange(tokens).unsqueeze(-1)
    steps = torch.randint(-6, 7, (tokens // 100 + 1, 1), generator=g).float()
    spikes = (torch.rand(tokens, 1, generator=g) < 0.001) * 1e6
    kinds = [
        once + 1e-3 * noise(tokens, D),  # constant but for noise
        torch.zeros(tokens, D),
        once.expand(tokens, D),  # one repeated token
        noise(tokens, D) * 10.0 ** steps.repeat_interleave(100, 0)[:tokens],  # scale 1e-6 to 1e6
        noise(tokens, D) + 1e3 * torch.sign(torch.sin(ramp / 500.0)),  # sudden jumps
        torch.sin(ramp / 1000.0 + noise(D)) + 0.01 * noise(tokens, D),  # slow drift: neighbouring keys almost equal
        once * (1 - 2 * (ramp % 2)),  # alternating sign
        noise(tokens, D) * (1 + spikes),
    ]
    x = torch.stack(kinds + kinds)
    return x, torch.tensor([0.0] * len(kinds) + [1.0] * len(kinds))


def calls(tokens: int, call: int, seed: int, deep: bool, divide: float) -> Iterator[list[Any]]:
    """q, k, v, theta, eta, alpha of one call after another, each (16, 1, n, ...)."""
    import torch

    x, capped = streams(tokens, seed)
    g = torch.Generator().manual_seed(seed + 1)
    project = torch.randn(3, D, D, generator=g) / D**0.5
    cap = torch.tensor([1.0, 0.95, 1e-3]).view(3, 1, 1)
    for at in range(0, tokens, call):
        part = x[:, at : at + call]
        q, k, v = (part @ w for w in project)
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-12) * (D**0.5 if deep else 1.0) for y in (q, k))
        free = torch.sigmoid(torch.randn(3, 16, part.shape[1], generator=g) + torch.tensor([0.0, 1.0, -4.0]).view(3, 1, 1))
        theta, eta, alpha = torch.where(capped.view(1, 16, 1) > 0, cap, free)
        theta = (1 - eta) * theta / divide / (D if deep else 1)
        yield [z.unsqueeze(1) for z in (q, k, v, theta, eta, alpha)]


def survive(step: Callable[..., Any], state: Any, deep: bool, divide: float, tokens: int, call: int, seed: int) -> dict[str, Any]:
    """Runs one rule over all streams; what the numbers did."""
    import torch

    from titans_core import state as value

    each = -(-tokens // 16)
    finite = torch.ones(16, dtype=torch.bool)
    early, late, largest = torch.zeros(16), torch.zeros(16), torch.ones(16)
    for number, given in enumerate(calls(each, call, seed, deep, divide)):
        y, state = step(*given, state)
        weights = [leaf for _, leaf in value.leaves(state) if leaf.is_floating_point()]
        for leaf in (y, *weights):
            finite &= leaf.flatten(1).isfinite().all(-1)
        size = torch.stack([leaf.abs().flatten(1).amax(-1) for leaf in weights if leaf.numel()]).amax(0)
        largest = torch.maximum(largest, given[2].abs().flatten(1).amax(-1))
        if number * call < 0.9 * each:
            early = torch.maximum(early, size)
        else:
            late = torch.maximum(late, size)
    written = early > 0
    return {
        "non_finite": int((~finite).sum()),
        "state_over_value": float((torch.maximum(early, late) / largest).max()),
        "growth": float((late[written] / early[written]).max()),
    }


def sensitivity(step: Callable[..., Any], state: Any, deep: bool, divide: float, seed: int) -> dict[str, int]:
    """How many of the 16 streams still tell after 4096 tokens that their first 64 values were larger by 1e-5."""
    import torch

    y = changed_y = torch.zeros(())
    changed = state
    for number, given in enumerate(calls(4096, 1024, seed, deep, divide)):
        y, state = step(*given, state)
        if number == 0:
            given[2] = torch.cat([given[2][:, :, :64] * (1 + 1e-5), given[2][:, :, 64:]], 2)
        changed_y, changed = step(*given, changed)
    apart = (y - changed_y).abs().flatten(1).amax(-1)
    return {"remembers_1e-5": int((apart > 1e-3 * y.abs().flatten(1).amax(-1)).sum())}


def rules(seed: int) -> dict[str, tuple[Callable[..., Any], Any, bool, float]]:
    """name -> (step, state of 16 streams, deep?, what theta is divided by besides)."""
    import torch

    from kernels import family
    from kernels.dispatch import deep, linear_exact, linear_stale  # what production runs on this machine
    from kernels.features import feature_width, polynomial, taylor_coefficients
    from kernels.linear import matrix_state, stale_state
    from kernels.mlp import deep_state
    from kernels.muon import atlas, atlas_state
    from kernels.network import DEFAULT, MATRIX, Network
    from kernels.omega import omega_exact, omega_state

    g = torch.Generator().manual_seed(seed + 2)
    h = 2 * D

    def weights(*shapes: tuple[int, int]) -> list[torch.Tensor]:
        return [torch.randn(1, *shape, generator=g) / shape[1] ** 0.5 for shape in shapes]

    zero = torch.zeros(1, D, D)
    two, three, gate = weights((h, D), (D, h)), weights((h, D), (h, h), (D, h)), weights((h, D), (h, D), (D, h))
    hybrid = Network(norm=False, unit_hidden=True)
    c = taylor_coefficients(2)

    def lags(theta: torch.Tensor) -> torch.Tensor:
        return theta.new_ones(*theta.shape, WINDOW)

    def lifted(q, k, v, t, e, a, s):  # type: ignore[no-untyped-def]
        return linear_exact(polynomial(q, c), polynomial(k, c), v, t, e, a, s)

    def deeper(init, network=DEFAULT, window=False, **options):  # type: ignore[no-untyped-def]
        def step(q, k, v, t, e, a, s):  # type: ignore[no-untyped-def]
            gamma = lags(t) if window else None
            return deep(q, k, v, t, e, a, s, init=init, chunk=CHUNK, network=network, gamma=gamma, **options)

        return step, deep_state(init, 16, WINDOW if window else 1), True, float(CHUNK * (WINDOW if window else 1))

    def muon(init, network, every):  # type: ignore[no-untyped-def]
        def step(q, k, v, t, e, a, s):  # type: ignore[no-untyped-def]
            return atlas(q, k, v, t, e, a, s, init=init, chunk=CHUNK, every=every, network=network, gamma=lags(t))

        return step, atlas_state(init, 16, WINDOW), network is not MATRIX, float(CHUNK)

    def stale(loss="l2", window=False):  # type: ignore[no-untyped-def]
        def step(q, k, v, t, e, a, s):  # type: ignore[no-untyped-def]
            return linear_stale(q, k, v, t, e, a, s, chunk=CHUNK, loss=loss, gamma=lags(t) if window else None)

        return step, stale_state(zero, 16, WINDOW if window else 1), False, float(CHUNK * (WINDOW if window else 1))

    wide = torch.zeros(1, D, feature_width(D, 2))
    return {
        "titans matrix exact": (lambda *x: linear_exact(*x), matrix_state(zero, 16), False, 1.0),
        "titans matrix exact, degree 2": (lifted, matrix_state(wide, 16), False, 1.0),
        "titans matrix chunk-start": stale(),
        "titans deep, 2 layers": deeper(two),
        "titans deep, 3 layers": deeper(three),
        "titans deep, gated": deeper(gate, Network(gated=True)),
        "titans deep, exact last layer": deeper(two, hybrid, exact_last=True),
        "omega matrix exact": (
            lambda q, k, v, t, e, a, s: omega_exact(q, k, v, t, e, a, lags(t), s),
            omega_state(zero, 16, WINDOW),
            False,
            float(WINDOW),
        ),
        "omega matrix chunk-start": stale(window=True),
        "omega deep (OmegaNet)": deeper(two, window=True),
        "atlas matrix, Muon a token": muon([zero], MATRIX, 1),
        "atlas deep, Muon a chunk": muon(two, DEFAULT, CHUNK),
        "atlas deep, Muon a token": muon(two, DEFAULT, 1),
        "delta net": (lambda q, k, v, t, e, a, s: family.delta_net(q, k, v, t, s), matrix_state(zero, 16), False, 1.0),
        "gated delta net": (lambda q, k, v, t, e, a, s: family.gated_delta_net(q, k, v, t, a, s), matrix_state(zero, 16), False, 1.0),
        "linear attention, decayed": (
            lambda q, k, v, t, e, a, s: family.decayed_linear_attention(q, k, v, t, a, s),
            stale_state(zero, 16),
            False,
            1.0,
        ),
        "swla": (lambda q, k, v, t, e, a, s: family.swla(q, k, v, t, a, lags(t), s), stale_state(zero, 16, WINDOW), False, 1.0),
        "dla": (
            lambda q, k, v, t, e, a, s: family.dla(q, k, v, t, a, s, init=two, chunk=CHUNK),
            deep_state(two, 16),
            True,
            float(CHUNK),
        ),
        "ttt": (lambda q, k, v, t, e, a, s: family.ttt(q, k, v, t, s, chunk=CHUNK), deep_state(two, 16), True, float(CHUNK)),
    }


if __name__ == "__main__":
    main()
