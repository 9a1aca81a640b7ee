"""Why a plan is as it is: next bests, limits, conflicts, and how one price comes about."""
