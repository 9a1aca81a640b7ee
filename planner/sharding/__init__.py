"""From a captured program to a problem and back: strategies, moves, prices, memory, constraints, recipes."""
