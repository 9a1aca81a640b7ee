"""Sharding rules along one mesh axis: which layouts of its inputs give which layouts of its outputs, op by op."""
