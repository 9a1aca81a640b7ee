"""A plan again for the devices that are left: candidates, plans of parts of a cluster, and the best of them."""
