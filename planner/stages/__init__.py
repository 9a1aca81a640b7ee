"""Pipelines joined to sharding: units, their shares of the plan's cost, stages, degrees."""
