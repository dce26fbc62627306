"""What the benchmarks share: the model, the systems that are compared, ranks and the link between them, tables."""
