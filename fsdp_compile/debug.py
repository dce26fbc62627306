"""See what compilation makes of a model: the graphs of a run, and the code for a GPU without one."""

from .compiler.capture import Capture, CapturedPass, capture
from .compiler.captured_graph import CapturedGraph
from .cuda.code import CudaCode, cuda_code
from .cuda.outline import cuda_outline

__all__ = ["Capture", "CapturedGraph", "CapturedPass", "CudaCode", "capture", "cuda_code", "cuda_outline"]
