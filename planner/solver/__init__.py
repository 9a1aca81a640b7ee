"""The exact search: the problem as numbers, made smaller, bounded, and solved."""
