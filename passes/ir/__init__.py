"""What graphs say about sharding: operators, the plan of a call, what a lowered graph takes and gives."""
