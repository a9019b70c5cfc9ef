"""Energy-based models: samplers, losses, couplings, and energies whose statistics are known."""
