"""How a program is read and run: capture, canonical form, local programs, the parallel module, simulated ranks."""
