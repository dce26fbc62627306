"""State: units, their parameters, and the memory of shards.

Attributes. Torch often passes nothing but a module, a parameter or a tensor: to a method, to an operator, to a graph that equal
blocks share. State that is needed there is an attribute of the module, parameter or tensor. The following list is complete,
with the files that set and read each attribute; ``tests/test_architecture.py`` compares it with the code.

On modules that were passed to ``fully_shard``:

``_fsdp_unit``
    The :class:`~.unit.Unit`. Methods and forwards of a module begin with ``self``.
    Set: ``fsdp_compile/api/module.py``. Read: there, ``fsdp_compile/api/gradient_controls.py``,
    ``fsdp_compile/api/schedule_controls.py``, ``fsdp_compile/comm_hooks/checkpoint.py``, ``fsdp_compile/dry_run.py``.
``_fsdp_scope``
    The unit's scope, read without the unit: each attribute that Dynamo reads on the way costs a guard.
    Set and read: ``fsdp_compile/api/module.py``.
``_fsdp_original_class``
    On a generated class: the class that it was made from. A slice of a sharded container is of that class.
    Set and read: ``fsdp_compile/api/module.py``.

On the tables that modules with sharded parameters have in the place of ``_parameters`` (:mod:`fsdp_compile.api.parameters`):

``_fsdp_shard_<name>``
    The arguments of ``unshard`` for one parameter, its shard first, so that Dynamo reads a single attribute.
    Set, and named: ``fsdp_compile/units/sharded_param.py``. Read by that name, and in ``fsdp_compile/api/parameters.py``.

On parameters that users have passed in:

``_fsdp_sharded_as``
    On a full parameter: its :class:`~.sharded_param.ShardedParam`. A module of another unit may register the same parameter.
    Set and read: ``fsdp_compile/api/sharding.py``.
``_fsdp_ignored``
    On a parameter in ``ignored_params``: the backend accepts it as an input of a graph.
    Set: ``fsdp_compile/api/sharding.py``. Read: ``fsdp_compile/compiler/backend.py``.

On shards, which graphs and autograd pass without their parameter:

``_fsdp_sharded_param``
    The :class:`~.sharded_param.ShardedParam`.
    Set: ``fsdp_compile/units/sharded_param.py``. Read: ``fsdp_compile/runtime/gradients.py``,
    ``fsdp_compile/api/parameters.py``, ``fsdp_compile/units/sharded_param.py``.

On storages, since a tensor's own attributes are saved with it, and views do not share them:

``_fsdp_lies_in``
    For a gradient, or a tensor of optimizer state: the run of a flat buffer that the tensor is.
    Set and read: ``fsdp_compile/units/param_state.py``.
``_fsdp_loan``
    For an output of a CUDA graph: an object that keeps the graph's memory from being overwritten while the output lives.
    Set and read: ``fsdp_compile/compiler/cuda_graphs.py``. Read: ``benchmarks/harness/replay.py``.

On the state object of a module, under names that torch's code reads:

``_fsdp_param_group``, ``_fsdp_param_groups``
    The unit, as pipelining sees it.
    Set and read: ``fsdp_compile/api/composable.py``.
"""
