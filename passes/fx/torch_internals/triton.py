"""Names that generated Triton kernels import. Import this module only where Triton is installed."""

# Generated source has it set Triton's real driver, which wants a GPU; it is replaced while the source is loaded without one.
from torch._inductor.runtime import triton_helpers
