"""The planner: turns costs and limits into one chosen layout per node."""
