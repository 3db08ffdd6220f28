"""Operations, one folder each: `definition.py` is the paper's equation in PyTorch, the other files compute it in
kernels.

Kernels take and return plain tensors. They import torch, triton and one another, nothing else of parkattn.
"""


def keep_scratch_in_torch() -> None:
    """Memory for what a sanitizer of Triton's keeps per launch; our kernels need none."""
    import torch
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
