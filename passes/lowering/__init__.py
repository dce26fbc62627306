"""From a transformed graph to what runs: pieces for a compiler, the program that calls them, what it communicates."""
