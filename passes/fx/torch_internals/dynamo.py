"""Dynamo."""

# ``cuda_code`` answers in its place what Dynamo and Inductor ask about a GPU.
from torch._dynamo import device_interface

# Held by whatever compiles; variants of a graph are lowered when Dynamo does not run.
from torch._dynamo.convert_frame import compile_lock

# The class of what ``torch.compile(module)`` returns: users may shard it, or the module in it.
from torch._dynamo.eval_frame import OptimizedModule

# What a model that cannot be traced raises, whatever the cause.
from torch._dynamo.exc import TorchDynamoException
