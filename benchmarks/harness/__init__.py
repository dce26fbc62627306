"""Code that the benchmarks share: models, the systems that are compared, ranks and the link between them, tables."""
