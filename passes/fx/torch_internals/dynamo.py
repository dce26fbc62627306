"""Dynamo."""

# Formulae are made of graphs in which batch and sequence are symbols, where the model lets them be.
# ``cuda_code`` answers in its place what Dynamo and Inductor ask about a GPU.
from torch._dynamo import device_interface, maybe_mark_dynamic

# Held by whatever compiles; variants of a graph are lowered when Dynamo does not run.
from torch._dynamo.convert_frame import compile_lock

# The class of what ``torch.compile(module)`` returns: users may shard it, or the module in it.
from torch._dynamo.eval_frame import OptimizedModule

# What a model that cannot be traced raises, whatever the cause.
from torch._dynamo.exc import TorchDynamoException

# What a symbol of ShapeEnv comes from; those for numbers of ranks come from nowhere in a frame.
from torch._dynamo.source import ConstantSource

# Dynamo's view of a value that traced code reads: of a constant, such as the name of a parameter.
from torch._dynamo.variables import ConstantVariable
