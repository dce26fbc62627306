"""Sharding in graphs: operators, the plan of a call, and extra inputs and outputs of a lowered graph."""
