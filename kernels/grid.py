"""How the tokens of one call fall into chunks, when every stream may stand at another place of its open chunk.

A chunk of the papers' stale form is C *written* tokens that share one anchor. A stream carries `phase`, the number of tokens its open
chunk already holds, so one call may begin in the middle of a chunk, in a different middle for each stream. The grid lays the call's
tokens out as (chunk, stream * head, slot); slots without a token are marked not `live` and neither write nor are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def part_of(x: Tensor | None, at: slice) -> Tensor | None:
    """The tokens `at` of an optional (B, H, T, ...) tensor."""
    return None if x is None else x[:, :, at]


@dataclass(frozen=True)
class Grid:
    """chunks N of `slots` S each for `tokens` T of B streams.

    live (B or 1, N, S) bool or None (every slot writes); source (B, N * S) token index of each slot with T for "none", or None when
    the tokens lie in order after `front` empty slots. place (B, T) is the inverse of source.
    last (B,) index of the last chunk in which the stream writes, -1 if it writes nothing; None: the last chunk for all.
    phase (B,) after the call.
    """

    tokens: int
    chunks: int
    slots: int
    front: int
    live: Tensor | None
    source: Tensor | None
    place: Tensor | None
    last: Tensor | None
    phase: Tensor | None

    def split(self, x: Tensor) -> Tensor:
        """(B, H, T, ...) -> (N, B * H, S, ...), contiguous, zeros in empty slots."""
        B, H = x.shape[:2]
        rest = x.shape[3:]
        if self.source is not None:
            x = torch.cat([x, x.new_zeros(B, H, 1, *rest)], 2)
            index = self.source.view(B, 1, -1, *[1] * len(rest)).expand(B, H, -1, *rest)
            x = x.gather(2, index)
        else:
            behind = self.chunks * self.slots - self.front - self.tokens
            if self.front or behind:
                x = torch.nn.functional.pad(x, [0, 0] * len(rest) + [self.front, behind])
        return x.reshape(B * H, self.chunks, self.slots, *rest).transpose(0, 1).contiguous()

    def split_window(self, x: Tensor, tail: Tensor) -> Tensor:
        """x (B, H, T, d) after the c - 1 rows of `tail` -> (N, B * H, c - 1 + S, d): each chunk with the c - 1 tokens before it."""
        B, H, T, d = x.shape
        lags = tail.shape[2]
        if lags == 0:
            return self.split(x)
        x = torch.cat([tail, x], 2)
        width = lags + self.slots
        if self.source is None:
            behind = self.chunks * self.slots - self.front - T
            x = torch.nn.functional.pad(x, [0, 0, self.front, behind]).unfold(2, width, self.slots)  # (B, H, N, d, width)
            return x.permute(2, 0, 1, 4, 3).reshape(self.chunks, B * H, width, d)
        opened = self.source.view(B, self.chunks, self.slots)[:, :, :1]  # slot 0 of a chunk is its first token
        index = (opened + torch.arange(width, device=x.device)).clamp(max=lags + T - 1)  # (B, N, width); rows past the end never write
        index = index.view(B, 1, -1, 1).expand(B, H, -1, d)
        return x.gather(2, index).view(B * H, self.chunks, width, d).transpose(0, 1).contiguous()

    def join(self, y: Tensor, B: int, H: int) -> Tensor:
        """(N, B * H, S, d) -> (B, H, T, d), the inverse of `split`."""
        d = y.shape[-1]
        y = y.transpose(0, 1).reshape(B, H, self.chunks * self.slots, d)
        if self.place is not None:
            return y.gather(2, self.place.view(B, 1, -1, 1).expand(B, H, -1, d))
        return y[:, :, self.front : self.front + self.tokens]

    def writes(self, B: int, H: int) -> Tensor | None:
        """`live` as (N, B * H, S), for the coefficient block."""
        if self.live is None:
            return None
        live = self.live.expand(B, -1, -1).unsqueeze(1).expand(B, H, -1, -1)
        return live.reshape(B * H, self.chunks, self.slots).transpose(0, 1)


def fixed_grid(T: int, chunk: int, write: Tensor | None, device: torch.device) -> Grid:
    """Chunks counted from the call's first token: for the exact form, whose result does not depend on where chunks begin.

    write (B, T) bool or None.
    """
    slots = min(chunk, T)
    chunks = -(-T // slots)
    behind = chunks * slots - T
    live = None
    if write is not None:
        live = torch.nn.functional.pad(write, [0, behind]).view(-1, chunks, slots)
    elif behind:
        filled = torch.arange(chunks * slots, device=device) < T
        live = filled.view(1, chunks, slots)
    return Grid(T, chunks, slots, 0, live, None, None, None, None)


def check_phase(phase: Tensor, chunk: int) -> tuple[int, int]:
    """Lowest and highest phase; a state made with another chunk size is a user error, not a memory to continue."""
    low, high = (int(p) for p in phase.aminmax())
    if high >= chunk or low < 0:
        raise ValueError(f"phase must lie in [0, chunk): found {low}..{high} with chunk {chunk}; was the state made with another chunk?")
    return low, high


def phased_grid(T: int, chunk: int, phase: Tensor, write: Tensor | None) -> Grid:
    """Chunks of `chunk` written tokens, the first of them already holding `phase` (B,) tokens of earlier calls.

    An unwritten token takes no slot of the count: it reads the memory and leaves it, phase included, exactly as it was.
    """
    low, high = check_phase(phase, chunk)
    if write is None:
        after = (phase + T) % chunk
        if high + T <= chunk:  # all in the open chunk, wherever each stream stands: streaming steps end here
            return Grid(T, 1, T, 0, None, None, None, None, after)
        if low == high:
            chunks = -(-(low + T) // chunk)
            slot = torch.arange(chunks * chunk, device=phase.device)
            live = ((slot >= low) & (slot < low + T)).view(1, chunks, chunk)
            whole = low == 0 and T % chunk == 0
            return Grid(T, chunks, chunk, low, None if whole else live, None, None, None, after)
        write = torch.ones(1, T, dtype=torch.bool, device=phase.device).expand(phase.shape[0], T)
    B = phase.shape[0]
    ones = write.long()
    written = ones.cumsum(-1)
    before = written - ones
    chunk_of = (phase.unsqueeze(-1) + before) // chunk  # (B, T)
    chunks = int(chunk_of.max()) + 1
    time = torch.arange(T, device=phase.device)
    opened = torch.full((B, chunks), T, device=phase.device).scatter_reduce(
        -1, chunk_of, time.expand(B, T), reduce="amin", include_self=True
    )
    slot_of = time - opened.gather(-1, chunk_of)
    slots = int(slot_of.max()) + 1
    place = chunk_of * slots + slot_of
    source = torch.full((B, chunks * slots), T, device=phase.device).scatter(-1, place, time.expand(B, T))
    live = torch.zeros(B, chunks * slots, dtype=torch.bool, device=phase.device).scatter(-1, place, write)
    total = written[:, -1]
    last = torch.where(write, chunk_of, -1).amax(-1)
    return Grid(T, chunks, slots, 0, live.view(B, chunks, slots), source, place, last, (phase + total) % chunk)
