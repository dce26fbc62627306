"""The optimizer's step and gradient clipping over flat storage, instead of parameter by parameter (docs/optimizers.md)."""
