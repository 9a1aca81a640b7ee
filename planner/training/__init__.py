"""Training that survives the loss of processes: supervisor, epochs, state, and what a script calls."""
