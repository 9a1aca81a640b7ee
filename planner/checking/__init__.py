"""Does the planned program compute what the model computes? On simulated ranks and on real processes."""
