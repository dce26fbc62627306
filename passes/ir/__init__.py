"""Sharding in graphs: operators, the plan of a call, and the extra inputs and outputs of a lowered graph."""
