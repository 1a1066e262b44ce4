"""What the device at hand asks of a kernel: operand type and precision of products, block sizes."""

# The bodies of kernels are another language, which no type checker follows.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

COUNTS = ["length", "chunks", "stride", "per", "layers"]  # arguments of every call: none may cost a compilation
LARGEST_WIDTH = 128  # a program holds whole rows of keys; wider ones would spill registers on every target


def require(where: str, *tensors: torch.Tensor) -> None:
    """Raises RuntimeError where no Triton kernel can run, TypeError for tensors that the kernels cannot read."""
    device = tensors[0].device
    if device.type != "cuda" and not knobs.runtime.interpret:
        raise RuntimeError(
            f"{where}: Triton kernels need a CUDA or HIP device, got tensors on {device}; "
            "use the torch form, or set TRITON_INTERPRET=1 before triton is imported to check numbers without a GPU"
        )
    for tensor in tensors:
        if tensor.device != device:
            raise RuntimeError(f"{where}: tensors on {device} and {tensor.device}; move them to one device")
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{where}: float32, bfloat16 or float16 tensors, got {tensor.dtype}; float64 has only the torch form")
    if knobs.runtime.interpret and any(tensor.dtype != torch.float32 for tensor in tensors):
        raise TypeError(f"{where}: Triton's interpreter multiplies 16-bit numbers wrongly; use float32 there")


def operand(dtype: torch.dtype) -> Any:
    """Type of the factors of a product. Sums are always float32; half becomes bfloat16, for states outgrow its range."""
    return tl.float32 if dtype == torch.float32 else tl.bfloat16


def storage(dtype: torch.dtype) -> torch.dtype:
    """Type in which results passed from one kernel to the next are kept."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def block(size: int) -> int:
    """Smallest block that holds `size` and that tensor cores take."""
    return max(16, triton.next_power_of_2(size))


def is_hip() -> bool:
    return torch.version.hip is not None


def precision() -> str:
    """Three tensor-core products for one of float32; HIP has no tf32. `ieee` would run on no tensor core at all."""
    return "bf16x3" if is_hip() else "tf32x3"


def options(stages: int, small: bool = False) -> dict[str, int]:
    """Warps of a program and loads in flight. Four wavefronts of HIP have as many lanes as eight warps, and 512 registers each."""
    return {"num_warps": 4 if small or is_hip() else 8, "num_stages": 1 if is_hip() else stages}


def some(unused: torch.Tensor, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """`unused`, a pointer that no program follows, where there is no tensor."""
    return tuple(unused if tensor is None else tensor for tensor in tensors)


def flat(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """(B, H, ...) -> (B * H, ...), contiguous."""
    return tuple(None if tensor is None else tensor.flatten(0, 1).contiguous() for tensor in tensors)


@triton.jit
def matmul(x, y, DT: tl.constexpr, PREC: tl.constexpr):
    return tl.dot(x.to(DT), y.to(DT), input_precision=PREC)


@triton.jit
def tile(p, base, row, rows, col, cols, width):
    """Rows `base + row` of a matrix of `width` columns, float32, zero outside.

    Only the base may exceed 32 bits: addresses of 64 bits for each element would take most registers of a kernel.
    """
    at = row[:, None] * width + col[None, :]
    return tl.load(p + base * width + at, mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0).to(tl.float32)


@triton.jit
def put(p, base, row, rows, col, cols, width, value):
    at = row[:, None] * width + col[None, :]
    tl.store(p + base * width + at, value.to(p.dtype.element_ty), mask=(row < rows)[:, None] & (col < cols)[None, :])
