"""Where the chunks of one call begin, stream by stream (twin of `kernels.grid`).

A chunk of the stale forms is `chunk` written tokens that share one anchor; a stream carries `phase`, the number of them
that its open chunk already holds. Programs read the first token of their chunk from a table and lay its tokens out from
row 0 on, so streams in different places of their chunks share one launch.
"""

# The bodies of kernels are another language, which no type checker follows.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.target import block

LARGEST_CHUNK = 128  # rows of one program; the chunk's matrices have the square of it


@dataclass(frozen=True)
class Cut:
    """T tokens of B streams in at most X chunks."""

    length: int  # T
    chunks: int  # X
    slots: int  # most tokens in a chunk
    window: int  # keys that one write looks at, Omega's c
    starts: torch.Tensor  # (B or 1, X + 1) int32 first token of each chunk, T behind the last
    live: torch.Tensor | None  # (B, T) int8; 0: the token reads and writes nothing
    carried: torch.Tensor | None  # (B,) int32; 1: the first chunk was opened by an earlier call
    last: torch.Tensor | None  # (B,) int32 last chunk in which the stream writes, -1: none
    phase: torch.Tensor | None  # (B,) after the call

    @property
    def tokens(self) -> int:
        return block(self.slots)

    @property
    def keys(self) -> int:
        return block(self.slots + self.window - 1)

    @property
    def stride(self) -> int:
        return 0 if self.starts.shape[0] == 1 else self.starts.shape[1]

    def blocks(self, like: torch.Tensor, rows: int, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One block for each of `rows` and each chunk, not filled."""
        return torch.empty(rows, self.chunks, *sizes, device=like.device, dtype=dtype)


def fixed_cut(T: int, chunk: int, write: torch.Tensor | None, device: torch.device) -> Cut:
    """For the exact form, whose result does not depend on where chunks begin; write (B, T) bool."""
    slots = min(chunk, T)
    chunks = triton.cdiv(T, slots)
    starts = (torch.arange(chunks + 1, device=device, dtype=torch.int32) * slots).clamp(max=T).unsqueeze(0)
    return Cut(T, chunks, slots, 1, starts, None if write is None else write.to(torch.int8).contiguous(), None, None, None)


def phased_cut(T: int, chunk: int, phase: torch.Tensor, write: torch.Tensor | None, window: int) -> Cut:
    """Chunks of `chunk` written tokens, the first of them already holding `phase` (B,) tokens of earlier calls.

    Tokens that do not write lie in the chunk of the next write, so `slots` may exceed `chunk`; above LARGEST_CHUNK the call
    has to be made in pieces.
    """
    carried = (phase > 0).to(torch.int32)
    if write is None:
        chunks = triton.cdiv(T + chunk - 1, chunk)
        edges = torch.arange(chunks + 1, device=phase.device) * chunk - phase.unsqueeze(-1)
        starts = edges.clamp(0, T).to(torch.int32)
        last = ((phase + T - 1) // chunk).to(torch.int32)
        slots = min(chunk, T)
        return Cut(T, chunks, slots, window, starts, None, carried, last, (phase + T) % chunk)
    ones = write.long()
    written = ones.cumsum(-1)
    chunk_of = (phase.unsqueeze(-1) + written - ones) // chunk  # never falls along a row
    chunks = int(chunk_of[:, -1].max()) + 1
    edges = torch.arange(chunks + 1, device=phase.device).expand(phase.shape[0], -1).contiguous()
    starts = torch.searchsorted(chunk_of, edges)
    slots = int(starts.diff(dim=-1).max())
    last = torch.where(write, chunk_of, -1).amax(-1).to(torch.int32)
    live = write.to(torch.int8).contiguous()
    return Cut(T, chunks, slots, window, starts.to(torch.int32), live, carried, last, (phase + written[:, -1]) % chunk)


@triton.jit
def span(starts_p, stream, stride, chunk):
    """First token and number of tokens of a chunk; a call may leave a stream fewer chunks than others, then there are none."""
    at = starts_p + stream * stride + chunk
    start = tl.load(at)
    return start, tl.load(at + 1) - start
