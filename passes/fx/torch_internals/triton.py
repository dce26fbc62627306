"""What Triton kernels that Inductor generated import. Needs Triton: import it where there is some."""

# Generated source has it set Triton's real driver, which wants a GPU; it is replaced while the source is loaded without one.
from torch._inductor.runtime import triton_helpers
