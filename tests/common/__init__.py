"""Helpers shared by the test suites: a persistent pool of ranks, tiny models, and the parity harness."""
