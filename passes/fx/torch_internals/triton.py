"""Names that generated Triton kernels import. Import this module only where Triton is installed."""

# Generated source calls it to set Triton's real driver, which needs a GPU. Without a GPU, ``cuda_code`` replaces that function.
from torch._inductor.runtime import triton_helpers
