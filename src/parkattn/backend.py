"""Which backend computes a call's operations, and why.

| name       | other operations    | attention                           | needs                               |
|------------|---------------------|-------------------------------------|-------------------------------------|
| reference  | PyTorch definitions | PyTorch definition                  | nothing                             |
| triton     | Triton kernels      | Gluon on sm_90, d 64 or 128; Triton | NVIDIA sm_80 or later, bf16 or fp16 |
| flashinfer | Triton kernels      | FlashInfer's variable-block wrapper | as triton, and parkattn[flashinfer] |

"auto" looks at the device alone: triton on CUDA, reference elsewhere. A backend that cannot run a call refuses it in
one line that names the alternative; nothing is replaced silently. `resolve(...).reason` names the choice and its cause.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from parkattn.checks import expect_choice
from parkattn.ops import Backend
from parkattn.settings import BACKENDS, Precision

HEAD_DIMS = (64, 128, 256)
HOPPER_HEAD_DIMS = (64, 128)
INT8_HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)


def resolve_for(q: Tensor, name: str, precision: Precision = "bf16") -> Backend:
    """The backend for q [b h n d] and the tensors that go with it."""
    return resolve(name, q.device, q.dtype, q.shape[-1], precision)


def resolve(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, precision: Precision = "bf16"
) -> Backend:
    """The backend for q, k, v of this kind, or an error that names the one that would run.

    Where it cannot take Q K^T in INT8 it takes it in the tensors' own dtype, and its reason says why.
    """
    expect_choice("backend", name, BACKENDS)
    chosen = name
    if name == "auto":
        chosen = "triton" if device.type == "cuda" else "reference"
    why = f"chosen by name (backend={name!r})" if name != "auto" else f"backend='auto' takes {chosen} on {device.type}"
    if chosen == "reference":
        return _in_precision(Backend("reference", f"{why}: PyTorch definitions"), precision, _no_rounding(head_dim))
    kept = f"Q K^T in {str(dtype)[6:]}"
    if chosen == "flashinfer":
        from parkattn.ops.attend.flashinfer import flashinfer_package

        flashinfer_package()
        _attention_kernel(device, dtype, head_dim)
        reason = f"{why}: Triton kernels, attention in FlashInfer"
        return _in_precision(Backend(chosen, reason), precision, f"{kept}, since FlashInfer's kernel has no INT8")
    hopper, because = _attention_kernel(device, dtype, head_dim)
    reason = f"{why}: Triton kernels, attention in {'Gluon' if hopper else 'Triton'} because {because}"
    no_int8 = f"{kept} and not in INT8, whose kernels have head dims 64 and 128, not {head_dim}"
    return _in_precision(
        Backend(chosen, reason, hopper=hopper), precision, None if head_dim in INT8_HEAD_DIMS else no_int8
    )


def _no_rounding(head_dim: int) -> str | None:
    if head_dim & (head_dim - 1) == 0:
        return None
    own = "Q K^T in the tensors' own dtype and not in INT8, which is defined for head dims that are powers of two"
    return f"{own}, not {head_dim}"


def _in_precision(backend: Backend, precision: Precision, why_not: str | None) -> Backend:
    """The backend in this precision, or as it is with a reason that says why not."""
    if precision == "bf16":
        return backend
    taken = precision if why_not is None else backend.precision
    reason = f"{backend.reason}; {why_not or 'Q K^T in INT8'}"
    return Backend(backend.name, reason, taken, backend.hopper)


def _attention_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[bool, str]:
    """Whether the Hopper kernels run, and why or why not."""
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError(
            "backend 'triton': the package triton is not installed; "
            "pip install 'parkattn[triton]', or use backend='reference'."
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise ValueError(
            f"backend: expected a CUDA device for 'triton', got {device}; "
            "move q, k, v to CUDA or use backend='reference'."
        )
    if dtype not in DTYPES:
        raise TypeError(
            f"backend: expected bfloat16 or float16 for 'triton', got {dtype}; cast q, k, v or use backend='reference'."
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"backend: expected a head dim of 64, 128 or 256 for 'triton', got {head_dim}; use backend='reference'."
        )
    if interpreted:
        return False, "TRITON_INTERPRET=1 runs no Gluon"
    if torch.version.hip is not None:
        raise ValueError(
            "backend: expected an NVIDIA GPU for 'triton', got an AMD one, untested; use backend='reference'."
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"backend: expected a GPU from sm_80 on for 'triton', got sm_{major}{minor}; use backend='reference'."
        )
    if (major, minor) != (9, 0):
        return False, f"the GPU is sm_{major}{minor}, not sm_90"
    if head_dim not in HOPPER_HEAD_DIMS:
        return False, f"the Hopper kernel has head dims 64 and 128, not {head_dim}"
    from parkattn.ops.triton_versions import why_no_gluon

    if because := why_no_gluon():
        return False, because
    return True, f"the GPU is sm_90 and the head dim {head_dim}"
