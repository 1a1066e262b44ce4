"""One token of a whole block of a language model as one native call, in place (`block_step.h`): nothing of a block is a graph of small
operations, which at one token cost more than their arithmetic. Weights are read where they lie and are never copied."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.linear import READS
from kernels.native import Form, _ops

KINDS = ("lmm", "window", "mag", "mal", "mac")
_PLAIN = Form(heads=1, scale=1.0, divisor=1.0, chunk=1)  # of a block without a memory


class BlockStep:
    """x (B, D) += mixer, then += feed-forward, for one token of B streams; everything float32 on the CPU and contiguous.

    weights, in this order, without what a kind lacks: norm before the mixer, norm before the feed-forward, gate and up (2 hidden, D), down
    (D, hidden); of attention qkv (3 D, D), out (D, D), rotary frequencies (d / 2), persistent keys and values (1, H, P, d); the norms of
    attention and of memory (mag, mac) or the one between them (mal); of the memory qkv, gate, gates, bias, conv, norm, out, and what
    it decays towards. memory: None for a window alone.
    """

    def __init__(self, kind: str, heads: int, weights: Sequence[Tensor], memory: Form | None) -> None:
        form = memory or _PLAIN
        self._call = _ops().block_step.default
        self._weights = [weight.detach() for weight in weights]
        self._kind = KINDS.index(kind)
        self._fixed = (
            heads, form.scale, form.divisor, form.momentum, form.decay, form.chunk, READS.index(form.read),
            form.network.norm, form.network.residual, form.network.eps,
        )  # fmt: skip

    def __call__(self, x: Tensor, state: list[Tensor], counts: list[Tensor]) -> None:
        """x (B, D) and the state are overwritten, under inference_mode only.

        state: keys and values (B, H, N, d) of attention; of mac those of what was retrieved, and the retrieval's convolution tail
        (B, taps - 1, D); the memory's tail (B, taps - 1, 3 D) and its tensors; of mac those of the memory that is read.
        counts (B,): tokens seen, or the place in the segment; phases of a deep memory, and of the one that is read.
        """
        self._call(x, self._kind, self._weights, state, counts, *self._fixed)


def norm_times(x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm(x) weight^T: x (B, D), norm (D,), weight (N, D) -> (B, N), float32 on the CPU, without autograd."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    _ops().norm_times(x, norm, weight, y)
    return y
