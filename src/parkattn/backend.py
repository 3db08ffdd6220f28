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
from parkattn.ops.attend.definition import ROUNDINGS
from parkattn.ops.attend.tiles import HOPPER_HEAD_DIMS, TRITON_HEAD_DIMS
from parkattn.settings import BACKENDS, Precision

INT8_HEAD_DIMS = TRITON_HEAD_DIMS["int8"]
DTYPES = (torch.bfloat16, torch.float16)


def resolve_for(q: Tensor, name: str, precision: Precision = "bf16") -> Backend:
    """The backend for q [b h n d] and the tensors that go with it."""
    return resolve(name, q.device, q.dtype, q.shape[-1], precision)


def resolve(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, precision: Precision = "bf16"
) -> Backend:
    """The backend for q, k, v of this kind, or an error that names the one that would run.

    Where it cannot take Q K^T in the precision it takes it in the tensors' own dtype, and its reason says why.
    """
    expect_choice("backend", name, BACKENDS)
    expect_choice("precision", precision, ("bf16", *ROUNDINGS))
    chosen = name
    if name == "auto":
        chosen = "triton" if device.type == "cuda" else "reference"
    why = f"chosen by name (backend={name!r})" if name != "auto" else f"backend='auto' takes {chosen} on {device.type}"
    if chosen == "reference":
        why_not = None if precision == "bf16" else _why_not_defined(precision, head_dim)
        return _in_precision(Backend("reference", f"{why}: PyTorch definitions"), precision, why_not)
    kept = f"Q K^T in {str(dtype)[6:]}"
    if chosen == "flashinfer":
        from parkattn.ops.attend.flashinfer import flashinfer_package

        flashinfer_package()
        _attention_kernel(device, dtype, head_dim)
        reason = f"{why}: Triton kernels, attention in FlashInfer"
        why_not = f"{kept}, since FlashInfer's kernel has no {precision.upper()}"
        return _in_precision(Backend(chosen, reason), precision, why_not)
    hopper, because = _attention_kernel(device, dtype, head_dim)
    why_not = _why_no_kernel(precision, head_dim)
    if hopper and why_not is None and head_dim not in HOPPER_HEAD_DIMS.get(precision, ()):
        hopper, because = False, f"the Hopper kernel has no {precision.upper()} with head dim {head_dim}"
    reason = f"{why}: Triton kernels, attention in {'Gluon' if hopper else 'Triton'} because {because}"
    return _in_precision(Backend(chosen, reason, hopper=hopper), precision, why_not and f"{kept} and not {why_not}")


def _why_not_defined(precision: Precision, head_dim: int) -> str | None:
    why_not = ROUNDINGS[precision].why_not(head_dim)
    return why_not and f"Q K^T in the tensors' own dtype and not in {precision.upper()}, which is {why_not}"


def _why_no_kernel(precision: Precision, head_dim: int) -> str | None:
    dims = TRITON_HEAD_DIMS.get(precision, ())
    if head_dim in dims:
        return None
    listed = " and ".join(map(str, dims))
    has = f"whose kernels have head dims {listed}, not {head_dim}" if dims else "which has no kernel"
    return f"in {precision.upper()}, {has}"


def _in_precision(backend: Backend, precision: Precision, why_not: str | None) -> Backend:
    """The backend in this precision, or as it is with a reason that says why not."""
    if precision == "bf16":
        return backend
    taken = precision if why_not is None else backend.precision
    reason = f"{backend.reason}; {why_not or f'Q K^T in {precision.upper()}'}"
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
    if head_dim not in TRITON_HEAD_DIMS["bf16"]:
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
    if head_dim not in HOPPER_HEAD_DIMS["bf16"]:
        return False, f"the Hopper kernel has head dims 64 and 128, not {head_dim}"
    from parkattn.ops.triton_versions import why_no_gluon

    if because := why_no_gluon():
        return False, because
    return True, f"the GPU is sm_90 and the head dim {head_dim}"
