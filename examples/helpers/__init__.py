"""Everything of the examples that is not about sharding."""
